"""What is masked, and what must not be: `secrets.toml`."""

import re
import time
import tomllib
from pathlib import Path
from typing import Any

from launcher.runs.secrets import MASK, is_secret, mask_tree, mask_variables, mask_words

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("secrets.toml").read_text())
LETTERS = "AbCdEfGh12345678" * 5
TOKENS: dict[str, str] = {
    issuer: re.sub(r"\{(\d+)\}", lambda found: LETTERS[: int(found[1])], form)
    for issuer, form in TABLE["tokens"].items()
}


def test_names_and_words() -> None:
    assert [name for name in TABLE["names"] if not is_secret(name)] == []
    assert [name for name in TABLE["plain_names"] if is_secret(name)] == []
    for given, *shown in TABLE["masked"]:
        assert mask_words(given) == (shown[0] if shown else given)
    assert [mask_words([word])[0] for word in TABLE["plain_words"]] == TABLE["plain_words"]


def test_tokens_are_known_by_their_form_wherever_they_stand() -> None:
    for issuer, token in TOKENS.items():
        for frame in TABLE["frames"]:
            (masked,) = mask_words([frame.format(token)])
            assert MASK in masked and token[8:] not in masked, (issuer, masked)
            assert mask_tree({"a": [{"b": frame.format(token)}]}) == {"a": [{"b": masked}]}
            assert mask_variables({"A": frame.format(token)}) == {"A": masked}


def test_trees_and_the_command_lines_in_them() -> None:
    program = {"tokenizer": "t", "max_tokens": 5, "auth": True, "api_key": None}
    tree = {
        "env": {"HF_TOKEN": "abc", "A": "b"},
        "program": {**program, "password": 123, "url": "ftp://u:p@h"},
        "secrets": {"deep": {"er": "abc"}, "list": ["abc", 1]},
        "command": ["train.py", "--token", "abc", "--n", 3, "--password", 1234, "-p", "hunter2", "-p", 8080],
        "many": [{"token": "abc"}, 3],
    }
    assert mask_tree(tree) == {
        "env": {"HF_TOKEN": MASK, "A": "b"},
        "program": {**program, "password": MASK, "url": f"ftp://{MASK}@h"},
        "secrets": {"deep": {"er": MASK}, "list": [MASK, MASK]},
        "command": ["train.py", "--token", MASK, "--n", 3, "--password", MASK, "-p", MASK, "-p", 8080],
        "many": [{"token": MASK}, 3],
    }
    assert tree["command"][2] == "abc"  # type: ignore[index]


def test_long_words_take_no_time() -> None:
    for part in TABLE["slow"]:
        start = time.process_time()
        mask_words([part * (300_000 // len(part))])
        assert time.process_time() - start < 2, part
