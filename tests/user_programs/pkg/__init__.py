"""A package that is run by `python -m`."""

print("pkg is imported")
