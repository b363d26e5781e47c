"""The configuration: Hydra's schema, composition and search path, and the checks of its values."""
