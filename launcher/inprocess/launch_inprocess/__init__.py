"""Garbage collection and DataLoaders inside a rank's interpreter, which may be another than the launcher's.

Standard library alone, for Python 3.9 and later; torch is there once the program has imported it.
"""
