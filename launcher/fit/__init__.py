"""Memory, node budget, arithmetic and speed of a training job before its start. Pure."""
