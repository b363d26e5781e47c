"""The allocator's settings on the command line: refused, doubted, or left out before anything starts."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli import allocator_check
from launcher.probe import system_facts
from tests.seam import Launch, Result, run_outside
from tests.specify import specify

SETTING = "PYTORCH_CUDA_ALLOC_CONF"
PLAN = ("plan", "machine=dgx_h100", "format=json")
RUN = ("nproc_per_node=1", "dry_run=true")


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """`torch(VERSION)` has the metadata say that this one is installed; None for none."""
    return lambda version: monkeypatch.setattr(allocator_check, "read_torch_version", lambda: version)


def read_settings(result: Result) -> str | None:
    """The settings of the first rank of a plan."""
    assert result.code == 0, result.err
    found: str | None = json.loads(result.out)["ranks"][0]["env"].get(SETTING)
    return found


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["expandable_segment=true"],
            ["did you mean expandable_segments?", "torch 2.13.0+cpu knows expandable_segments,"],
        ),
        (["nonsense_xyz=1"], ["there is no allocator.nonsense_xyz: torch 2.13.0+cpu knows"]),
        (["expandable_segments=maybe"], ["allocator.expandable_segments=maybe: give True or False"]),
        (["expandable_segments=1"], ["give True or False"]),
        (["max_split_size_mb=19"], ["allocator.max_split_size_mb=19: give a whole number of at least 20"]),
        (["max_split_size_mb=32", "large_segment_size_mb=64"], ["at least 64"]),
        (["max_split_size_mb=64.5"], ["give a whole number"]),
        (["max_split_size_mb=[64]"], ["give a whole number"]),
        (["max_split_size_mb={a:64}"], ["give a whole number"]),
        (["garbage_collection_threshold=1"], ["give a number above 0 and below 1"]),
        (["backend=cudaMalloc"], ["give native or cudaMallocAsync"]),
        (["roundup_power2_divisions=[256:3]"], ["[256:1,512:2,>:8]"]),
        (["pinned_num_register_threads=12"], ["give a power of two from 1 to 128"]),
        (
            ["expandable_segments_reserve=0.5"],
            ["came with torch 2.15, and 2.13.0+cpu is installed: update torch"],
        ),
        (["host=tcmaloc"], ["allocator.host=tcmaloc: choose from system, tcmalloc, jemalloc"]),
    ],
)
def test_a_wrong_key_or_value_is_one_line_with_what_is_right(
    launch: Launch, torch: Callable[[str | None], None], words: list[str], parts: list[str]
) -> None:
    torch("2.13.0+cpu")
    launch(*PLAN, *(f"allocator.{word}" for word in words)).assert_error(2, *parts)


@pytest.mark.parametrize(
    "verb", [RUN, ("nodes=2", "cluster=slurm", "dry_run=true"), ("cluster=slurm",)], ids=str
)
def test_runs_and_submissions_are_checked_before_anything_is_written(
    here: Path, launch: Launch, verb: tuple[str, ...]
) -> None:
    launch(*verb, "allocator.max_split_size_mb=19", "--", "true").assert_error(
        2, "a whole number of at least 20"
    )
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ([], "expandable_segments:True"),
        (["allocator.expandable_segments=true"], "expandable_segments:True"),
        (["allocator.expandable_segments='true'"], "expandable_segments:True"),
        (["allocator.expandable_segments=False"], "expandable_segments:False"),
        (["allocator.expandable_segments=null"], None),
        (["allocator=default"], None),
        (["allocator=default", "allocator.host=null"], None),
        (["allocator=default", "allocator.max_split_size_mb=1e3"], "max_split_size_mb:1000"),
        (["allocator=default", "+allocator.max_split_size_mb=64"], "max_split_size_mb:64"),
        (["allocator=capped"], "max_split_size_mb:512"),
        (["allocator=async"], "backend:cudaMallocAsync"),
        (
            ["allocator=default", "allocator.roundup_power2_divisions=[256:1,512:2,1024:4,>:8]"],
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        ),
        (
            ["allocator=default", "allocator.roundup_power2_divisions={256:1,512:2}"],
            "roundup_power2_divisions:[256:1,512:2]",
        ),
        (["allocator=default", "allocator.roundup_power2_divisions=4"], "roundup_power2_divisions:4"),
    ],
)
def test_right_ones_arrive_in_the_allocators_notation(
    launch: Launch, words: list[str], settings: str | None
) -> None:
    result = launch(*PLAN, *words)
    assert read_settings(result) == settings
    assert result.err == ""


def test_a_file_may_hold_lists_and_mappings(here: Path, launch: Launch) -> None:
    (here / "conf/allocator").mkdir(parents=True)
    lines = ["max_split_size_mb: 64", "roundup_power2_divisions: ['256:1', '>:8']", "expandable_segments: no"]
    (here / "conf/allocator/ours.yaml").write_text("\n".join(lines))
    expected = "max_split_size_mb:64,roundup_power2_divisions:[256:1,>:8],expandable_segments:False"
    assert read_settings(launch(*PLAN, "allocator=ours")) == expected
    (here / "conf/allocator/ours.yaml").write_text("roundup_power2_divisions: {256: 1, '>': 8}")
    assert read_settings(launch(*PLAN, "allocator=ours")) == "roundup_power2_divisions:[256:1,>:8]"
    (here / "conf/allocator/ours.yaml").write_text("roundup_power2_divisions: [256:1]")
    unquoted = launch(*PLAN, "allocator=ours")
    assert unquoted.code == 2 and "=[15361]: give a power of two" in unquoted.err
    assert "(YAML: {256: 1, '>': 8})" in unquoted.err


@pytest.mark.parametrize("version", ["2.16.0", "3.0.0.dev20270101", None])
def test_a_key_that_a_torch_may_know_is_a_warning(
    launch: Launch, torch: Callable[[str | None], None], version: str | None
) -> None:
    torch(version)
    result = launch(*PLAN, "allocator=default", "allocator.expandable_segmentz=0.5")
    assert read_settings(result) == "expandable_segmentz:0.5"
    assert result.err.startswith("launch: warning: there is no allocator.expandable_segmentz: did you mean")
    assert "no value of the allocator's" in launch(*PLAN, "allocator.new_key=a:b").err


def test_without_a_torch_a_later_key_is_a_warning_and_values_are_checked(
    launch: Launch, torch: Callable[[str | None], None]
) -> None:
    torch(None)
    result = launch(*PLAN, "allocator.throw_on_cudamalloc_oom=true")
    assert read_settings(result) == "expandable_segments:True,throw_on_cudamalloc_oom:True"
    assert "throw_on_cudamalloc_oom came with torch 2.12, and none is installed here" in result.err
    assert launch(*PLAN, "allocator.throw_on_cudamalloc_oom=7").code == 2


def test_an_old_torch_has_its_own_bounds(launch: Launch, torch: Callable[[str | None], None]) -> None:
    torch("2.9.1+cu128")
    launch(*PLAN, "allocator.max_split_size_mb=20").assert_error(2, "at least 21")
    launch(*PLAN, "allocator.throw_on_cudamalloc_oom=true").assert_error(
        2, "came with torch 2.12, and 2.9.1+cu128"
    )


@pytest.mark.parametrize("words", [(), ("allocator=capped",), ("allocator=async",)])
def test_the_shipped_options_ask_for_no_version_that_does_not_count(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(allocator_check, "read_torch_version", lambda: asked.append(True))
    assert read_settings(launch(*PLAN, *words)) is not None
    assert bool(asked) == (words == ("allocator=capped",))


def test_another_python_has_another_torch(launch: Launch, torch: Callable[[str | None], None]) -> None:
    torch("2.6.0")
    later = "allocator.throw_on_cudamalloc_oom=true"
    launch(*PLAN, later).assert_error(2, "2.6.0 is installed")
    assert launch(*PLAN, later, "env.PYTHON_EXEC=/opt/other/bin/python").code == 0
    assert launch(*PLAN, later, f"env.PYTHON_EXEC={sys.executable}").code == 2


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("expandable_segments:true", "expandable_segments takes True or False"),
        ("expandable_segments", "it is not KEY:VALUE,KEY:VALUE"),
        ("expandable_segment:True", "there is no expandable_segment: did you mean expandable_segments?"),
        ("expandable_segments_reserve:0.5", "expandable_segments_reserve came with torch 2.15"),
        ("max_split_size_mb:5", "max_split_size_mb takes a whole number of at least 20"),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_broken_variable_of_the_users_is_a_warning(
    launch: Launch, torch: Callable[[str | None], None], name: str, text: str, part: str
) -> None:
    torch("2.13.0")
    result = launch(*PLAN, f"env.{name}={text}")
    assert result.code == 0
    assert result.err.startswith(f"launch: warning: {name}={text}, set by the user: {part}")
    assert "refuses it at the first use of CUDA, on every rank: correct or unset it" in result.err
    assert result.err.count("\n") == 1


def run_program(launch: Launch, here: Path, *words: str, settings: tuple[str, ...] = ()) -> Result:
    (here / "train.py").touch()
    result = launch(*RUN, *settings, "--", "train.py", *words)
    assert result.code == 0, result.err
    return result


@pytest.mark.parametrize(
    ("words", "part", "remedy"),
    [
        (["--use-nccl-ub"], "--use-nccl-ub: Megatron-LM refuses", ""),
        (["--enable-cuda-graph"], "--enable-cuda-graph: NCCL registers", "env.NCCL_GRAPH_REGISTER=0"),
        (["--cuda-graph-impl", "local"], "--cuda-graph-impl: NCCL registers", "env.NCCL_GRAPH_REGISTER=0"),
        (["--cuda-graph-impl=local"], "--cuda-graph-impl: NCCL registers", "env.NCCL_GRAPH_REGISTER=0"),
    ],
)
def test_a_program_that_does_not_go_with_expandable_segments_is_told_and_runs(
    here: Path, launch: Launch, words: list[str], part: str, remedy: str
) -> None:
    left = run_program(launch, here, *words).err
    assert f"launch: warning: {part}" in left
    assert "expandable_segments is left out (allocator=expandable has it all the same)" in left
    asked = run_program(launch, here, *words, settings=("allocator=expandable",)).err
    assert (
        f"launch: warning: {part}" in asked and "left out" not in asked and "set allocator=default" in asked
    )
    assert remedy in left and remedy in asked
    assert "launch: warning" not in run_program(launch, here, *words, settings=("allocator=capped",)).err


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--cuda-graph-impl", "none"], ()),
        (["--cuda-graph-impl"], ()),
        (["--enable-cuda-graph"], ("env.NCCL_GRAPH_REGISTER=0",)),
        (["--use-nccl-ub"], ("env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",)),
        ([], ("env.UCX_TLS=rc,tcp",)),
        ([], ("env.TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=0",)),
    ],
)
def test_what_goes_with_them_is_not_warned_of(
    here: Path, launch: Launch, words: list[str], settings: tuple[str, ...]
) -> None:
    assert "warning" not in run_program(launch, here, *words, settings=settings).err


@pytest.mark.parametrize(
    ("variable", "part"),
    [
        ("UCX_TLS=rc,cuda_ipc", "ai-dynamo/nixl/issues/1754"),
        ("NIXL_LOG_LEVEL=info", "ai-dynamo/nixl/issues/1754"),
        ("TORCHINDUCTOR_CUDAGRAPHS=1", "set env.NCCL_GRAPH_REGISTER=0 to have both"),
        ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1", "torch switches it off"),
    ],
)
def test_a_variable_that_shows_a_conflict_leaves_them_out_of_the_plan(
    launch: Launch, variable: str, part: str
) -> None:
    result = launch(*PLAN, f"env.{variable}")
    assert read_settings(result) is None
    assert variable.partition("=")[0] in result.err and part in result.err
    asked = launch(*PLAN, f"env.{variable}", "allocator.expandable_segments=true")
    assert read_settings(asked) == "expandable_segments:True"
    assert "left out" not in asked.err and "set allocator=default" in asked.err
    theirs = launch(*PLAN, f"env.{variable}", f"env.{SETTING}=expandable_segments:True")
    assert read_settings(theirs) == "expandable_segments:True" and "left out" not in theirs.err


def test_a_plan_for_a_program_is_the_one_that_its_run_has(launch: Launch) -> None:
    planned = launch(*PLAN, "--", "python", "pretrain.py", "--use-nccl-ub")
    assert read_settings(planned) is None and "expandable_segments is left out" in planned.err


def test_programs_that_share_gpu_memory_are_warned_of_in_a_container(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("nodes=2", "cluster=slurm", "dry_run=true", "--", "python", "-m", "verl.trainer.main_ppo")
    monkeypatch.setattr(allocator_check, "MARKS", ())
    assert "165685" not in launch(*words).err
    contained = launch("cluster.container.image=a.sif", *words)
    assert contained.code == 0
    assert "pytorch/issues/165685" in contained.err and "--cap-add=SYS_PTRACE to have both" in contained.err


def test_a_container_that_may_trace_is_as_good_as_none(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*RUN, "--", "echo", "verl.trainer")
    monkeypatch.setattr(allocator_check, "MARKS", ("/",))
    for capabilities in (0, 1 << 19):
        monkeypatch.setattr(system_facts, "read_capabilities", lambda _, found=capabilities: found)
        assert ("165685" in launch(*words).err) == (capabilities == 0)


def test_settings_without_effect_are_named(launch: Launch) -> None:
    ignored = launch(*PLAN, "allocator=async", "allocator.max_split_size_mb=64")
    assert "backend:cudaMallocAsync ignores max_split_size_mb" in ignored.err
    assert read_settings(ignored) == "backend:cudaMallocAsync"
    assert launch(*PLAN, f"env.{SETTING}=backend:cudaMallocAsync").err == ""
    idle = launch(*PLAN, "allocator.garbage_collection_threshold=0.8")
    assert "garbage_collection_threshold does nothing without a limit" in idle.err
    limited = ("allocator.garbage_collection_threshold=0.8", "allocator.per_process_memory_fraction=0.9")
    assert launch(*PLAN, *limited).err == ""


def test_what_is_left_out_is_not_in_the_configuration(here: Path) -> None:
    """So it does not go to the nodes of a submitted job either."""
    (here / "train.py").touch()
    for words, left in ((["--use-nccl-ub"], {}), ([], {"expandable_segments": True})):
        config = specify([], ("train.py", *words), {}).config
        assert config.allocator == {**left, "host": "system"}


@pytest.mark.usefixtures("quick_agent")
def test_a_program_that_was_told_of_a_conflict_runs(here: Path) -> None:
    (here / "train.py").write_text("pass")
    words = ["nproc_per_node=1", "new_run_dir=run", "--", "train.py", "--use-nccl-ub"]
    done = run_outside(words, here, {"CUDA_VISIBLE_DEVICES": ""}, timeout=120)
    assert done.code == 0, done.err
    assert done.err.count("--use-nccl-ub: Megatron-LM refuses") == 1


def test_a_plan_without_a_program_is_one(here: Path, launch: Launch) -> None:
    (here / "conf/program").mkdir(parents=True)
    (here / "conf/program/none.yaml").write_text("lr: 1")
    assert read_settings(launch(*PLAN, "program=none")) == "expandable_segments:True"
