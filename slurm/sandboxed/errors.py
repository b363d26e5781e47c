"""The error that a user sees."""


class SandboxError(Exception):
    """What happened, with the values, then the fix."""
