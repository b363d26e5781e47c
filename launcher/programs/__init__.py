"""The bundled training program, an ordinary one: it knows torchrun's variables and its own options."""
