"""Reads what the node has and what this job may use of it."""
