"""What sbatch is asked for (`options.toml`), and what is said if it refuses (`refusals.toml`)."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.config.settings import ClusterConfig, RequeueConfig
from launcher.errors import LaunchError, UsageError
from launcher.launch.job import JobSpec
from launcher.slurm.sbatch import choose_job_options, explain_refusal
from tests.seam import enter, specify, write_script

OPTIONS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("options.toml").read_text())
REFUSALS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobSpec]:
    """A job that asks for nothing."""
    with pytest.MonkeyPatch.context() as patch:
        enter(tmp_path_factory.mktemp("here"), patch)
        spec = specify(["cluster=slurm", "name=train"], ("true",))
        yield replace(spec, config=replace(spec.config, cluster=ClusterConfig()))


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of SLURM's commands, the only one on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def read_null(tree: object) -> Any:
    """The same tree with None for "null"."""
    if isinstance(tree, dict):
        return {key: read_null(value) for key, value in tree.items()}
    return None if tree == "null" else tree


def make_cluster(values: Mapping[str, Any]) -> ClusterConfig:
    values = read_null(values)
    requeue = RequeueConfig(**values.get("requeue", {}))
    return ClusterConfig(**{**values, "requeue": requeue})


def ask(spec: JobSpec, folder: Path, case: Mapping[str, Any]) -> list[str]:
    """The options of a case."""
    text = case.get("sinfo", OPTIONS["sinfo"])
    write_script(folder / "sinfo", f"/bin/cat <<'X'\n{text}\nX")
    config = replace(spec.config, cluster=make_cluster(case.get("cluster", {})))
    config = replace(config, nproc_per_node=case.get("nproc", "auto"))
    for key, value in case.get("job", {}).items():
        group, _, name = key.partition(".")
        config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    low, high = case.get("nodes", (1, 1))
    size = replace(spec.cluster, min_nodes=low, max_nodes=high)
    spec = replace(spec, config=config, cluster=size, name=case.get("name", "train"))
    environ = {"PATH": str(folder), **case.get("environ", {})}
    return [option.render() for option in choose_job_options([spec], environ, dry_run=False).options]


def test_what_a_job_asks_for(plain: JobSpec, commands: Path) -> None:
    for case in OPTIONS["case"]:
        if "error" in case:
            with pytest.raises(LaunchError) as caught:
                ask(plain, commands, case)
            assert case["error"] in str(caught.value)
            continue
        options = ask(plain, commands, case)
        assert options == case.get("options", options), case
        assert {*case.get("has", ())} <= {*options}, (case, options)


def test_the_share_of_each_node(plain: JobSpec, commands: Path) -> None:
    names = ("gpus-per-node", "cpus-per-task", "mem")
    for partition, cluster, nproc, *rest in OPTIONS["resources"]["rows"]:
        case = {"cluster": {**cluster, "partition": partition}, "nproc": nproc}
        options = ask(plain, commands, {**case, "environ": rest[3] if len(rest) > 3 else {}})
        found = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
        assert [found.get(name, "") for name in names] == rest[:3], (case, rest)


def test_values_that_are_wrong_or_right(plain: JobSpec, commands: Path) -> None:
    for key, values in OPTIONS["wrong"].items():
        for value in values:
            with pytest.raises(UsageError) as caught:
                ask(plain, commands, {"cluster": {key: value}})
            assert str(caught.value).startswith(f"cluster.{key}="), (key, value)
    for key, values in OPTIONS["right"].items():
        for value in values:
            ask(plain, commands, {"cluster": {key: value}, "sinfo": ""})


def test_options_that_have_no_key(plain: JobSpec, commands: Path) -> None:
    def refuse(name: str, value: object) -> str:
        with pytest.raises(UsageError) as caught:
            ask(plain, commands, {"cluster": {"additional": {name: value}}})
        return str(caught.value)

    odd = OPTIONS["additional"]
    for name in odd["decided"]:
        assert refuse(name, "x").startswith(f"cluster.additional.{name}=x: launch decides --")
    assert all("long name" in refuse(name, True) for name in odd["odd"])
    assert all(refuse("foo", value).startswith("cluster.additional.foo=") for value in odd["values"])


def test_members_of_an_array_have_the_same_options(plain: JobSpec, commands: Path) -> None:
    def choose(*clusters: ClusterConfig) -> list[str]:
        specs = [
            replace(plain, name=f"job{number}", config=replace(plain.config, cluster=cluster))
            for number, cluster in enumerate(clusters)
        ]
        found = choose_job_options(specs, {"PATH": str(commands)}, dry_run=True).options
        return [option.render() for option in found]

    first = ClusterConfig(time="10", array_parallelism=2)
    options = choose(*[first] * 4)
    assert options[0] == "--job-name=job0+3" and options[-1] == "--array=0-3%2"
    for other, key in (
        (replace(first, time="20"), "time"),
        (replace(first, time=None), "time"),
        (replace(first, additional={"nice": 1}), "additional.nice"),
        (replace(first, requeue=RequeueConfig(limit=1)), "requeue"),
        (replace(first, setup=["true"]), "setup"),
    ):
        with pytest.raises(UsageError) as caught:
            choose(first, first, other)
        assert str(caught.value).startswith(
            f"cluster.{key}: job 3 of the sweep has another value than job 1:"
        )


@pytest.mark.parametrize("case", REFUSALS["refusal"], ids=lambda case: case["says"][0][0])
def test_a_refusal_is_told_with_the_values_and_what_there_is(
    case: dict[str, Any], plain: JobSpec, commands: Path
) -> None:
    write_script(commands / "sinfo", f"/bin/cat <<'X'\n{case.get('sinfo', '')}\nX")
    specs, environ = [plain], {"PATH": str(commands), **case.get("environ", {})}
    if case.get("given"):
        config = replace(plain.config, cluster=ClusterConfig(**REFUSALS["given"]))
        specs = [replace(plain, config=config, cluster=replace(plain.cluster, min_nodes=4, max_nodes=4))] * 2
    chosen = choose_job_options(specs, environ, dry_run=False)
    for complaint, told in case["says"]:
        error = explain_refusal(complaint, chosen, environ)
        assert str(error) == complaint + told.replace("{nodes}", REFUSALS["nodes"])
