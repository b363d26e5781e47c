"""What acts inside the user's interpreter; the shim puts this folder on a rank's PYTHONPATH.

The package in it has a name of its own, since the user's program may have a module named `launcher`.
"""
