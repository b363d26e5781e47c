"""What is masked, and what must not be."""

import time

import pytest

from launcher.runs.secrets import MASK, is_secret, mask_tree, mask_variables, mask_words

SECRETS = """
HF_TOKEN hf-token AWS_SECRET_ACCESS_KEY WANDB_API_KEY apikey api-key OPENAI_KEY db.password PASSWD
SSH_PASSPHRASE GOOGLE_CREDENTIALS private_key Authorization auth
"""
NO_SECRETS = """
tokenizer max_tokens num-tokens tokenization author AUTHOR_NAME keyboard monkey key lr PWD
"""
MASKED = """
env.HF_TOKEN=abc | env.HF_TOKEN=***
+env.HF_TOKEN=abc | +env.HF_TOKEN=***
env={HF_TOKEN: abc, A: b} | env={HF_TOKEN: ***
--api-key / abc / --lr / 3 | --api-key / *** / --lr / 3
--api-key=a=b c | --api-key=***
--use-auth / --lr / 3 | --use-auth / --lr / 3
bash / -c / export WANDB_API_KEY=abc; train | bash / -c / export WANDB_API_KEY=***
curl / -H / Authorization: Bearer abc | curl / -H / Authorization: ***
data.url=https://me:abc@host/x | data.url=https://***@host/x
{"password": "abc"} | {"password": ***
--tokenizer=gpt2 / --max-tokens / 512 / --author=me | --tokenizer=gpt2 / --max-tokens / 512 / --author=me
http://host:80/a@b / model=tiny / a=b=c | http://host:80/a@b / model=tiny / a=b=c
program.command=[train.py,--api-key,abc123,--lr,3] | program.command=[train.py,--api-key,***,--lr,3]
-p / hunter2 | -p / ***
-p / correct horse | -p / ***
-p / 8080 | -p / 8080
-p / 8080:80 | -p / 8080:80
-p / 0.1 | -p / 0.1
-p / ./out | -p / ./out
-p / /data/x | -p / /data/x
-p / -x | -p / -x
-u / me:hunter2 | -u / me:***
-u / train.py | -u / train.py
--pass / hunter2 | --pass / ***
--db_password / hunter2 | --db_password / ***
bash / -c / train --token abc --lr 3 | bash / -c / train --token ***
bash / -c / train --max-tokens 3 --lr 3 | bash / -c / train --max-tokens 3 --lr 3
redis://:hunter2@host/0 | redis://***@host/0
https://me:hun@ter2@host/x | https://***@host/x
"""
"""Words of a command line, and what is shown of them."""
NO_TOKENS = """
sk-learn-experiments-of-the-year task-0123456789012345678901234567 hf_transformers_datasets hf_hub ghp_short
gpt2-medium AKIAS eyJ.eyJ /data/hf_cache/models--meta-llama--Llama-3.1-8B meta-llama/Llama-3.1-8B-Instruct
sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef 3fa85f64-5717-4562-b3fc-2c963f66afa6
wandb_project=risk-aware-fine-tuning-2024 s3://bucket/key:with@signs git@github.com:org/repo.git
--pass-through compass=3 bypass=1
"""
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
SLOW = (
    *("x", "token", "token ", "://a:b", "_key", "eyJ-", "eyJ.", "eyJaaaaaaaa.", "sk-", "sk--", " sk-", "-a "),
    *("--token", "a --token", "-a-", "=[", "-----BEGIN ", "glpat-", " glpat-x", "hf_"),
)


def test_names_of_secrets() -> None:
    assert [name for name in SECRETS.split() if not is_secret(name)] == []
    assert [name for name in NO_SECRETS.split() if is_secret(name)] == []


@pytest.mark.parametrize("line", MASKED.strip().splitlines())
def test_words(line: str) -> None:
    given, shown = ([word.strip() for word in side.split(" / ")] for side in line.split(" | "))
    assert mask_words(given) == shown


def test_what_only_looks_like_a_token() -> None:
    words = NO_TOKENS.split()
    assert [mask_words([word])[0] for word in words] == words


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
def test_tokens_are_known_by_their_form_wherever_they_stand(token: str) -> None:
    for frame in FRAMES:
        (masked,) = mask_words([frame.format(token)])
        assert MASK in masked and token[8:] not in masked, masked
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


@pytest.mark.parametrize("part", SLOW)
def test_long_words_take_no_time(part: str) -> None:
    start = time.process_time()
    mask_words([part * (300_000 // len(part))])
    assert time.process_time() - start < 2
