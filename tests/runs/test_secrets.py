"""What is masked, and what must not be."""

import time

import pytest

from launcher.runs.secrets import MASK, is_secret, mask_tree, mask_variables, mask_words


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
    "text",
    [
        part * (300_000 // len(part))
        for part in (
            *(
                "x",
                "token",
                "token ",
                "://a:b",
                "_key",
                "eyJ-",
                "eyJ.",
                "eyJaaaaaaaa.",
                "sk-",
                "sk--",
                " sk-",
            ),
            *("-a ", "--token", "a --token", "-a-", "=[", "-----BEGIN ", "glpat-", " glpat-x", "hf_"),
        )
    ],
    ids=lambda text: text[:12],
)
def test_long_words_take_no_time(text: str) -> None:
    start = time.process_time()
    mask_words([text])
    assert time.process_time() - start < 2


def test_a_list_is_masked_like_a_command_line() -> None:
    word = "program.command=[train.py,--api-key,abc123,--lr,3]"
    assert mask_words([word]) == ["program.command=[train.py,--api-key,***,--lr,3]"]


LETTERS = "AbCdEfGh12345678" * 5
TOKENS = {
    "Hugging Face": f"hf_{LETTERS[:34]}",
    "GitHub": f"ghp_{LETTERS[:36]}",
    "GitHub's server": f"ghs_{LETTERS[:36]}",
    "GitHub's fine-grained": f"github_pat_{LETTERS[:22]}_{LETTERS[:59]}",
    "GitLab": f"glpat-{LETTERS[:20]}",
    "OpenAI": f"sk-{LETTERS[:48]}",
    "OpenAI's project": f"sk-proj-{LETTERS[:20]}_{LETTERS[:20]}-{LETTERS[:8]}",
    "Anthropic": f"sk-ant-api03-{LETTERS[:9]}-{LETTERS[:60]}",
    "OpenRouter": f"sk-or-v1-{'0a' * 32}",
    "AWS": "AKIAIOSFODNN7EXAMPLE",
    "AWS, for a session": "ASIAIOSFODNN7EXAMPLE",
    "Slack": "xoxb-123456789012-abcdef",
    "Google": f"AIza{LETTERS[:35]}",
    "NVIDIA": f"nvapi-{LETTERS[:64]}",
    "npm": f"npm_{LETTERS[:36]}",
    "JWT": f"eyJ{LETTERS[:20]}.eyJ{LETTERS[:20]}.{LETTERS[:43]}",
    "a key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA",
}
FRAMES = ("{}", "--x={}", "key:{}", "{},b", "https://host/?a={}&b=1", "export A={}; train", "'{}'", "[{}]")


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
def test_tokens_are_known_by_their_form_wherever_they_stand(token: str) -> None:
    for frame in FRAMES:
        (masked,) = mask_words([frame.format(token)])
        assert MASK in masked and token[8:] not in masked, masked
        assert mask_tree({"a": [{"b": frame.format(token)}]}) == {"a": [{"b": masked}]}
        assert mask_variables({"A": frame.format(token)}) == {"A": masked}


@pytest.mark.parametrize(
    "word",
    [
        "sk-learn-experiments-of-the-year",
        "task-0123456789012345678901234567",
        "hf_transformers_datasets",
        "hf_hub",
        "ghp_short",
        "gpt2-medium",
        "AKIAS",
        "eyJ.eyJ",
        "/data/hf_cache/models--meta-llama--Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "3fa85f64-5717-4562-b3fc-2c963f66afa6",
        "wandb_project=risk-aware-fine-tuning-2024",
        "s3://bucket/key:with@signs",
        "git@github.com:org/repo.git",
        "--pass-through",
        "compass=3",
        "bypass=1",
    ],
)
def test_what_only_looks_like_a_token(word: str) -> None:
    assert mask_words([word]) == [word]


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        (["-p", "hunter2"], ["-p", MASK]),
        (["-p", "correct horse"], ["-p", MASK]),
        (["-p", "8080"], ["-p", "8080"]),
        (["-p", "8080:80"], ["-p", "8080:80"]),
        (["-p", "0.1"], ["-p", "0.1"]),
        (["-p", "./out"], ["-p", "./out"]),
        (["-p", "/data/x"], ["-p", "/data/x"]),
        (["-p", "-x"], ["-p", "-x"]),
        (["-u", "me:hunter2"], ["-u", f"me:{MASK}"]),
        (["-u", "train.py"], ["-u", "train.py"]),
        (["--pass", "hunter2"], ["--pass", MASK]),
        (["--db_password", "hunter2"], ["--db_password", MASK]),
        (["bash", "-c", "train --token abc --lr 3"], ["bash", "-c", f"train --token {MASK}"]),
        (["bash", "-c", "train --max-tokens 3 --lr 3"], ["bash", "-c", "train --max-tokens 3 --lr 3"]),
        (["redis://:hunter2@host/0"], [f"redis://{MASK}@host/0"]),
        (["https://me:hun@ter2@host/x"], [f"https://{MASK}@host/x"]),
    ],
)
def test_passwords(words: list[str], masked: list[str]) -> None:
    assert mask_words(words) == masked


def test_lists_that_hold_other_than_texts_are_command_lines_too() -> None:
    command = ["train.py", "--token", "abc", "--n", 3, "--password", 1234, "-p", "hunter2", "-p", 8080]
    masked = ["train.py", "--token", MASK, "--n", 3, "--password", MASK, "-p", MASK, "-p", 8080]
    assert mask_tree({"command": command}) == {"command": masked}
