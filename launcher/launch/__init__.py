"""Starts a node's ranks, by exec, by fork of a process with torch, or by torchrun, and supervises them."""
