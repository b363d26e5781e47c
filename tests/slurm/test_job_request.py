"""`job.json`: what a job's processes on the cluster get to know, and what is never written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config.compose import compose, resolve
from launcher.config.settings import NotifyConfig
from launcher.config.sources import find_sources
from launcher.errors import MachineError
from launcher.protocol import LAUNCH_SECRETS
from launcher.slurm.job_request import JobRequest, find_secrets, put_back, read_job_request, write_job_request

WORDS = ("train.py", "--name", "a b\n$(c) 'é\"", "--api-key", "word-secret", "--token=part-secret")
OVERRIDES = [
    "env.HF_TOKEN=env-secret",
    "env.A=1",
    "notify.url=https://example.org/hook-secret",
    "+program.password=own-secret",
    "cluster=slurm",
    "nodes=2:4",
]


@pytest.fixture
def request_made() -> JobRequest:
    """A request with secrets in the configuration and in the program's words."""
    config = resolve(compose(find_sources(None, None, None), OVERRIDES), Path("/runs/a/1"))
    return JobRequest(config, {"model": "tiny"}, WORDS, ("launch", "nodes=2:4"), "/home/me", 2, 4)


def test_a_request_comes_back_as_it_was(request_made: JobRequest, tmp_path: Path) -> None:
    left_out = write_job_request(request_made, tmp_path)
    environ = {LAUNCH_SECRETS: json.dumps({str(tmp_path): left_out})}
    assert read_job_request(tmp_path, environ) == request_made


def test_no_secret_is_written(request_made: JobRequest, tmp_path: Path) -> None:
    write_job_request(request_made, tmp_path)
    text = (tmp_path / "job.json").read_text()
    assert "secret" not in text and "HF_TOKEN" in text
    assert (tmp_path / "job.json").stat().st_mode & 0o777 == 0o600


def test_without_secrets_nothing_has_to_be_carried(request_made: JobRequest, tmp_path: Path) -> None:
    config = replace(request_made.config, env={"A": "1"}, program={"steps": 3}, notify=NotifyConfig())
    plain = replace(request_made, config=config, words=None)
    assert write_job_request(plain, tmp_path) == {}
    assert read_job_request(tmp_path, {}) == plain


def test_secrets_of_another_run_are_not_taken(request_made: JobRequest, tmp_path: Path) -> None:
    left_out = write_job_request(request_made, tmp_path)
    found = read_job_request(tmp_path, {LAUNCH_SECRETS: json.dumps({"/elsewhere": left_out})})
    assert found.config.env == {"HF_TOKEN": "***", "A": "1"}


@pytest.mark.parametrize("text", [None, "", "{", "[]", "null", '{"config": {}}'], ids=str)
def test_a_request_that_cannot_be_read_names_the_file(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "job.json").write_text(text)
    with pytest.raises(MachineError, match=r"job\.json cannot be read on .*: is the run directory on a"):
        read_job_request(tmp_path, {})


@pytest.mark.parametrize(
    ("whole", "masked", "hidden"),
    [
        ({"a": 1}, {"a": 1}, {}),
        ({"a": {"b": "s", "c": 1}}, {"a": {"b": "***", "c": 1}}, {"a": {"b": "s"}}),
        (["a", "s"], ["a", "***"], {"1": "s"}),
        ({"a": [{"b": "s"}]}, {"a": [{"b": "***"}]}, {"a": {"0": {"b": "s"}}}),
        ({"a": ["s", "t"]}, {"a": ["***", "t"]}, {"a": {"0": "s"}}),
    ],
)
def test_what_is_hidden_is_put_back(whole: object, masked: object, hidden: object) -> None:
    assert find_secrets(whole, masked) == hidden
    assert put_back(masked, hidden) == whole
