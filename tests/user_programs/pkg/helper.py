"""A module of the package."""

VALUE = 7
