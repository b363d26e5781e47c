"""Secrets in arguments are never written; texts never act on a terminal; a shell reads what was meant."""

import contextlib
import json
import logging
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from launcher.config.program import fill_env
from launcher.config.settings import Settings
from launcher.config.start import read_machine
from launcher.errors import UsageError
from launcher.protocol import LAUNCH_SECRETS
from launcher.rank.entry import PlacementError, PlanEntry, read_plan_file
from launcher.rank.shim import shorten_text
from launcher.runs.manifest import begin_run
from launcher.runs.run_directory import RunDir
from launcher.runs.secrets import mask_tree, mask_variables, mask_words
from launcher.slurm.job_request import JobRequest, read_job_request, write_job_request
from launcher.text import describe_time, escape_text, join_words, redirect_log, tame_text
from tests.fuzzing import CONTROL, assert_harmless, scalars, texts
from tests.runs.test_manifest import TOKENS

LETTERS = st.characters(codec="ascii", categories=("Lu", "Ll", "Nd"))
secrets = st.text(LETTERS, min_size=12, max_size=40).filter(lambda text: not text.isdecimal())
bodies = st.text(LETTERS, min_size=60, max_size=60).filter(
    lambda text: any(map(str.isupper, text)) and any(map(str.isdecimal, text))
)
OPTIONS = "--token --hf-token --api_key --password --pass -p --secret --wandb.api-key --auth"
options = st.sampled_from(OPTIONS.split())
names = st.sampled_from(
    ["HF_TOKEN", "WANDB_API_KEY", "env.AWS_SECRET_ACCESS_KEY", "--password", "++env.DB_PASSWORD"]
)
forms = st.one_of(
    st.tuples(options, secrets).map(lambda pair: ([pair[0], pair[1]], pair[1])),
    st.tuples(names, secrets).map(lambda pair: ([f"{pair[0]}={pair[1]}"], pair[1])),
    st.tuples(options, secrets).map(
        lambda pair: ([f"program.command=[train.py,{pair[0]},{pair[1]}]"], pair[1])
    ),
    st.tuples(options.filter(lambda name: name != "-p"), secrets).map(
        lambda pair: (["bash", "-c", f"train {pair[0]} {pair[1]} --lr 3"], pair[1])
    ),
    secrets.map(lambda text: ([f"postgres://me:{text}@host/db"], text)),
    secrets.map(lambda text: (["-u", f"me:{text}"], text)),
    bodies.map(lambda text: ([f"hf_{text[:34]}"], text[:34])),
    bodies.map(lambda text: ([f"x,ghp_{text[:36]},y"], text[:36])),
    bodies.map(lambda text: ([f"--url=https://h/?k=sk-{text}&b"], text)),
    st.sampled_from(sorted(TOKENS.values())).map(lambda text: ([f"a={text}"], text[8:])),
)
"""Words that hold a secret, and the secret."""
ORDINARY = "train.py --lr 3e-4 --port 8080 -p 8080 model=tiny --tokenizer gpt2 -v"
plain = st.lists(st.sampled_from(ORDINARY.split()), max_size=4)


@given(before=plain, form=forms, after=plain)
@example(before=[], form=(["-p", "hunter2hunter2"], "hunter2hunter2"), after=["-p", "8080"])
@example(before=["-v"], form=(["program.command=[x,-p,hunter2hunter2]"], "hunter2hunter2"), after=[])
def test_no_secret_is_written_and_all_arrive(
    before: list[str], form: tuple[list[str], str], after: list[str]
) -> None:
    own, secret = form
    words = [*before, *own, *after]
    assume(not before or before[-1] != "-p")  # then the next word is what follows `-p`
    with tempfile.TemporaryDirectory() as folder:
        config = Settings(env={"A": own[0]}, program={"command": [*words, 3], "x": {"y": words}})
        request = JobRequest(config, {}, tuple(words), tuple(mask_words(words)), folder, 1, 1)
        carried = write_job_request(request, Path(folder))
        manifest = json.dumps(asdict(begin_run(RunDir(Path(folder)), words, {})))
        written = (Path(folder) / "job.json").read_text()
        environ = {LAUNCH_SECRETS: json.dumps({folder: carried})}
        assert read_job_request(Path(folder), environ) == request
    tree = json.dumps(mask_tree({"a": words, "b": [*words, 1]}))
    for text in (written, manifest, tree, *mask_words(words)):
        assert secret not in text, text


@given(words=st.lists(st.sampled_from(ORDINARY.split()) | st.text(LETTERS, max_size=11), max_size=8))
def test_ordinary_words_stay(words: list[str]) -> None:
    assume("-p" not in words)
    assume(all("***" not in word for word in words))
    assert mask_words(words) == words
    assert mask_tree(list(words)) == words


@given(words=st.lists(texts | st.text(max_size=40), max_size=6))
def test_masking_is_stable_and_keeps_the_number_of_words(words: list[str]) -> None:
    masked = mask_words(words)
    assert len(masked) == len(words)
    assert all(mask_variables({"A": word})["A"] == mask_words([word])[0] for word in words)


@given(text=texts, most=st.integers(20, 400))
def test_texts_are_harmless(text: str, most: int) -> None:
    for line in (escape_text(text, most), shorten_text(text, most)):
        assert line.isprintable() and len(line) <= most
    if text.isprintable() and len(text) <= most:
        assert escape_text(text, most) == shorten_text(text, most) == text
    assert_harmless(tame_text(text, colours=True).replace("\r", ""))
    assert not CONTROL.search(tame_text(text))
    assert tame_text(text).count("\n") == text.count("\n")


@settings(max_examples=max(8, settings().max_examples // 20))
@given(
    words=st.lists(
        texts.map(lambda text: text.replace("\0", "").replace("\ud800", "")), min_size=20, max_size=60
    )
)
def test_a_shell_reads_the_words_that_were_meant(words: list[str]) -> None:
    for word in words:
        assert_harmless(join_words([word]))
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {join_words(words)}"], capture_output=True, check=True
    )
    assert done.stdout.decode().split("\0")[:-1] == words


# Files that users name or start beside: whatever they hold, an answer comes soon, and it is clean

keys = st.sampled_from(["a", "b", "c", "schema", "kind", "machine", "cpus", "ranks", "gpus", "nodes", "name"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys | texts, inner, max_size=4),
    max_leaves=20,
)
data = st.one_of(
    values.map(lambda value: json.dumps(value).encode()),
    texts.map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.binary(max_size=200),
    st.lists(st.tuples(keys, texts), max_size=4).map(
        lambda pairs: "\n".join(f"{name}={text}" for name, text in pairs).encode("utf-8", "surrogatepass")
    ),
)


@given(content=data)
@example(content=b"[" * 100_000)
@example(content=b"9" * 100_000)
@example(content=b"A='" * 100_000)
def test_what_users_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    config = Settings(env={"from_file": str(path)})
    config.machine.snapshot = str(path)
    with contextlib.suppress(UsageError):
        fill_env(config)
    with contextlib.suppress(UsageError):
        read_machine(config.machine)
    with contextlib.suppress(PlacementError, KeyError, TypeError, ValueError, AttributeError):
        PlanEntry(read_plan_file(str(path)))


# Text for people


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (41.25, "41.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (60, "1 min 0 s"),
        (725, "12 min 5 s"),
        (3599.6, "1 h 0 min"),
        (12000, "3 h 20 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert describe_time(seconds) == text


def test_what_is_logged_goes_to_a_function_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    logger, shown = logging.getLogger("launcher.text"), list[logging.LogRecord]()
    restore = redirect_log(shown.append)
    logger.warning("a")
    restore()
    logger.warning("b\x1b[2J")
    assert [record.getMessage() for record in shown] == ["a"]
    assert capsys.readouterr().err == "launch: warning: b\\x1b[2J\n"
