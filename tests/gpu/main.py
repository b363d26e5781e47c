"""The command `prove`: makes an environment, runs the steps in turn, and writes what they find."""

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tests.gpu.environment import ROOT, ProofError, make_environment, prepare_environ, run
from tests.gpu.records import FAILED, LEFT_OUT
from tests.gpu.report import MARKDOWN, Proof, render_steps, write_report
from tests.gpu.running import RAN, STOPPED, Outcome, Place, Stopped, run_step
from tests.gpu.table import STEPS, Step

WHEELS = ROOT / ".gpu-wheels"
"""Where `make gpu-wheels` puts them."""
LEAST = 10
"""Seconds that have to be left for a step to begin."""
DESCRIPTION = "Tries on one NVIDIA GPU all that wants one, without a network, and writes what it finds."


@dataclass(slots=True)
class Session:
    """A proof under way."""

    proof: Proof
    place: Place
    output: Path
    deadline: float
    """Monotonic."""

    def run(self) -> None:
        """Run the steps; raises Stopped."""
        for number, outcome in enumerate(self.proof.outcomes):
            title = f"{number + 1}/{len(self.proof.outcomes)} {outcome.step.name}"
            left = self.deadline - time.monotonic()
            why = self.find_hindrance(outcome.step, left)
            if why:
                self.keep(number, replace(outcome, status=LEFT_OUT, reason=why))
            else:
                say(f"{title}: {outcome.step.title} (at most {min(outcome.step.limit, left):.0f} s)")
                self.attempt(number, outcome.step, min(outcome.step.limit, left))
            say(f"{title} {tell(self.proof.outcomes[number])}")

    def find_hindrance(self, step: Step, left: float) -> str:
        """Say why a step cannot run; empty where it can."""
        if self.proof.cpu and not step.cpu:
            return "needs a GPU"
        if not self.proof.cpu and not self.proof.facts["gpus"] and not step.without_gpu:
            return f"torch sees no GPU: {self.proof.facts['why_none']}"
        return "" if left > LEAST else "no time is left"

    def attempt(self, number: int, step: Step, limit: float) -> None:
        """Run a step, and keep what it finds as it comes; raises Stopped."""
        try:
            self.keep(number, run_step(step, limit, self.place, lambda found: self.keep(number, found)))
        except Stopped as stop:
            now = self.proof.outcomes[number]
            self.keep(number, replace(now, status=STOPPED, reason=f"signal {stop.args[0]}"))
            raise

    def keep(self, number: int, outcome: Outcome) -> None:
        """Keep what came of a step, on disk, too."""
        outcomes = [*self.proof.outcomes]
        outcomes[number] = outcome
        self.proof = replace(self.proof, outcomes=outcomes)
        write_report(self.proof, self.output)


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code: 1 where a step failed, 2 where it cannot begin."""
    options = read_options(words)
    if options.list:
        print_steps()
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-proof-", ignore_cleanup_errors=True) as folder:
            return prove(options, choose_steps(options.only), Path(folder), shlex.join(words))
    except Stopped as stopped:
        say(f"stopped by signal {stopped.args[0]}; what was found is in {options.output}")
        return 128 + int(stopped.args[0])
    except (ProofError, OSError) as error:
        print(f"prove: error: {error}", file=sys.stderr)
        return 2


def prove(options: argparse.Namespace, steps: Sequence[Step], folder: Path, words: str) -> int:
    """Run the steps in an environment that is made for them; raises Stopped, ProofError or OSError."""
    deadline = time.monotonic() + 60 * options.minutes
    output = Path(options.output).absolute()
    output.mkdir(parents=True, exist_ok=True)
    wheels = find_wheels(options.wheels)
    say(f"{options.python}, wheels: {wheels or 'none'}, output: {output}")
    given = Path(options.python).absolute() if "/" in options.python else options.python
    python = make_environment(str(given), wheels, folder / "venv")
    environ = prepare_environ(folder, python, cpu=options.cpu)
    environ |= {"GPU_PROOF_CPU": str(int(options.cpu)), "GPU_PROOF_OUTPUT": str(output)}
    facts = read_facts(python, environ)
    say(f"torch {facts['torch']}, GPUs: {facts['gpus'] or facts['why_none']}")
    log = output / "log.txt"
    log.write_bytes(b"")
    proof = Proof(f"prove {words}".strip(), now(), options.cpu, facts, [Outcome(step) for step in steps])
    session = Session(proof, Place(python, environ, folder, log), output, deadline)
    write_report(proof, output)
    session.run()
    print("\n".join(render_steps(session.proof.outcomes)))
    say(f"{sum_up(session.proof.outcomes)}; {output}/{MARKDOWN} has the figures")
    return int(any(one.status == FAILED for one in session.proof.outcomes))


def sum_up(outcomes: Sequence[Outcome]) -> str:
    """Name the steps by what came of them: `8 ran; failed: loader; left out: drivers`."""
    names = {
        status: [one.step.name for one in outcomes if one.status == status] for status in (FAILED, LEFT_OUT)
    }
    parts = [f"{status}: {', '.join(found)}" for status, found in names.items() if found]
    return "; ".join([f"{sum(one.status == RAN for one in outcomes)} ran", *parts])


def find_wheels(given: str | None) -> Path | None:
    """Return the folder of wheels: the one given, else the checkout's; raises ProofError."""
    if given is None:
        return WHEELS if WHEELS.is_dir() else None
    if not Path(given).is_dir():
        raise ProofError(f"--wheels {given} is no directory: make it with `make gpu-wheels`")
    return Path(given).absolute()


def read_facts(python: str, environ: dict[str, str]) -> dict[str, object]:
    """Return what the machine's torch says of itself; raises ProofError."""
    command = [python, "-m", "tests.gpu.facts"]
    facts: dict[str, object] = json.loads(run(command, "import torch", environ))
    return facts


def choose_steps(only: str | None) -> Sequence[Step]:
    """Return the steps that are named, in their order, or all; raises ProofError."""
    if only is None:
        return STEPS
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {step.name for step in STEPS}
    if unknown or not names:
        known = ", ".join(step.name for step in STEPS)
        raise ProofError(f"--only {only}: steps are {known}")
    return [step for step in STEPS if step.name in names]


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="prove", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="name the steps with their limits, and end")
    parser.add_argument("--only", metavar="STEP,…", help="these steps alone")
    parser.add_argument(
        "--cpu", action="store_true", help="as far as it goes without a GPU, which stays hidden"
    )
    parser.add_argument("--output", metavar="DIR", default="gpu-proof", help="default: %(default)s")
    parser.add_argument(
        "--wheels", metavar="DIR", help="made by `make gpu-wheels`; default: .gpu-wheels, if there"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="the Python that has torch; default: this one"
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="time for all; steps get less, or are left out; default: 8"
    )
    return parser.parse_args(words)


def print_steps() -> None:
    """Name the steps."""
    for step in STEPS:
        print(f"{step.name:14} {step.limit:4.0f} s  {step.title}")
        print(f"{'':22}--cpu: {step.cpu or 'left out'}")


def tell(outcome: Outcome) -> str:
    """A step's outcome for people."""
    why = f": {outcome.reason}" if outcome.reason else ""
    return f"{outcome.status} after {outcome.seconds:.1f} s, {len(outcome.checks)} checks{why}"


def stop(number: int, _: object) -> None:
    """Handle a signal."""
    raise Stopped(number)


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"prove: {text}", flush=True)


def now() -> str:
    """The time, for people and programs."""
    return datetime.now(UTC).isoformat(timespec="seconds")
