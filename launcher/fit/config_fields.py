"""Typed fields of a config.json: each one checked, with an error that names it and the fix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import UsageError

LARGEST = 1 << 27
"""No dimension of a model is larger: contexts of 10,485,760 and vocabularies of 262,208 are published."""
SHOWN = 60
"""Characters of a value in an error."""


def show_field(value: object) -> str:
    """Write a value of unknown origin, short and in printable characters."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields of a JSON object, by any of their names; raises UsageError for what cannot be used."""

    values: Mapping[str, object]
    file: str
    """For errors."""

    def find(self, names: Sequence[str]) -> tuple[str, object]:
        """Return the first of some names that is there, and its value; null counts as absent."""
        found = ((name, self.values[name]) for name in names if self.values.get(name) is not None)
        return next(found, (names[0], None))

    def fail(self, name: str, problem: str, fix: str) -> UsageError:
        """Make the error of a field."""
        return UsageError(f"{self.file}: {name} {problem}: {fix}")

    def read_count(self, *names: str, least: int = 1, default: int | None = None) -> int:
        """Read a whole number; raises UsageError if there is none and no default, or it cannot be."""
        name, value = self.find(names)
        if value is None and default is not None:
            return default
        if value is None:
            shown = " or ".join(names)
            raise self.fail(shown, "is missing", f"add it, a whole number of at least {least}")
        # A width of 4096.0 is a mistake of whoever wrote the file, but true is not 1 either.
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(name, f"is {show_field(value)}, no whole number", f"give one of at least {least}")
        if not least <= value <= LARGEST:
            raise self.fail(
                name,
                f"is {show_field(value)}",
                f"give a whole number of at least {least} and at most {LARGEST}",
            )
        return value

    def read_flag(self, *names: str, default: bool) -> bool:
        """Read true or false."""
        name, value = self.find(names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, f"is {show_field(value)}", "give true or false")
        return value

    def read_list(self, name: str) -> Sequence[object]:
        """Read a list; absent is empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.fail(
                name, f"is {show_field(value)}, no list", "give a list of layers, or leave it out"
            )
        return value
