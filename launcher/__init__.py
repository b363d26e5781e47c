"""`launch` starts distributed PyTorch training, every rank in its right place."""
