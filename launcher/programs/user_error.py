"""The error for a mistake of the user's."""


class OptionError(ValueError):
    """An option, a file or a directory cannot be used: one line with the values and the fix."""
