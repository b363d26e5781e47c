"""Groups, keys and variables on the command line, each in all the ways that people write them."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from launcher.config.composed import Composed, read_values, resolve
from launcher.config.composition import compose
from launcher.config.overrides import NEUTRAL
from launcher.config.schema import LaunchConfig, settle_words
from launcher.config.search_path import find_sources
from launcher.errors import UsageError
from tests.seam import Launch


def configure(*words: str, primary: str | None = None) -> LaunchConfig:
    return resolve(compose(find_sources(None, None, primary), words))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("word", ["model=llama7b", "+model=llama7b"])
def test_a_group_with_a_default_takes_both_forms(here: Path, word: str) -> None:
    assert configure(word).model["hidden_size"] == 4096


@pytest.mark.parametrize("word", ["experiment=x", "+experiment=x"])
def test_a_group_without_a_default_takes_both_forms(here: Path, word: str) -> None:
    write(here / "conf/experiment/x.yaml", "# @package _global_\nnproc_per_node: 3\nmodel:\n  layers: 9\n")
    config = configure(word)
    assert (config.nproc_per_node, config.model["layers"], config.model["name"]) == (3, 9, "tiny")


def test_an_experiment_may_choose_options_of_groups(here: Path) -> None:
    choices = "defaults:\n  - override /model: gpt2\n  - override /binding: numa\n"
    text = f"# @package _global_\n{choices}nodes: '1:1'\n"
    write(here / "conf/experiment/x.yaml", text)
    config = configure("experiment=x", "model.layers=3")
    assert (config.model["name"], config.model["layers"], config.binding.policy) == ("gpt2", 3, "numa")
    assert config.nodes == "1:1"


def test_single_dimensions_are_set_beside_a_choice(here: Path) -> None:
    config = configure("model.layers=2", "+model=llama7b", "model.head_dim=64")
    assert (config.model["layers"], config.model["head_dim"], config.model["heads"]) == (2, 64, 32)


VALUES = [
    "1e3",
    "007",
    "1.50",
    "true",
    "null",
    "",
    " ",
    "two  words ",
    "it's",
    'say "hi"',
    "'half",
    '"half',
    "a=b",
    "a,b",
    "$(x)",
    "`x`",
    "$HOME",
    "[1, 2]",
    "{a: b}",
    "line\nline\n",
    "tab\there",
    "é😀\u2028",
    "\\",
    "C:\\dir\\",
    "\\n",
    "\\'",
    "'a' 'b'",
    "#no comment",
    "%s {num_workers}",
    "choice(1,2)",
    "a b 'c' \\\\\"d\"",
]


@pytest.mark.parametrize("value", VALUES)
def test_a_variable_is_set_byte_for_byte(here: Path, value: str) -> None:
    config = configure(f"env.FOO={value}", f"+env.BAR={value}", f"++env.BAZ={value}")
    assert config.env == {"FOO": value, "BAR": value, "BAZ": value}


@pytest.mark.parametrize(
    ("written", "meant"), [("'a b'", "a b"), ('"1e3"', "1e3"), ("'it\\'s'", "it's"), ('""', "")]
)
def test_a_value_in_hydras_quotes_is_what_they_hold(here: Path, written: str, meant: str) -> None:
    assert configure(f"env.FOO={written}").env == {"FOO": meant}


def test_a_variable_may_refer_to_another_key(here: Path) -> None:
    assert configure("env.WHO=${model.name}", "name=n").env == {"WHO": "tiny"}


@pytest.mark.parametrize("word", ["env.OUT=${run_dir}", "env.OUT=${run_dir}/x", "runs_dir=/r/${name}"])
def test_a_variable_may_refer_to_the_run_directory_that_is_not_there_yet(here: Path, word: str) -> None:
    composed = compose(find_sources(None, None, None), [word, "name=n"])
    first = resolve(composed)
    assert (first.run_dir, first.env.get("OUT", "RUN_DIR")[:7]) == (None, "RUN_DIR")
    later = resolve(composed, Path("/r/n/1"))
    assert (later.run_dir, later.env.get("OUT", "/r/n/1")[:6]) == ("/r/n/1", "/r/n/1")


def test_several_variables_and_a_file_of_them(here: Path) -> None:
    write(here / "conf/experiment/x.yaml", "# @package _global_\nenv:\n  A: '1'\n  B: '2'\n")
    assert configure("experiment=x", "env.B=3", "env.C=4").env == {"A": "1", "B": "3", "C": "4"}


def test_the_rendezvous_takes_any_key(launch: Launch) -> None:
    result = launch(
        "torchrun.rdzv_conf.timeout=77", "torchrun.rdzv_conf.is_host=0", "dry_run=true", "--", "true"
    )
    assert result.code == 0
    assert "--rdzv-conf=is_host=0,timeout=77" in result.out


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_several_options_of_slurms_at_once(here: Path, plus: str) -> None:
    word = f"{plus}cluster.additional={{wckey: x, nice: 5}}"
    cluster = configure(word, "cluster.additional.nice=3", "cluster.srun={mem: 1G}").cluster
    assert (cluster.additional, cluster.srun) == ({"wckey": "x", "nice": 3}, {"mem": "1G"})


def test_a_key_of_the_program_may_be_new(launch: Launch) -> None:
    assert "--fancy=7" in launch("+program.fancy=7", "dry_run=true").out


def test_a_key_may_be_removed(launch: Launch) -> None:
    assert "--steps" in launch("dry_run=true").out
    assert "--steps" not in launch("~program.steps", "dry_run=true").out


@pytest.mark.parametrize("plus", ["", "+"])
def test_an_option_may_go_to_another_package(here: Path, launch: Launch, plus: str) -> None:
    config = configure(f"{plus}model@program.net=gpt2", "program.net.layers=3")
    assert (config.model["name"], config.program["net"]["name"]) == ("tiny", "gpt2")
    result = launch(f"{plus}model@program.net=tiny", "dry_run=true")
    assert "--net.name=tiny" in result.out and "--net.vocab_size=256" in result.out
    launch("model@program.net=tyni", "dry_run=true").assert_error(
        2, "no 'tyni' in model", "did you mean tiny"
    )


def test_an_option_that_a_file_puts_into_another_package_is_changed_there(here: Path) -> None:
    write(here / "conf/launch2.yaml", "defaults:\n  - launch\n  - model@program.net: tiny\n  - _self_\n")
    assert configure("model@program.net=gpt2", primary="launch2").program["net"]["name"] == "gpt2"


BAD = [
    ("~gc", "~gc changes nothing", "write gc=default"),
    ("~binding=exclusive", "~binding=exclusive changes nothing", "write binding=none"),
    ("~cluster", "write cluster=local", ""),
    ("~dataloader", "write dataloader=none", ""),
    ("~machine", "write machine=local", ""),
    ("~nodes", "~nodes changes nothing, since nodes always has a value", "write nodes=auto"),
    ("~gc.every", "write gc.every=50", ""),
    ("~follow", "write follow=false", ""),
    ("~cluster.time", "write cluster.time=null", ""),
    ("~cluster.setup", "write cluster.setup=[]", ""),
    ("~torchrun", "write torchrun.max_restarts=…", ""),
    ("~zzz", "'zzz' does not exist", ""),
    ("modle=gpt2", "'modle'", "did you mean model"),
    ("nproc_per_nod=2", "'nproc_per_nod'", "did you mean nproc_per_node"),
    ("torchrun.max_restart=2", "'torchrun.max_restart'", "did you mean torchrun.max_restarts"),
    ("binding.stric=true", "did you mean binding.strict", ""),
    ("torchrun.max=2", "no key 'torchrun.max': did you mean torchrun.max_restarts?", ""),
    ("cluster.tim=2", "no key 'cluster.tim': did you mean cluster.time?", ""),
    ("cluster.foo=1", "any other option of sbatch is cluster.additional.foo, of srun cluster.srun.foo", ""),
    ("gc.foo=1", "no key 'gc.foo': choose from gc.every, gc.log, gc.policy, gc.warmup", ""),
    ("cluster.requeue.limit=-1", "cluster.requeue.limit=-1: give a number of at least 1", ""),
    ("cluster.requeue.crash=-1", "cluster.requeue.crash=-1: give a number of at least 0", ""),
    ("cluster.requeue.stopped=-1", "cluster.requeue.stopped=-1: give a number of at least 0", ""),
    ("cluster.requeue.no_progress=-1", "cluster.requeue.no_progress=-1: give a number of at least 0", ""),
    (
        "cluster.requeue.exit_codes=[75,0]",
        "cluster.requeue.exit_codes=[75, 0]: 0 is no exit code",
        "1 to 255",
    ),
    ("cluster.requeue.exit_codes=[256]", "256 is no exit code of a failure", ""),
    ("cluster.requeue.exit_codes=[true]", "cluster.requeue.exit_codes", "bool"),
    ("cluster.requeue.exit_codes=75", "give a list, as in cluster.requeue.exit_codes=[…]", ""),
    ("zzz=1", "there is no key 'zzz'", "launch --help"),
    ("model=lama7b", "no 'lama7b' in model", "did you mean llama7b"),
    ("binding=exlusive", "did you mean exclusive", ""),
    ("cluster=slrm", "no 'slrm' in cluster", "did you mean slurm?"),
    ("cluster.kind=slrm", "choose from auto, local, slurm, allocation, manual", ""),
    ("experiment=x", "there is no key 'experiment'", ""),
    ("model=null", "model=null: name an option of the group", "model="),
    ("model=[a,b]", "no 'b' in model", ""),
    ("torchrun.max_restarts=many", "torchrun.max_restarts", "many"),
    ("dry_run=7up", "dry_run", "7up"),
    ("binding.strict=maybe", "binding.strict", "maybe"),
    ("node_rank=first", "node_rank", "first"),
    ("env=x", "env", ""),
    ("logs.console=rank1", "logs.console=rank1", "choose from rank0, all, none"),
    ("devices=some", "devices=some", "choose from all, own"),
    ("gc.policy=x", "gc.policy=x", "choose from synchronized, disabled, frozen, default"),
    ("gc.every=-1", "gc.every=-1: give a number of at least 0", ""),
    ("gc.warmup=-1", "gc.warmup=-1: give a number of at least 0", ""),
    ("name=a/b", "name='a/b'", "runs_dir=DIR"),
    ("name=", "name=''", ""),
    ("name=..", "name='..'", ""),
    ("nproc_per_node=0", "nproc_per_node=0: give a number of at least 1", "auto"),
    ("nproc_per_node=-1", "nproc_per_node=-1: give a number", ""),
    ("nproc_per_node=abc", "nproc_per_node=abc: give a number", ""),
    ("nproc_per_node=1.5", "nproc_per_node=1.5: give a number", ""),
    ("nproc_per_node=[1]", "nproc_per_node=[1]: give a number", ""),
    ("nproc_per_node=null", "nproc_per_node=null: give a number", ""),
    ("nproc_per_node=999999999", "nproc_per_node=999999999", "at most"),
    ("nodes=0", "nodes=0: give a number of at least 1", "min:max"),
    ("nodes=abc", "nodes=abc: give", ""),
    ("nodes=4:2", "nodes=4:2: give", "nodes=2:4"),
    ("nodes=1:2:3", "nodes=1:2:3: give", ""),
    ("nodes=null", "nodes=null: give", ""),
    ("a=b=c", "cannot read 'a=b=c'", "quote the value"),
    ("name='half", "cannot read", "quote the value"),
    ("name=two words'", "cannot read", "quote the value"),
    ("=3", "'=3'", "KEY=VALUE"),
    ("", "''", "KEY=VALUE"),
    ("train", "'train' is not KEY=VALUE", "`launch -- train -- true`"),
    ("plann", "'plann'", "did you mean plan"),
    ("--nproc-per-node=2", "nproc_per_node=2", ""),
    ("--nproc_per_node", "nproc_per_node=…", ""),
    ("--confg-dir=x", "did you mean --config-dir", ""),
    ("--info=bogus", "bogus", "searchpath"),
    ("--cfg", "argument -c/--cfg", ""),
    ("machine.root=/nowhere", "machine.root", "/nowhere"),
    ("machine.snapshot=/nowhere", "machine.snapshot=/nowhere", ""),
    ("format=xml", "format=xml: choose from table, json", ""),
    ("env.A=${nothing}", "nothing", ""),
    ("env.A=${", "env.A", ""),
]


@pytest.mark.parametrize(("word", "first", "second"), BAD, ids=[word or "empty" for word, _, _ in BAD])
def test_a_wrong_word_is_one_line_with_the_fix(
    launch: Launch, here: Path, word: str, first: str, second: str
) -> None:
    launch(word, "--", "true").assert_error(2, first, second)
    assert not list(here.iterdir())


def test_an_unset_key_of_a_group_is_named_with_its_near_one(here: Path) -> None:
    with pytest.raises(UsageError, match=r"no key 'model\.layer': did you mean model\.layers"):
        configure("model=llama7b", "model.layer=2")


def test_what_takes_the_place_of_a_removal_is_there(here: Path) -> None:
    assert configure(*NEUTRAL.values()).binding.policy == "none"


@pytest.mark.parametrize("word", ["~env", "~data", "~allocator", "~model", "~program.lr", "~model.layers"])
def test_what_is_a_mapping_may_be_removed(here: Path, word: str) -> None:
    config = configure("env.A=1", "program.lr=1", word)
    group, _, key = word[1:].partition(".")
    found = getattr(config, group)
    assert key not in found if key else found == {}


@pytest.mark.parametrize("words", [(), ("run_dir=/runs/given",)])
def test_a_run_directory_that_another_run_has_taken_is_chosen_again(
    here: Path, words: tuple[str, ...]
) -> None:
    composed = compose(find_sources(None, None, None), words)
    first = read_values(composed, ("run_dir",))
    for path in (Path("/runs/1"), Path("/runs/2")):
        assert resolve(composed, path).run_dir == str(path)
        assert read_values(composed, ("run_dir",)) == first
    assert composed.tree.run_dir == "/runs/2"


def test_the_shipped_files_set_nothing_but_groups_and_the_program(here: Path) -> None:
    """So that `launch status` and its like can do without them."""
    composed, plain = configure(), LaunchConfig()
    settle_words(plain)
    groups = {"allocator", "data", "dataloader", "model", "program"}
    for field in fields(LaunchConfig):
        if field.name not in groups:
            assert getattr(composed, field.name) == getattr(plain, field.name), field.name


def test_the_last_word_wins(here: Path) -> None:
    assert (
        configure("nproc_per_node=1", "nproc_per_node=2", "model=gpt2", "model=llama7b").model["name"]
        == "llama7b"
    )


def test_sweeps_run_each_combination(launch: Launch) -> None:
    result = launch("-m", "model=tiny,gpt2", "nproc_per_node=1,2", "agent=torchrun", "dry_run=true")
    assert result.code == 0
    lines = [line for line in result.out.splitlines() if "torch.distributed.run" in line]
    found = [
        (f"--nproc-per-node={n}" in line, f"--model.name={m}" in line)
        for line, (m, n) in zip(lines, [(m, n) for m in ("tiny", "gpt2") for n in (1, 2)], strict=True)
    ]
    assert found == [(True, True)] * 4
    assert "launch: job 4 of 4: " in result.err


def test_sweeps_take_ranges_variables_and_groups_without_default(launch: Launch, here: Path) -> None:
    for name in ("a", "b"):
        write(here / f"conf/experiment/{name}.yaml", f"# @package _global_\nprogram:\n  steps: 1{name}\n")
    result = launch("--multirun", "+experiment=a,b", "nproc_per_node=range(1,3)", "env.X=p,q", "dry_run=true")
    assert result.code == 0
    assert result.out.count("--steps=1a") == result.out.count("--steps=1b") == 4


def test_a_sweep_with_a_mistake_starts_no_job(launch: Launch, here: Path) -> None:
    launch("-m", "model=tiny,tyni", "--", "true").assert_error(2, "'tyni'", "did you mean tiny")
    launch("-m", "model=tiny,", "--", "true").assert_error(2)
    assert not list(here.iterdir())


def test_a_sweep_of_plans(launch: Launch) -> None:
    result = launch("plan", "-m", "nproc_per_node=1,2", "format=json")
    sizes, rest = [], result.out
    while rest.strip():
        value, end = json.JSONDecoder().raw_decode(rest.lstrip())
        sizes.append(len(value["ranks"]))
        rest = rest.lstrip()[end:]
    assert sizes == [1, 2]


def test_choices_name_the_option_of_each_group(here: Path) -> None:
    composed: Composed = compose(find_sources(None, None, None), ["+model=gpt2", "binding=none"])
    assert composed.choices["model"] == "gpt2"
    assert composed.choices["binding"] == "none"
    assert not any("hydra" in group for group in composed.choices)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nodelist", "n[0-3],n7"),
        ("exclude", "n1,n2"),
        ("constraint", "a100&ib"),
        ("constraint", "[rack1|rack2]"),
        ("dependency", "afterok:1:2,afterany:3"),
        ("dependency", "singleton?afterok:3"),
        ("partition", "gpu,spare"),
        ("mail_type", "END,FAIL"),
        ("time", "1-12:00:00"),
        ("time", "10:00:00"),
        ("switches", "1@10:00"),
        ("signal", "USR1@90"),
    ],
)
def test_slurms_notations_need_no_quotes(here: Path, key: str, value: str) -> None:
    assert getattr(configure("cluster=slurm", f"cluster.{key}={value}").cluster, key) == value
    assert getattr(configure("cluster=slurm", f"cluster.{key}='{value}'").cluster, key) == value


def test_null_leaves_an_option_to_slurm(here: Path) -> None:
    assert configure("cluster=slurm", "cluster.partition=null").cluster.partition is None
