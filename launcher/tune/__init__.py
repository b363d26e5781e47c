"""Finds settings by trying them: which to try next, and what the trials' records say."""
