"""Checks of every node of a job before its program starts."""
