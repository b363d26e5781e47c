"""Hydra's flags: what `--cfg`, `--info` and the rest print."""

from pathlib import Path

import pytest
import yaml

from launcher.config.hydra_flags import parse_flags
from launcher.errors import UsageError
from tests.seam import Launch


def test_cfg_job_is_the_configuration_as_yaml(launch: Launch) -> None:
    result = launch("--cfg", "job", "model.layers=3", "env.A=007", "+model=gpt2")
    tree = yaml.safe_load(result.out)
    assert (result.code, result.err) == (0, "")
    assert (tree["model"]["name"], tree["model"]["layers"], tree["env"], tree["nodes"]) == (
        "gpt2",
        3,
        {"A": "007"},
        "auto",
    )
    assert "hydra" not in tree


def test_cfg_hydra_and_all(launch: Launch) -> None:
    assert list(yaml.safe_load(launch("-c", "hydra").out)) == ["hydra"]
    assert {"hydra", "model", "nodes"} <= set(yaml.safe_load(launch("--cfg", "all").out))


def test_resolve_fills_in_references(launch: Launch) -> None:
    word = "env.WHO=${model.name}"
    assert yaml.safe_load(launch("--cfg", "job", word).out)["env"] == {"WHO": "${model.name}"}
    assert yaml.safe_load(launch("--cfg", "job", "--resolve", word, "run_dir=/r").out)["env"] == {
        "WHO": "tiny"
    }


def test_a_package_alone(launch: Launch) -> None:
    result = launch("--cfg", "job", "-p", "binding", "binding=numa")
    assert yaml.safe_load(result.out) == {
        "policy": "numa",
        "strict": False,
        "reserve_cores": 0,
        "nic": False,
    }
    assert launch("--cfg", "job", "--package", "binding.policy").out == "exclusive\n"
    for verb in ("watch", "tune", "logs"):  # which are sections, too
        assert launch("--cfg", "job", "-p", verb).out.startswith(f"# @package {verb}\n")
    launch("--cfg", "job", "-p", "nonsuch").assert_error(2, "'nonsuch'", "launch --cfg job")


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("searchpath", ["file://", "structured://"]),
        ("defaults", ["launch_schema", "model/tiny", "binding/exclusive"]),
        ("defaults-tree", ["launch:", "model: tiny"]),
        ("config", ["Config", "nproc_per_node: auto"]),
        ("plugins", ["BashCompletion"]),
        ("all", ["Defaults Tree", "nproc_per_node: auto"]),
    ],
)
def test_info(here: Path, what: str, parts: list[str]) -> None:
    from tests.seam import run_outside

    result = run_outside(["--info", what], here)
    assert (result.code, result.err) == (0, "")
    for part in parts:
        assert part in result.out
    assert not list(here.iterdir())


@pytest.mark.parametrize("words", [["-p", "model"], ["--resolve"], ["-p", "dry_run=true"]], ids=str)
def test_what_goes_with_cfg_alone_starts_no_job(launch: Launch, words: list[str]) -> None:
    launch(*words, "--", "true").assert_error(2, "--cfg job")


def test_hydras_own_help(launch: Launch) -> None:
    result = launch("--hydra-help")
    assert (result.code, result.err) == (0, "")
    assert "Hydra" in result.out and "--multirun" in result.out


def test_a_mistake_shows_whatever_is_asked(launch: Launch) -> None:
    launch("--cfg", "job", "modle=x").assert_error(2, "did you mean model")
    launch("--info", "defaults", "model=tyni").assert_error(2, "did you mean tiny")


def test_flags_stand_anywhere() -> None:
    flags = parse_flags(["a=1", "-m", "b=2", "-c", "job", "c=3"])
    assert (flags.overrides, flags.multirun, flags.cfg) == (("a=1", "b=2", "c=3"), True, "job")
    assert parse_flags(["--cfg=all", "--resolve"]).resolve


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("--lr", "a program's options stand after the program: `launch model=tiny train.py --lr`"),
        ("-x", "`launch model=tiny train.py -x`"),
        ("--multi-run", "did you mean --multirun?"),
        ("--cfgs", "did you mean --cfg?"),
    ],
)
def test_an_option_that_is_none_says_what_to_write(launch: Launch, word: str, fix: str) -> None:
    launch("model=tiny", word).assert_error(2, f"there is no option {word}", fix)


def test_an_option_that_is_none_is_an_error_of_the_flags_too() -> None:
    with pytest.raises(UsageError, match="there is no option --lr"):
        parse_flags(["model=tiny", "--lr"])
