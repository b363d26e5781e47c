"""Nothing that others have put into names, files and variables acts on the terminal."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from launcher.text import escape_text, join_words, quote_word, tame_text
from tests.cli.make_runs import make_run, write_applied, write_log
from tests.launch.terminals import open_terminal
from tests.seam import LAUNCH, run_outside

EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\x08\x7f\u202e"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]")


SCRIPT = ("cluster=slurm", "nproc_per_node=1", "dry_run=true", f"env.A={EVIL}")


def show(here: Path, *words: str, **variables: str) -> tuple[int, str]:
    """Run `launch` on a terminal; return its exit code and all that the terminal gets."""
    with open_terminal(here, *LAUNCH, *words, COLUMNS="300", TERM="xterm", **variables) as terminal:
        return terminal.finish(), terminal.text()


def assert_harmless(text: str) -> None:
    found = CONTROL.search(COLOUR.sub("", text))
    assert not found, repr(text[max(0, found.start() - 80) : found.end() + 20])


GIVEN: list[tuple[list[str], dict[str, str]]] = [
    ([f"name={EVIL}", "--", "true"], {}),
    ([f"{EVIL}=1"], {}),
    ([f"machine.snapshot={EVIL}", "dry_run=true"], {}),
    (["plan", "explain=true", "machine=dgx_a100"], {"CUDA_VISIBLE_DEVICES": EVIL, "NCCL_X": EVIL}),
    (["dry_run=true", "gc.every=3", "--", "echo", EVIL], {"PET_RDZV_CONF": f"a={EVIL}", "LAUNCH_GC": EVIL}),
    (["tune", "dataloader", "dry_run=true", f"save={EVIL}", "--", "true"], {}),
    (["status", f"runs_dir={EVIL}"], {}),
    (["cancel", EVIL], {}),
    (["--cfg", "all", f"env.A={EVIL}"], {}),
    (["--info", "all", f"env.A={EVIL}"], {}),
    (["-m", f'env.A=a,"{EVIL}"', "dry_run=true", "--", "true"], {}),
    (
        [*SCRIPT, f'cluster.setup=["echo {EVIL}"]', f'cluster.srun.comment="{EVIL}"', "--", "echo", EVIL],
        {},
    ),
]


@pytest.mark.parametrize(
    ("words", "variables"), GIVEN, ids=lambda value: " ".join(value).replace(EVIL, "EVIL")
)
def test_what_was_given(here: Path, words: list[str], variables: dict[str, str]) -> None:
    code, shown = show(here, *words, **variables)
    assert code in (0, 2, 3) and shown.strip()
    assert_harmless(shown)


@pytest.fixture
def planted(here: Path) -> Path:
    """Runs, logs and configuration whose every text is hostile."""
    name = EVIL.replace("\x9b", "")
    failure = {"rank": EVIL, "host": EVIL, "reason": EVIL, "last_lines": [EVIL]}
    outcome = {"cause": EVIL, "reason": EVIL, "signal": EVIL, "first_failure": failure}
    texts = {"command": [EVIL], "hosts": [EVIL], "slurm": {"job_id": EVIL}, "process": {"host": EVIL}}
    run = make_run(here / "runs", name, "20260801-120000", "failed", outcome=outcome, **texts)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "started": EVIL, "earlier": [manifest]}))
    write_log(run, 0, f"\x1b[31mred {EVIL}\x1b[0m\nnext\x1b[32m green\n")
    write_applied(run, 0, EVIL)
    (run / f"plan-{EVIL}.json").write_text("{")
    make_run(here / "runs", name, "20260801-130000", "running", hosts=[EVIL])
    for group in ("model", name):
        (here / "conf" / group).mkdir(parents=True)
        (here / "conf" / group / f"{EVIL}.yaml").write_text(f"a: {json.dumps(EVIL)}\n")
    return run


def test_what_was_planted(here: Path, planted: Path) -> None:
    commands = (
        ["status"],
        ["status", str(planted)],
        ["logs", str(planted)],
        ["logs", "rank=0", str(planted)],
        ["cancel", str(planted), str(planted.with_name("20260801-130000"))],
        ["doctor", f"run_dir={planted}"],
        ["plan", "--help"],
        ["plan", f"model={EVIL}"],
        ["--info", "searchpath"],
    )
    for words in commands:
        _, shown = show(here, *words)
        assert shown.strip(), words
        assert_harmless(shown)


def test_logs_keep_colours_on_a_terminal_and_everything_elsewhere(here: Path, planted: Path) -> None:
    _, shown = show(here, "logs", "rank=0", str(planted))
    shown = shown.replace("\r\n", "\n")
    assert shown.startswith("\x1b[31mred \\x1b[2J\\x1b]0;title\\x07\\x9b31m\\x08\\x7f\\u202e\x1b[0m\n")
    assert shown.endswith("next\x1b[32m green\x1b[0m\n")
    piped = run_outside(["logs", "rank=0", str(planted)], here)
    assert piped.out == f"\x1b[31mred {EVIL}\x1b[0m\nnext\x1b[32m green\n"


def test_the_command_of_a_dry_run_is_still_the_command(here: Path) -> None:
    words = ["dry_run=true", "--", "printf", "%s", EVIL, "it's", "a\\b", "two\nlines", "é"]
    _, shown = show(here, *words)
    line = shown.replace("\r\n", "\n")[shown.index("-I -S ") :]
    script = f"printf '%s\\0' {line}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[-7:-1] == words[3:]


def test_the_script_of_a_dry_run_is_exact_in_a_file(here: Path) -> None:
    """An administrator runs it: there, what the program gets is what was given."""
    setup, words = f"export B='{EVIL}'", [EVIL, "it's", "two\nlines", "é", "$(id)"]
    done = run_outside([*SCRIPT, f'cluster.setup=["{setup}"]', "--", "echo", *words], here)
    assert done.code == 0, done.err
    assert f"\n{setup}\n" in done.out
    printing = done.out.replace("\nexec ", "\nprintf '%s\\0' ").encode()
    environ = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"}
    ran = subprocess.run(["bash"], input=printing, env=environ, capture_output=True, check=True)
    given = ran.stdout.decode().split("\0")[:-1]
    assert given[-7:] == ["--", "echo", *words] and f"env.A={EVIL}" in given
    remarks = [line for line in done.out.splitlines() if line.startswith("#")]
    assert_harmless("\n".join(remarks))


def test_quoting() -> None:
    texts = ["", "a b", EVIL, "'", "\\", "\x1b'\\", "é\x1b", "$x\x1b`y`", "\n\t", "-"]
    quoted = [quote_word(text) for text in texts]
    assert_harmless("".join(quoted))
    script = f"printf '%s\\0' {' '.join(quoted)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == texts
    assert join_words(texts) == " ".join(quoted)
    printable = [text for text in texts if text.isprintable()]
    assert shlex.split(" ".join(map(quote_word, printable))) == printable


def test_long_texts_lose_their_middle_and_colours_are_ended() -> None:
    assert escape_text("a" * 3000 + "\x1b" + "b" * 3000, 100) == f"{'a' * 48} … {'b' * 48}"
    assert escape_text("\x1b" * 100, 100) == escape_text("\x1b" * 100_000, 100)
    assert len(escape_text("\x1b" * 100_000, 100)) <= 100
    assert escape_text("é\x1b\ud800\n") == "é\\x1b\\ud800\\n"
    assert tame_text("\x1b[31mred", colours=True) == "\x1b[31mred\x1b[0m"
    assert tame_text("\x1b[31mred\x1b[m", colours=True) == "\x1b[31mred\x1b[m"
    assert tame_text("plain\tand\nplain", colours=True) == "plain\tand\nplain"
    assert tame_text("\x1b[31mred\x1b[2K") == "\\x1b[31mred\\x1b[2K"
