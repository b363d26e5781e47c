"""A program's optimizer steps on fake tensors, for `launch fit`: no GPU, and the memory that they would take.

These modules import torch. They are loaded once the program has imported it, and in `launch fit` alone.
"""
