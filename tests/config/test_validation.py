"""What a job is refused for before anything is written, rather than to go on without it in silence."""

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.config.schema import LaunchConfig, list_choices
from tests.seam import Result

IMAGE = "cluster.container.image=a.sif"
MANUAL = ("cluster=manual", "nodes=2", "node_rank=1", "rdzv_endpoint=far:29500")


@pytest.mark.parametrize("words", [("cluster=local",), MANUAL], ids=lambda words: words[0])
def test_a_container_where_no_srun_starts_the_ranks(
    here: Path, launch: Callable[..., Result], words: tuple[str, ...]
) -> None:
    launch(IMAGE, *words, "--", "true").assert_error(2, IMAGE, "the ranks run here", "cluster=slurm")
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cluster.spares=1",), "cluster.spares=1, but SLURM does not start the nodes"),
        ((*MANUAL, "cluster.spares=1"), "cluster.spares=1, but SLURM does not start the nodes (node 1)"),
        (("cluster=slurm", "cluster.spares=-1"), "cluster.spares=-1: give a number from 0"),
        (("cluster=slurm", "cluster.spares=9999"), "cluster.spares=9999: give a number from 0"),
        (("cluster=slurm", "nodes=2:4", "cluster.spares=1"), "an elastic job goes on with fewer nodes"),
        (("cluster=slurm", "cluster.spares=1", "agent=torchrun"), "cluster.spares=1 with agent=torchrun"),
        (("cluster=slurm", "cluster.spares=one"), "cluster.spares"),
    ],
)
def test_spare_nodes_that_nothing_could_use(
    launch: Callable[..., Result], words: tuple[str, ...], message: str
) -> None:
    launch(*words, "dry_run=true", "--", "true").assert_error(2, message)


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("gc.every=-1", "give a number of at least 0"),
        ("dataloader.worker_gib=-3", "give 0 or more"),
        ("binding.policy=x", "choose from exclusive"),
    ],
)
def test_what_no_node_could_plan_does_not_go_into_the_queue(
    launch: Callable[..., Result], word: str, fix: str
) -> None:
    launch("cluster=slurm", "nodes=2", "dry_run=true", word, "--", "true").assert_error(2, fix)


def test_a_setting_with_a_set_of_words_takes_no_other(launch: Callable[..., Result]) -> None:
    settings = list(list_choices(LaunchConfig()))
    assert {"start.warm", "agent", "watch.on_hang", "notify.events"} <= {key for key, _, _ in settings}
    for key, value, words in settings:
        given = f"{key}=[{words[0]},foo]" if isinstance(value, list) else f"{key}=foo"
        refused = f"{key}=foo: choose from {', '.join(words)}"
        launch(given, "dry_run=true", "--", "true").assert_error(2, refused)
    launch("agent=srun", "nodes=2", "--", "true").assert_error(2, "agent=srun", "`srun launch-rank PROGRAM`")
    launch("start.warm=no", "dry_run=true", "--", "true").assert_error(2, "start.warm=no: choose from auto")
    launch("status", "format=xml").assert_error(2, "format=xml: choose from table, json")
    for word in ("start.warm=false", "start.read_ahead=true", "fit.check=false"):
        assert launch(word, "dry_run=true", "--", "true").code == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("notify.url=example.org/T0-secret",), "notify.url is no address"),
        (("notify.ping_url=ftp://T0-secret",), "notify.ping_url is no address"),
        (("notify.url=http://a:b/T0-secret",), "notify.url is no address"),
        (("notify.url='http://h/T0-secret x'",), "notify.url is no address"),
        (("notify.format=xml",), "choose from auto, json, slack"),
        (("notify.events=[hang,done]",), "notify.events=done: choose from"),
        (("notify.ping_interval=0",), "give at least 1"),
    ],
)
def test_whom_to_tell_is_checked_and_not_shown(
    launch: Callable[..., Result], words: tuple[str, ...], problem: str
) -> None:
    done = launch(*words, "dry_run=true", "--", "true")
    done.assert_error(2, problem)
    assert "secret" not in done.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("watch.on_hang=kill",), "choose from report, restart, stop"),
        (("watch.hang_seconds=soon",), "give a number of seconds of at least 1, or auto"),
        (("watch.hang_seconds=0",), "watch.hang_seconds=0: give a number"),
        (("watch.hang_seconds=true",), "watch.hang_seconds=True: give a number"),
        (("watch.interval=0",), "watch.interval=0: give seconds from 0.5"),
        (("watch.interval=nan",), "give seconds from 0.5"),
        (("watch.metrics_interval=-1",), "watch.metrics_interval=-1: give seconds from 0"),
        (("watch.prometheus_port=70000",), "give a port from 1 to 65535"),
        (("watch.textfile=''",), "watch.textfile is empty"),
        (("watch.on_hang=restart", "torchrun.max_restarts=0"), "nothing is started anew"),
    ],
)
def test_how_ranks_are_watched_is_checked(
    launch: Callable[..., Result], words: tuple[str, ...], problem: str
) -> None:
    launch(*words, "dry_run=true", "--", "true").assert_error(2, problem)


def test_restarts_for_hangs_come_with_restarts_of_torchrun(launch: Callable[..., Result]) -> None:
    done = launch("agent=torchrun", "watch.on_hang=restart", "dry_run=true", "--", "true")
    assert "--max-restarts=3" in done.out + done.err
