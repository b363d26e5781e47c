"""Starts the ranks of a node without torchrun: by exec, or forked from a process that has imported torch."""
