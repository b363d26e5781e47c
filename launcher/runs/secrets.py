"""Values that must not be written down: recognised by the name of the variable or option they belong to."""

import re
from collections.abc import Mapping, Sequence

SECRET = re.compile(
    r"(?i)token(?!iz|s)|secret|passw|passphrase|credential|api_?-?key|access_?-?key|private_?-?key|[_.-]key\b"
    r"|auth(?!or(?!iz))"
)
"""Names that hold secrets, as log filters of CI services know them; no `tokenizer`, `max_tokens`."""
VALUE = re.compile(r"[\w.-]{0,99}[\"']?\s*[:=]\s*(?=\S)")
"""From a secret's name to its value: `HF_TOKEN=…`, `{hf_token: …}`, `Authorization: Bearer …`."""
LOGIN = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
"""User and password in a URL."""
MASK = "***"


def is_secret(name: str) -> bool:
    """Tell whether a variable or option of this name holds a secret."""
    return bool(SECRET.search(name))


def mask_words(words: Sequence[str]) -> list[str]:
    """Mask the secrets in a command line: `env.HF_TOKEN=…`, `--api-key=…` and the word after `--api-key`."""
    masked: list[str] = []
    after_secret = False
    for word in words:
        masked.append(MASK if after_secret and not word.startswith("-") else mask_text(word))
        after_secret = word.startswith("-") and "=" not in word and is_secret(word)
    return masked


def mask_text(text: str) -> str:
    """Mask what follows the first secret's name, to the end of the text, and logins in URLs.

    A list, as in `program.command=[train.py,--api-key,abc]`, is masked like a command line.
    """
    head, opening, body = text.partition("=[")
    if opening:
        return mask_text(head) + opening + ",".join(mask_words(body.split(",")))
    for name in SECRET.finditer(text):
        if value := VALUE.match(text, name.end()):
            return LOGIN.sub(MASK, text[: value.end()]) + MASK
    return LOGIN.sub(MASK, text)


def mask_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables of an environment as they may be shown and written down."""
    return {name: MASK if is_secret(name) else mask_text(value) for name, value in variables.items()}


def mask_tree(value: object, *, hide: bool = False) -> object:
    """Mask the secrets in nested mappings and lists, by the names of the keys above each value."""
    if isinstance(value, dict):
        return {key: mask_tree(item, hide=hide or is_secret(str(key))) for key, item in value.items()}
    if isinstance(value, list) and not hide and all(isinstance(item, str) for item in value):
        return mask_words(value)
    if isinstance(value, list):
        return [mask_tree(item, hide=hide) for item in value]
    if hide:
        return value if value is None or isinstance(value, bool) else MASK
    return mask_text(value) if isinstance(value, str) else value
