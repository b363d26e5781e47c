"""Judges a machine and its last run: facts in, findings out; nothing is read or changed here."""
