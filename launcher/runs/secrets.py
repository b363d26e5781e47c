"""Values that must not be written down: known by the name of their variable or option, or by their form."""

import re
from collections.abc import Callable, Mapping, Sequence

SECRET = re.compile(
    r"(?i)token(?!iz|s)|secret|passw|passphrase|(?<![a-z])(?:pass|pw|creds?)(?![a-z])|credential|signature"
    r"|api_?-?key|access_?-?key|private_?-?key|[_.-]key\b|auth(?!or(?!iz))"
    r"|webhook|notify(?:\.|=\{.{0,200}?)(?:ping_)?url\b"
)
"""Names that hold secrets, as log filters of CI services know them; no `tokenizer`, `max_tokens`. Whoever has
the address of a hook can post to it."""
HOOKS = {("notify", "url"), ("notify", "ping_url")}
"""The same, as keys in a tree: the one above, and the key."""
VALUE = re.compile(r"[\w.-]{0,99}[\"']?\s*[:=]\s*(?=\S)(?!null\Z)")
"""From a secret's name to its value: `HF_TOKEN=…`, `{hf_token: …}`, `Authorization: Bearer …`; no `null`."""
OPTION = re.compile(r"(?<![\w-])(--?[A-Za-z][\w.-]{0,99})[ \t]+(?=[^\s-])")
"""An option and the space before its value within a text, as in `bash -c 'train --token …'`."""
LOGIN = re.compile(r"(?<=://)[^/\s:@]*:[^/\s]+(?=@)")
"""User and password in a URL."""
TOKEN = re.compile(
    r"""(?xs)(?<![\w-])(?:
        (?:hf|api_org)_[A-Za-z0-9]{30,}                          # Hugging Face
      | gh[oprsu]_[A-Za-z0-9]{30,} | github_pat_\w{22,}          # GitHub
      | gl[a-z]{2,6}-[\w-]{20,}                                  # GitLab
      | sk-(?=[\w-]*[A-Z])(?=[\w-]*\d)[\w-]{20,}                 # OpenAI, Anthropic, and others like them
      | sk-(?:[a-z0-9]{1,10}-){0,3}(?=[a-z]*\d)[a-z0-9]{20,}
      | (?:gsk|r8|sk_live|rk_live|npm|wandb_v\d)_\w{20,}         # Groq, Replicate, Stripe, npm, W&B
      | nvapi-[\w-]{20,} | dapi[0-9a-f]{32} | dckr_pat_[\w-]{20,} | pypi-AgE[\w-]{20,}
      | A(?:KI|SI)A[0-9A-Z]{16}(?![0-9A-Za-z])                   # AWS
      | AIza[\w-]{35} | ya29\.[\w-]{20,}                         # Google
      | xox[a-z]-[\w-]{10,} | xapp-[\w-]{20,}                    # Slack
      | eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+                       # JSON web tokens (RFC 7519)
      | https://(?:hooks\.slack\.com|hc-ping\.com|discord\.com/api/webhooks)/[^\s"'<>,\])}]+
      | -----BEGIN[ ][A-Z ]{0,40}PRIVATE[ ]KEY-----.*
    )"""
)
"""Tokens by the forms that their issuers give them so that they are found (GitHub's secret scanning)."""
PASSWORD = ("-p", "-P")
"""Options whose value is a password as often as not (sshpass, twine, docker login)."""
LOGINS = ("-u", "--user", "--proxy-user")
"""Options whose value may be USER:PASSWORD (curl)."""
PLAIN = re.compile(r"[+-]?\d[\d.,:%eE_+-]*|(?:~|\.{0,2})/.*|\.{1,2}", re.DOTALL)
"""Numbers, as of a port, and paths: no passwords after `-p`."""
MASK = "***"


def is_secret(name: str) -> bool:
    """Tell whether a variable or option of this name holds a secret."""
    return bool(SECRET.search(name))


def mask_text(text: str) -> str:
    """Mask what follows the first secret's name, to the end of the text, logins in URLs, and known tokens."""
    head, opening, body = text.partition("=[")
    if not opening:
        return mask_plain(text)
    return mask_plain(head) + opening + ",".join(mask_words(body.split(","), mask_plain))


def mask_words(words: Sequence[str], mask: Callable[[str], str] = mask_text) -> list[str]:
    """Mask the secrets in a command line: `env.HF_TOKEN=…`, `--api-key=…` and the word after `--api-key`.

    The word after `-p` counts as a password unless it is a number or a path. A list, as in
    `program.command=[train.py,--api-key,abc]`, is masked like a command line.
    """
    return [mask_argument(before, word, mask) for before, word in zip(["", *words], words, strict=False)]


def mask_argument(before: str, word: str, mask: Callable[[str], str]) -> str:
    """Mask the secrets in an argument, which may be the value of the option before it."""
    if word.startswith("-") or not before.startswith("-") or "=" in before:
        return mask(word)
    if is_secret(before) or (before in PASSWORD and not PLAIN.fullmatch(word)):
        return MASK
    user, colon, _ = word.partition(":")
    return f"{user}:{MASK}" if colon and before in LOGINS else mask(word)


def mask_plain(text: str) -> str:
    """Mask the secrets in a text that holds no list."""
    at = find_value(text)
    shown = TOKEN.sub(MASK, LOGIN.sub(MASK, text[:at]))
    return shown if at is None else shown + MASK


def find_value(text: str) -> int | None:
    """Return where the value of the first name or option begins that holds a secret; None if none does."""
    found = (value.end() for name in SECRET.finditer(text) if (value := VALUE.match(text, name.end())))
    options = (option.end() for option in OPTION.finditer(text) if is_secret(option[1]))
    return min((at for at in (next(found, None), next(options, None)) if at is not None), default=None)


def mask_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables of an environment as they may be shown and written down."""
    return {name: MASK if is_secret(name) else mask_text(value) for name, value in variables.items()}


def mask_tree(value: object, *, hide: bool = False, above: str = "", before: str = "") -> object:
    """Mask the secrets in nested mappings and lists, by the names of the keys above each value.

    `before` is the word before a value in a list, which may be a command line.
    """
    if isinstance(value, dict):
        return {
            key: mask_tree(item, hide=hide or is_secret(str(key)) or (above, key) in HOOKS, above=str(key))
            for key, item in value.items()
        }
    if isinstance(value, list):
        words = ["", *(item if isinstance(item, str) else "" for item in value)]
        return [mask_tree(item, hide=hide, before=word) for word, item in zip(words, value, strict=False)]
    if value is None or isinstance(value, bool):
        return value
    if hide or (is_secret(before) and before.startswith("-") and "=" not in before):
        return MASK
    return mask_argument(before, value, mask_text) if isinstance(value, str) else value
