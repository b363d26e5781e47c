"""sbatch's options from the configuration."""

import math
from dataclasses import replace
from typing import Any

import pytest

from launcher.config.settings import ClusterConfig, RequeueConfig, Settings
from launcher.errors import UsageError
from launcher.slurm.job_options import list_impossible_ends
from launcher.slurm.notation import Gpus, parse_gpus, parse_signal, parse_time_limit
from launcher.slurm.requeue_policy import LIMITED
from launcher.slurm.sbatch_options import (
    INSTEAD,
    JobSize,
    Option,
    Resources,
    array_option,
    build_options,
    check_cluster,
    require_same,
)

TRAIN = JobSize("train", 1, 1)
NEVER: dict[str, Any] = dict.fromkeys(LIMITED, 0)
"""A policy by which nothing is requeued."""
NOTHING = Resources(None, None, None)


def render(cluster: ClusterConfig, shape: JobSize = TRAIN, filled: Resources = NOTHING) -> list[str]:
    return [option.render() for option in build_options(cluster, shape, filled)]


def test_defaults() -> None:
    assert render(ClusterConfig()) == [
        "--job-name=train",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--signal=B:USR2@120",
        "--requeue",
    ]


def test_everything_under_slurms_names() -> None:
    cluster = ClusterConfig(
        partition="gpu,spare",
        account="me",
        qos="high",
        time="1-12:00:00",
        constraint="a100&ib",
        exclude="n[0-2],n7",
        nodelist="n9",
        reservation="maint 1",
        switches="1@10:00",
        segment=2,
        exclusive=True,
        dependency="afterok:12:13",
        mail_user="me@x.org",
        mail_type="END,FAIL",
        signal="sigusr1@300",
        additional={
            "comment": "a b",
            "nice": 100,
            "wckey": None,
            "licenses": ["a", "b:2"],
        },
        requeue=replace(RequeueConfig(), **NEVER),
    )
    assert render(cluster, JobSize("a b", 2, 4), Resources("a100:4", "32", "0")) == [
        "--job-name=a b",
        "--nodes=2-4",
        "--no-kill",
        "--partition=gpu,spare",
        "--account=me",
        "--qos=high",
        "--constraint=a100&ib",
        "--exclude=n[0-2],n7",
        "--nodelist=n9",
        "--reservation=maint 1",
        "--switches=1@10:00",
        "--mail-user=me@x.org",
        "--mail-type=END,FAIL",
        "--time=1-12:00:00",
        "--dependency=afterok:12:13",
        "--gpus-per-node=a100:4",
        "--cpus-per-task=32",
        "--mem=0",
        "--segment=2",
        "--exclusive",
        "--signal=B:USR1@300",
        "--no-requeue",
        "--comment=a b",
        "--nice=100",
        "--licenses=a,b:2",
    ]


def test_spare_nodes_are_asked_for_and_their_job_outlives_a_node() -> None:
    assert render(ClusterConfig(), JobSize("train", 4, 4, spares=2))[1:4] == [
        "--nodes=6",
        "--ntasks-per-node=1",
        "--no-kill",
    ]


def test_no_gpus_are_no_option() -> None:
    assert not [line for line in render(ClusterConfig(), filled=Resources("0", "8", None)) if "gpus" in line]


@pytest.mark.parametrize(
    ("requeue", "flag"),
    [
        (RequeueConfig(), "--requeue"),
        (replace(RequeueConfig(), **{**NEVER, "crash": 1}), "--requeue"),
        (replace(RequeueConfig(), **{**NEVER, "stopped": 1}), "--requeue"),
        (replace(RequeueConfig(), **{**NEVER, "requested": 1}), "--requeue"),
        (replace(RequeueConfig(), **NEVER), "--no-requeue"),
        (RequeueConfig(limit=1), "--no-requeue"),
    ],
)
def test_requeue(requeue: RequeueConfig, flag: str) -> None:
    assert render(ClusterConfig(requeue=requeue))[-1] == flag


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("01:30", 1.5),
        ("1:00:00", 60),
        ("48:00:00", 2880),
        ("1-12", 2160),
        ("1-12:30", 2190),
        ("2-00:00:30", 2880.5),
        ("0", math.inf),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
    ],
)
def test_time(text: str, minutes: float) -> None:
    assert parse_time_limit("cluster.time", text) == minutes


@pytest.mark.parametrize(
    "text", ["", "1h", "-1", "1:2:3:4", "1-25", "90:70", "1:60:00", "1-", "1.5", "2 days", "\u0661\u0662"]
)
def test_wrong_time(text: str) -> None:
    with pytest.raises(UsageError, match=r"cluster\.time=.*HH:MM:SS"):
        check_cluster(ClusterConfig(time=text))


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        (4, Gpus(None, 4)),
        ("0", Gpus(None, 0)),
        ("a100:2", Gpus("a100", 2)),
        ("nvidia_a100_1g.5gb:7", Gpus("nvidia_a100_1g.5gb", 7)),
    ],
)
def test_gpus(value: object, gpus: Gpus) -> None:
    assert parse_gpus("cluster.gpus_per_node", value) == gpus


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpus_per_node", "gpu:4"),
        ("gpus_per_node", "gpu:a100:4"),
        ("gpus_per_node", "a100"),
        ("gpus_per_node", -1),
        ("gpus_per_node", True),
        ("gpus_per_node", 1.5),
        ("gpus_per_node", ""),
        ("cpus_per_task", 0),
        ("cpus_per_task", "8c"),
        ("cpus_per_task", False),
        ("mem", "200GB"),
        ("mem", "1.5G"),
        ("mem", "lots"),
        ("mem", -1),
        ("signal", "KILL@10"),
        ("signal", "TERM@60"),
        ("signal", "USR2@70000"),
        ("signal", "USR2@0"),
        ("signal", "FOO"),
        ("signal", "99@5"),
        ("signal", ""),
        ("dependency", "after_ok:1"),
        ("dependency", "afterok"),
        ("dependency", "afterok:1,afterany:2?singleton"),
        ("array_parallelism", 0),
    ],
)
def test_wrong_value(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^cluster\.{key}="):
        check_cluster(replace(ClusterConfig(), **{key: value}))


@pytest.mark.parametrize(
    "text",
    ["afterok:1", "after:1+10:2+5,afterany:3_4", "singleton?afternotok:5", "aftercorr:7", "afterok:7_*"],
)
def test_dependency(text: str) -> None:
    check_cluster(ClusterConfig(dependency=text))


@pytest.mark.parametrize(
    ("text", "name", "seconds"),
    [("USR1@90", "SIGUSR1", 90), ("12@5", "SIGUSR2", 5), ("B:SIGUSR2", "SIGUSR2", 60)],
)
def test_signal(text: str, name: str, seconds: int) -> None:
    number, left = parse_signal(text)
    assert (number.name, left) == (name, seconds)


@pytest.mark.parametrize("name", [*INSTEAD, "open_mode", "job_name"])
def test_what_launch_decides_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"cluster\.additional\.{name}=x: launch decides .*: .+"):
        check_cluster(ClusterConfig(additional={name: "x"}))


@pytest.mark.parametrize("name", ["c", "--foo", "a=b", "a b", "", "foo-", "Foo\n"])
def test_odd_names_of_options_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="long name"):
        check_cluster(ClusterConfig(additional={name: True}))


@pytest.mark.parametrize("value", ["a\nb", "a\0b", "", " ", "a\tb", "\u2028"])
def test_a_value_is_one_line(value: str) -> None:
    for cluster in (ClusterConfig(partition=value), ClusterConfig(additional={"comment": value})):
        with pytest.raises(UsageError, match="one line"):
            render(cluster)


def test_a_mapping_is_no_value() -> None:
    with pytest.raises(UsageError, match=r"cluster\.additional\.foo="):
        check_cluster(ClusterConfig(additional={"foo": {"a": 1}}))


def test_members_of_an_array_have_the_same_options() -> None:
    first = build_options(ClusterConfig(time="10"), JobSize("a", 1, 1), NOTHING)
    require_same([first, build_options(ClusterConfig(time="10"), JobSize("b", 1, 1), NOTHING)])
    for other, key in (
        (ClusterConfig(time="20"), "cluster.time: job 3 .* --time=20 and job 1 has --time=10"),
        (ClusterConfig(), "cluster.time: job 3 .* no --time and"),
        (ClusterConfig(time="10", additional={"nice": 1}), r"cluster\.additional\.nice: job 3"),
        (ClusterConfig(time="10", requeue=RequeueConfig(limit=1)), r"cluster\.requeue: "),
    ):
        with pytest.raises(UsageError, match=key):
            require_same([first, first, build_options(other, JobSize("a", 1, 1), NOTHING)])


def test_array() -> None:
    assert array_option(4, 2) == Option("array", "0-3%2", "cluster.array_parallelism")


@pytest.mark.parametrize("cause", ["hang", "sick_node"])
@pytest.mark.parametrize(("is_possible", "option"), [(False, "--no-requeue"), (True, "--requeue")])
def test_a_class_counts_only_if_it_can_end_the_job(cause: str, is_possible: bool, option: str) -> None:
    cluster = ClusterConfig(requeue=RequeueConfig(**{**NEVER, cause: 3}))
    shape = JobSize("train", 1, 1, frozenset({"hang", "sick_node"} - ({cause} if is_possible else set())))
    assert option in [found.render() for found in build_options(cluster, shape, NOTHING)]


def test_which_classes_the_settings_rule_out() -> None:
    config = Settings()
    assert list_impossible_ends(config) == {"hang", "sick_node"}
    config.watch.on_hang, config.preflight.on_failure = "stop", "exclude"
    assert list_impossible_ends(config) == set()
    config.preflight.kind = "off"
    assert list_impossible_ends(config) == {"sick_node"}
