"""Command-line options made from dataclasses: one long option for each field."""

import argparse
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


class OptionError(ValueError):
    """An option, a file or a directory cannot be used: one line with the values and the fix."""


def option(default: Any, text: str, *choices: str) -> Any:  # noqa: ANN401 - stands for a field of any type
    """Declare a dataclass field that is also a command-line option; `text` is its help."""
    return field(default=default, metadata={"help": text, "choices": choices or None})


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, since each rank of a job prints them."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def name_option(prefix: str, name: str) -> str:
    """Spell a field as on the command line: `--model.kv_heads` in a section, `--batch-size` outside."""
    return prefix + name if prefix else name.replace("_", "-")


def find_value_type(hint: Any) -> type:  # noqa: ANN401 - a type hint
    """Give the type that parses a field's text: `int` for `int | None`."""
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not types.NoneType)
    kind: type = hint
    return kind


def add_option(parser: argparse._ActionsContainer, prefix: str, item: Field[Any], kind: type) -> None:
    """Add the option of one field."""
    default = "" if item.default in (None, "") else f" (default: {item.default})"
    shared = {"default": item.default, "help": item.metadata["help"] + default, "dest": prefix + item.name}
    flag = "--" + name_option(prefix, item.name)
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **shared)
    else:
        choices = item.metadata["choices"]
        metavar = None if choices else kind.__name__.upper()
        parser.add_argument(flag, type=kind, choices=choices, metavar=metavar, **shared)


def add_options(parser: argparse.ArgumentParser, title: str, prefix: str, cls: type) -> None:
    """Add an option for each field of a dataclass whose fields were declared by `option`."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(cls)
    for item in fields(cls):
        assert item.default is not MISSING, f"{cls.__name__}.{item.name} is not an option"  # noqa: S101
        add_option(group, prefix, item, find_value_type(hints[item.name]))


def build_from_options(found: argparse.Namespace, prefix: str, cls: type[Options]) -> Options:
    """Build the dataclass from parsed arguments."""
    return cls(**{item.name: getattr(found, prefix + item.name) for item in fields(cls)})


def parse_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, *parts: tuple[str, type]
) -> list[Any]:
    """Parse argv into one value for each (prefix, dataclass)."""
    found = parser.parse_args(argv)
    return [build_from_options(found, prefix, cls) for prefix, cls in parts]
