"""Values that must not be written down: recognised by the name of the variable or option they belong to."""

import re
from collections.abc import Sequence

SECRET = re.compile(
    r"(?i)(token|secret|passw|passphrase|credential|api_?-?key|access_?-?key|private_?-?key|auth)"
)
"""Names that hold secrets, as log filters of CI services know them."""
MASK = "***"


def is_secret(name: str) -> bool:
    """Tell whether a variable or option of this name holds a secret."""
    return bool(SECRET.search(name))


def mask_words(words: Sequence[str]) -> list[str]:
    """Mask the secrets in a command line: `env.HF_TOKEN=…`, `--api-key=…` and the word after `--api-key`."""
    masked: list[str] = []
    after_secret = False
    for word in words:
        name, equals, _ = word.partition("=")
        if after_secret and not word.startswith("-"):
            masked.append(MASK)
        else:
            masked.append(f"{name}={MASK}" if equals and is_secret(name) else word)
        after_secret = word.startswith("-") and not equals and is_secret(name)
    return masked


def mask_tree(value: object, name: str = "") -> object:
    """Mask the secrets in nested mappings and lists, by the name of the key above each value."""
    if isinstance(value, dict):
        return {key: mask_tree(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return (
            mask_words(value)
            if all(isinstance(item, str) for item in value)
            else [mask_tree(v) for v in value]
        )
    return MASK if value is not None and is_secret(name) and isinstance(value, str) else value
