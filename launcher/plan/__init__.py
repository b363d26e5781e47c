"""Computes the placement of a node's ranks: pure values in, pure values out."""
