"""The configuration: settings with what they take, composed by Hydra, and the rules across them."""
