"""Where configuration comes from: ./conf first, named folders and files, and what a broken one says."""

from pathlib import Path

import pytest

from launcher.config.composed import resolve
from launcher.config.composition import compose
from launcher.config.schema import LaunchConfig
from launcher.config.search_path import find_shipped, find_sources
from tests.seam import Launch, drop_powers, run_outside


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def configure(*words: str, folder: str | None = None, primary: str | None = None) -> LaunchConfig:
    return resolve(compose(find_sources(None, folder, primary), words))


def test_the_working_directory_comes_first(here: Path) -> None:
    write(here / "conf/model/tiny.yaml", "name: ours\nlayers: 1\n")
    assert configure().model == {"name": "ours", "layers": 1}
    assert configure("model=gpt2").model["layers"] == 12


def test_a_model_of_ones_own_stands_beside_the_shipped_ones(here: Path, launch: Launch) -> None:
    write(here / "conf/model/mine.yaml", "name: mine\nlayers: 7\n")
    assert configure("+model=mine").model == {"name": "mine", "layers": 7}
    assert "mine, mistral7b, mixtral8x7b" in " ".join(launch("--help-all").out.split())


def test_own_files_are_the_ones_that_were_chosen(here: Path) -> None:
    write(here / "conf/model/mine.yaml", "name: mine\n")
    write(here / "conf/binding/exclusive.yaml", "policy: numa\n")
    write(here / "conf/binding/unused.yaml", "policy: none\n")
    sources = find_sources(None, None, None)
    composed = compose(sources, ["model=mine"])
    assert sorted(sources.list_own(composed.choices)) == [
        "conf/binding/exclusive.yaml",
        "conf/model/mine.yaml",
    ]
    assert sources.list_own(compose(sources, ["binding=numa"]).choices) == []


@pytest.mark.parametrize("words", [["plan", "format=json"], ["dry_run=true", "--", "true"]], ids=str)
def test_the_output_says_which_file_is_used(here: Path, launch: Launch, words: list[str]) -> None:
    assert "configuration from" not in launch(*words).err
    write(here / "conf/binding/exclusive.yaml", "policy: numa\n")
    assert "launch: configuration from conf/binding/exclusive.yaml\n" in launch(*words).err


def test_a_training_programs_own_hydra_folder_does_no_harm(here: Path, launch: Launch) -> None:
    write(here / "conf/config.yaml", "defaults:\n  - model: resnet\n  - optimizer: adam\nlr: 0.1\n")
    write(here / "conf/model/resnet.yaml", "depth: 50\n")
    write(here / "conf/optimizer/adam.yaml", "lr: 1\n")
    assert configure().model["name"] == "tiny"
    assert launch("dry_run=true", "--", "true").code == 0
    assert "optimizer" in launch("--help-all").out


def test_config_dir_is_searched_after_the_shipped_folder(here: Path) -> None:
    write(here / "team/model/tiny.yaml", "name: theirs\n")
    write(here / "team/model/theirs.yaml", "name: theirs\n")
    assert configure(folder="team").model["name"] == "tiny"
    assert configure("model=theirs", folder="team").model["name"] == "theirs"


@pytest.mark.parametrize("flag", ["-cp", "--config-path"])
def test_config_path_takes_the_place_of_conf(here: Path, launch: Launch, flag: str) -> None:
    write(here / "conf/model/tiny.yaml", "name: from-conf\n")
    write(here / "other/model/tiny.yaml", "name: from-other\n")
    assert "--model.name=from-other" in launch(flag, "other", "dry_run=true").out
    assert "--model.name=from-conf" in launch("dry_run=true").out


def test_a_team_file_builds_on_the_shipped_one(here: Path, launch: Launch) -> None:
    text = (
        "defaults:\n  - launch\n  - override model: gpt2\n  - _self_\nnproc_per_node: 2\nenv:\n  TEAM: '1'\n"
    )
    write(here / "team/team.yaml", text)
    config = configure("model.layers=3", folder="team", primary="team")
    assert (config.nproc_per_node, config.model["name"], config.model["layers"]) == (2, "gpt2", 3)
    assert config.env == {"TEAM": "1"}
    assert configure("+model=llama7b", folder="team", primary="team").model["layers"] == 32
    words = ("-cd", "team", "-cn", "team", "agent=torchrun", "dry_run=true", "--", "true")
    assert "--nproc-per-node=2" in launch(*words).out


def test_a_team_file_without_self_is_warned_of_in_a_line(here: Path, launch: Launch) -> None:
    write(here / "conf/team.yaml", "defaults:\n  - launch\nnproc_per_node: 2\n")
    result = launch("-cn", "team", "dry_run=true", "--", "true")
    assert result.code == 0
    warned = [line for line in result.err.splitlines() if line.startswith("launch: warning: ")]
    assert len(warned) == 1 and "_self_" in warned[0]


def test_a_team_file_that_builds_on_nothing_is_an_error(here: Path, launch: Launch) -> None:
    write(here / "conf/team.yaml", "nproc_per_node: 2\n")
    launch("-cn", "team", "dry_run=true").assert_error(2, "conf/team.yaml does not build on launch_schema")


def test_a_word_for_a_file_is_no_key(here: Path, launch: Launch) -> None:
    write(here / "conf/model/tiny.yaml", "word\n")
    assert "--model" not in launch("dry_run=true").out


def test_files_that_build_on_each_other_are_an_error(here: Path, launch: Launch) -> None:
    write(here / "conf/a.yaml", "defaults:\n  - b\n")
    write(here / "conf/b.yaml", "defaults:\n  - a\n")
    launch("-cn", "a", "dry_run=true").assert_error(2)


def test_a_wrong_primary_file_is_named(here: Path, launch: Launch) -> None:
    launch("-cn", "luanch", "dry_run=true").assert_error(2, "there is no 'luanch'")


@pytest.mark.parametrize("flag", ["--config-dir=nowhere", "--config-path=nowhere"])
def test_a_wrong_folder_is_named(here: Path, launch: Launch, flag: str) -> None:
    launch(flag, "dry_run=true").assert_error(
        2, str(here / "nowhere"), "check --config-path and --config-dir"
    )


BROKEN = {
    "open bracket": "name: [1, 2\n",
    "tabs": "a:\n\t- b\n",
    "two values": "a: b: c\n",
    "bad quote": "name: 'half\n",
    "a list": "- 1\n- 2\n",
    "not text": "name: \x00\n",
    "no such interpolation": "name: ${nothing.there}\n",
    "its own interpolation": "name: ${model.name}\n",
    "no such resolver": "name: ${no.such:1}\n",
    "missing value": "name: ???\n",
    "deep": "a: " + "[" * 500 + "]" * 500 + "\n",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_option_is_one_line(here: Path, launch: Launch, text: str) -> None:
    write(here / "conf/model/tiny.yaml", text)
    launch("--", "true").assert_error(2)
    assert [path.name for path in here.iterdir()] == ["conf"]


@pytest.mark.parametrize(
    "text", ["name: [1\n", "- 1\n", "defaults: 5\n", "defaults:\n - model: [1\n", "\xff"]
)
def test_a_broken_primary_file_is_one_line(here: Path, launch: Launch, text: str) -> None:
    write(here / "conf/launch.yaml", "").write_text(text, encoding="latin-1")
    launch("dry_run=true").assert_error(2)


def test_malformed_yaml_is_named_with_its_line(here: Path, launch: Launch) -> None:
    write(here / "conf/model/tiny.yaml", "name: x\nlayers: [1, 2\n")
    launch("dry_run=true").assert_error(2, "conf/model/tiny.yaml", "line ")


def test_a_wrong_key_or_value_in_a_file_is_named_with_the_file(here: Path, launch: Launch) -> None:
    ours = here / "conf/cluster/ours.yaml"
    write(ours, "kind: slurm\npartiton: gpu\n")
    wrong = "cluster/ours.yaml: there is no key 'cluster.partiton': did you mean cluster.partition"
    launch("cluster=ours", "dry_run=true").assert_error(2, wrong)
    write(ours, "kind: slurm\narray_parallelism: many\n")
    done = launch("cluster=ours", "dry_run=true")
    done.assert_error(2, "cluster/ours.yaml: cluster.array_parallelism: Value 'many'")
    assert "raised" not in done.err


def test_bytes_that_are_not_text_are_one_line(here: Path, launch: Launch) -> None:
    write(here / "conf/model/tiny.yaml", "").write_bytes(b"name: \xff\xfe\n")
    launch("dry_run=true").assert_error(2)


def test_conf_as_a_file_is_not_a_folder(here: Path, launch: Launch) -> None:
    write(here / "conf", "text")
    assert launch("dry_run=true", "--", "true").code == 0


def test_an_option_that_is_a_folder_or_a_dead_link(here: Path, launch: Launch) -> None:
    (here / "conf/model/mine.yaml").mkdir(parents=True)
    launch("model=mine", "dry_run=true").assert_error(2)
    (here / "conf/model/gone.yaml").symlink_to("nowhere.yaml")
    launch("model=gone", "dry_run=true").assert_error(2)


def test_a_relative_conf_with_odd_characters_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "a b'c\"d é$(x);%20#?&=,[]"
    write(odd / "conf/model/mine.yaml", "name: mine\n")
    monkeypatch.chdir(odd)
    assert configure("model=mine").model == {"name": "mine"}


@pytest.mark.parametrize("name", ["conf", "conf/model", "conf/model/tiny.yaml"])
def test_an_unreadable_conf_is_one_line(here: Path, name: str) -> None:
    write(here / "conf/model/tiny.yaml", "name: x\n")
    (here / name).chmod(0)
    try:
        result = run_outside(["dry_run=true"], here, preexec_fn=drop_powers)
        result.assert_error(2, f"{here / name} cannot be read", "chmod -R u+rX")
        assert run_outside(["--help-all"], here, preexec_fn=drop_powers).code == 0
    finally:
        (here / name).chmod(0o755)


def test_shipped_configuration_is_found_from_anywhere(here: Path) -> None:
    assert (find_shipped() / "launch.yaml").is_file()
    assert find_sources(None, None, None).folders == (find_shipped(),)


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_files_of_hydras_search_path_are_told_and_found(here: Path, launch: Launch, form: str) -> None:
    write(here / "team/experiment/x.yaml", "# @package _global_\nnproc_per_node: 1\nname: theirs\n")
    write(here / "team/model/theirs.yaml", "name: theirs\n")
    word = f"hydra.searchpath=[{form.format(here / 'team')}]"
    for choice in ("experiment=x", "+experiment=x"):
        result = launch(word, choice, "dry_run=true", "--", "true")
        assert "configuration from team/experiment/x.yaml\n" in result.err, result
    assert "--model.name=theirs" in launch(word, "model=theirs", "dry_run=true").out
    launch(word, "model=their", "dry_run=true").assert_error(2, "no 'their' in model", "theirs")


def test_a_search_path_in_the_primary_file_is_heard(here: Path, launch: Launch) -> None:
    write(here / "team/experiment/x.yaml", "# @package _global_\nnproc_per_node: 1\n")
    write(here / "conf/mine.yaml", "defaults:\n  - launch\n  - _self_\nhydra:\n  searchpath: [team]\n")
    result = launch("-cn", "mine", "experiment=x", "dry_run=true", "--", "true")
    assert "configuration from conf/mine.yaml, team/experiment/x.yaml\n" in result.err, result


def test_a_package_in_the_search_path(here: Path, launch: Launch) -> None:
    write(here / "theirs/__init__.py", "")
    write(here / "theirs/conf/__init__.py", "")
    write(here / "theirs/conf/experiment/x.yaml", "# @package _global_\nnproc_per_node: 1\n")
    words = ["hydra.searchpath=[pkg://theirs.conf]", "experiment=x", "dry_run=true", "--", "true"]
    result = run_outside(words, here, {"PYTHONPATH": str(here)})
    assert (result.code, "configuration from theirs/conf/experiment/x.yaml" in result.err) == (0, True), (
        result
    )


@pytest.mark.parametrize("value", ["[/nowhere]", "[pkg://no.such]"])
def test_a_search_path_that_is_not_there_is_warned_of(launch: Launch, value: str) -> None:
    result = launch(f"hydra.searchpath={value}", "dry_run=true", "--", "true")
    assert result.code == 0
    assert result.err.startswith("launch: warning: ") and "hydra.searchpath" in result.err.splitlines()[0]


@pytest.mark.parametrize("value", ["x", "[1]", "null"])
def test_a_wrong_search_path_is_a_line(launch: Launch, value: str) -> None:
    launch(f"hydra.searchpath={value}", "dry_run=true", "--", "true").assert_error(2, "hydra.searchpath")
