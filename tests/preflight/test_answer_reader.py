"""Answers are collected from a real process: complete, late, cut short, foreign; it holds nobody up."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from launcher.doctor.node_facts import NodeFacts
from launcher.preflight.answer_reader import AnswerReader
from launcher.preflight.preflight_request import NodeAnswer, PreflightRequest, parse_answer, render_answer

REQUEST = PreflightRequest("light", ("n0", "n1"), 10.0, 1000.0)


def answer(host: str, *, is_final: bool = True, cpus: int = 0) -> str:
    return render_answer(NodeAnswer(NodeFacts(host, 9, 1001.0, cpus=cpus), is_final))


@contextmanager
def start(
    script: str, request: PreflightRequest = REQUEST, wakeup: int | None = None
) -> Iterator[AnswerReader]:
    """A reader of a program's answers."""
    argv = [sys.executable, "-I", "-S", "-u", "-c", f"import sys, time, os, signal\n{script}"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    reader = AnswerReader(process, request, wakeup)
    yield reader
    reader.end()
    assert process.returncode is not None


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def test_the_newest_answer_of_each_node_counts_and_the_first_says_when_it_came() -> None:
    lines = [answer("n1", is_final=False, cpus=1), "noise\n", answer("n0"), answer("n1", cpus=2)]
    with start(
        f"for line in {lines!r}: sys.stdout.write(line); sys.stdout.flush(); time.sleep(0.05)"
    ) as reader:
        assert not reader.collect(soon()) and reader.is_complete
    facts = reader.facts["n1"]
    assert (facts.cpus, facts.node_rank, facts.asked) == (2, 1, 1000.0)
    assert facts.answered is not None and reader.facts["n0"].answered is not None
    assert facts.answered <= reader.facts["n0"].answered


def test_what_is_no_answer_or_of_no_node_of_the_job_is_passed_over() -> None:
    cut = answer("n0")[:50]
    lines = [
        answer("n7"),
        "launch-preflight: {}\n",
        "launch-preflight: [1\n",
        f"{cut}\n",
        answer("n0").strip(),
    ]
    with start(f"sys.stdout.write({''.join(lines)!r}); sys.stderr.write('a\\n\\nb')") as reader:
        assert not reader.collect(soon()) and reader.ended
    assert {*reader.facts} == {"n0"} == reader.final and [*reader.errors] == ["a", "b"]


def test_a_program_that_hangs_is_left_at_the_deadline_and_ended() -> None:
    script = (
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsys.stdout.write({answer('n0')!r})\nsignal.pause()"
    )
    with start(script) as reader:
        while "n0" not in reader.final:
            assert not reader.collect(time.monotonic() + 0.2)
        assert not reader.ended
    assert reader.final == {"n0"} and reader.process.returncode == -9


def test_a_signal_interrupts_and_reading_goes_on_after_it() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x")
    with start(f"sys.stdout.write({answer('n0') + answer('n1')!r})", wakeup=reading) as reader:
        while reader.collect(soon()):
            os.set_blocking(reading, False)
            try:
                os.read(reading, 1)
            except BlockingIOError:
                pytest.fail("it woke up for nothing")
        assert reader.is_complete


def test_a_flood_without_lines_takes_no_memory() -> None:
    with start("for _ in range(40): sys.stdout.write('x' * (1 << 20))") as reader:
        reader.collect(soon())
    assert max(map(len, reader.rests.values())) <= (1 << 20) + 64 and not reader.facts


def test_lines_are_answers_only_if_they_are_whole() -> None:
    line = answer("n0")
    assert parse_answer(line) is not None
    assert all(parse_answer(line[:cut]) is None for cut in range(0, len(line) - 2, 7))
