"""What is masked, and what must not be."""

import time

import pytest

from launcher.runs.secrets import MASK, is_secret, mask_tree, mask_words


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "hf-token",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "apikey",
        "api-key",
        "OPENAI_KEY",
        "db.password",
        "PASSWD",
        "SSH_PASSPHRASE",
        "GOOGLE_CREDENTIALS",
        "private_key",
        "Authorization",
        "auth",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "max_tokens",
        "num-tokens",
        "tokenization",
        "author",
        "AUTHOR_NAME",
        "keyboard",
        "monkey",
        "key",
        "lr",
        "PWD",
    ],
)
def test_names_of_no_secrets(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        (["env.HF_TOKEN=abc"], [f"env.HF_TOKEN={MASK}"]),
        (["+env.HF_TOKEN=abc"], [f"+env.HF_TOKEN={MASK}"]),
        (["env={HF_TOKEN: abc, A: b}"], [f"env={{HF_TOKEN: {MASK}"]),
        (["--api-key", "abc", "--lr", "3"], ["--api-key", MASK, "--lr", "3"]),
        (["--api-key=a=b c"], [f"--api-key={MASK}"]),
        (["--use-auth", "--lr", "3"], ["--use-auth", "--lr", "3"]),
        (["bash", "-c", "export WANDB_API_KEY=abc; train"], ["bash", "-c", f"export WANDB_API_KEY={MASK}"]),
        (["curl", "-H", "Authorization: Bearer abc"], ["curl", "-H", f"Authorization: {MASK}"]),
        (["data.url=https://me:abc@host/x"], [f"data.url=https://{MASK}@host/x"]),
        (['{"password": "abc"}'], [f'{{"password": {MASK}']),
        (
            ["--tokenizer=gpt2", "--max-tokens", "512", "--author=me"],
            ["--tokenizer=gpt2", "--max-tokens", "512", "--author=me"],
        ),
        (["http://host:80/a@b", "model=tiny", "a=b=c"], ["http://host:80/a@b", "model=tiny", "a=b=c"]),
    ],
)
def test_words(words: list[str], masked: list[str]) -> None:
    assert mask_words(words) == masked


def test_trees() -> None:
    tree = {
        "env": {"HF_TOKEN": "abc", "A": "b"},
        "program": {
            "password": 123,
            "tokenizer": "t",
            "max_tokens": 5,
            "url": "ftp://u:p@h",
            "auth": True,
            "api_key": None,
        },
        "secrets": {"deep": {"er": "abc"}, "list": ["abc", 1]},
        "command": ["train", "--token", "abc"],
        "many": [{"token": "abc"}, 3],
    }
    assert mask_tree(tree) == {
        "env": {"HF_TOKEN": MASK, "A": "b"},
        "program": {
            "password": MASK,
            "tokenizer": "t",
            "max_tokens": 5,
            "url": f"ftp://{MASK}@h",
            "auth": True,
            "api_key": None,
        },
        "secrets": {"deep": {"er": MASK}, "list": [MASK, MASK]},
        "command": ["train", "--token", MASK],
        "many": [{"token": MASK}, 3],
    }
    assert tree["command"] == ["train", "--token", "abc"]


@pytest.mark.parametrize(
    "text", ["x" * 300_000, "token" * 60_000, "token " * 50_000, "://a:b" * 50_000, "_key" * 60_000]
)
def test_long_words_take_no_time(text: str) -> None:
    start = time.process_time()
    mask_words([text])
    assert time.process_time() - start < 2


def test_a_list_is_masked_like_a_command_line() -> None:
    word = "program.command=[train.py,--api-key,abc123,--lr,3]"
    assert mask_words([word]) == ["program.command=[train.py,--api-key,***,--lr,3]"]
