"""A user's module that is named as the launcher's package."""

NAME = "the user's own launcher"
