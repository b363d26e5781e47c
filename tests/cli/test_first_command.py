"""`launch +model=NAME nodes=N` as it is typed: what is `auto` is chosen so that it fits; the run has it."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.seam import Launch, run_outside

FIRST = Path(__file__).parents[1] / "data" / "first_commands.csv"
"""Trainings that people run, with what is chosen for them."""


def read_fit(launch: Launch, *words: str) -> dict[str, Any]:
    done = launch("plan", "format=json", *words)
    assert done.code == 0, done
    fit: dict[str, Any] = json.loads(done.out)["fit"]
    return fit


def test_a_preset_that_has_been_made_small_has_no_usual_batch(launch: Launch) -> None:
    small = ("model.layers=1", "model.hidden_size=32", "model.vocab_size=256", "model.max_seq_len=32")
    words = ("+model=llama7b", "machine=cpu_2s", "nproc_per_node=2", "model.intermediate_size=64", *small)
    for batch in ("program.batch_size=4", "program.batch_size=auto"):
        assert read_fit(launch, *words, batch)["settings"]["accumulation"] == 1, batch


def test_each_first_command_fits_as_it_is_typed(launch: Launch) -> None:
    with FIRST.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18
    for row in rows:
        fit = read_fit(launch, f"+model={row['model']}", f"machine={row['machine']}", f"nodes={row['nodes']}")
        assert fit["verdict"] == "fits", row
        settings, layout = fit["settings"], fit["layout"]
        chosen = (settings["micro_batch"], settings["checkpointing"], settings["framework"])
        expected = (row["batch_size"], row["activation_checkpointing"], row["parallel"])
        assert tuple(map(str, chosen)) == expected, row
        assert str(settings["accumulation"]) == row["grad_accumulation"], row
        if row["model"] != "tiny":  # the usual batch of each model, on any number of GPUs
            tokens = 1 << 19 if row["model"] == "gpt2" else 1 << 22
            sequences = settings["micro_batch"] * settings["accumulation"] * layout["dp"]
            assert sequences * settings["seq_len"] == tokens, row


def test_what_is_set_is_kept_and_the_rest_is_chosen_around_it(launch: Launch) -> None:
    base = ("+model=llama7b", "machine=dgx_h100", "nodes=4")
    fit = read_fit(launch, *base, "program.batch_size=16")
    settings = fit["settings"]
    assert fit["chosen"].startswith("chosen: program.activation_checkpointing=full program.parallel=fsdp")
    assert fit["chosen"].endswith("; without recomputation it does not fit")
    assert (settings["micro_batch"], settings["accumulation"]) == (16, 2)
    assert settings["checkpointing"] == "full"
    settings = read_fit(launch, *base, "program.activation_checkpointing=true")["settings"]
    assert settings["checkpointing"] == "full" and settings["micro_batch"] == 16
    settings = read_fit(launch, *base, "program.grad_accumulation=2", "program.global_batch=64")["settings"]
    assert (settings["micro_batch"], settings["accumulation"]) == (1, 2)
    settings = read_fit(launch, *base, "program.global_batch=1Mtokens")["settings"]
    assert (settings["micro_batch"], settings["accumulation"]) == (2, 4)
    launch("plan", *base, "program.global_batch=many").assert_error(
        2, "program.global_batch=many", "4Mtokens"
    )
    both = ("program.batch_size=4", "program.grad_accumulation=3", "program.global_batch=64")
    launch("plan", *base, *both).assert_error(2, "on 32 ranks is 384")


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (("fit.check=off",), "--batch-size=2 --grad-accumulation=64 --parallel=fsdp"),
        (("fit.check=off", "fit.gpu=A100-40GB"), "--batch-size=8 --grad-accumulation=16 --parallel=fsdp"),
        (
            ("fit.check=off", "program.global_batch=64"),
            "--batch-size=2 --grad-accumulation=4 --parallel=fsdp",
        ),
        (("fit.micro_batch=1",), "--batch-size=2 --grad-accumulation=64 --parallel=fsdp"),
    ],
    ids=str,
)
def test_the_choice_does_not_depend_on_the_check(launch: Launch, words: Sequence[str], chosen: str) -> None:
    base = ("+model=llama7b", "nproc_per_node=8", "dry_run=true")
    given = () if any("fit.gpu=" in word for word in words) else ("fit.gpu=H100",)
    for verb in ((), ("fit",)):
        done = launch(*verb, *base, *(["program=train"] if verb else []), *given, *words)
        assert done.code == 0, done
        assert set(chosen.split()) <= set(done.out.split()), done
        assert done.err.count("chosen: program.batch_size=") == 1
    done = launch("tune", "batch", "+model=llama7b", "fit.gpu=H100", "nproc_per_node=8", "dry_run=true")
    assert {"--parallel=fsdp", "--grad-accumulation=1"} <= set(done.out.split())


def test_what_cannot_fit_says_how_many_nodes_can(launch: Launch) -> None:
    done = launch("+model=llama70b", "cluster=local", "fit.gpu=A100-40GB", "nproc_per_node=1")
    done.assert_error(3, "llama70b does not fit", "nodes=")
    nodes = int(done.err.partition("nodes=")[2].split()[0])
    words = ("+model=llama70b", "fit.gpu=A100-40GB", "nproc_per_node=1", "machine=cpu_2s")
    assert read_fit(launch, *words, f"nodes={nodes}")["verdict"] == "fits"
    assert read_fit(launch, *words, f"nodes={nodes - 1}")["verdict"] != "fits"
    told = launch("plan", "+model=llama70b", "machine=aws_p4d_24xlarge", "nodes=4").out
    (line,) = (line for line in told.splitlines() if "does not fit" in line)
    assert line.endswith("GiB at least; nodes=7 is enough")


def test_a_model_alone_is_answered_about_memory_alone(launch: Launch) -> None:
    words = ("+model=llama7b", "machine=dgx_h100", "nodes=4")
    done = launch("fit", *words)
    assert done.code == 0 and done.out.startswith("memory of each GPU"), done
    assert "fits" in done.out.splitlines()[0] and "chosen: program.batch_size=2 " in done.out
    assert not [word for word in ("each node", "tokens/s", "NUMA", "rank  ") if word in done.out]
    planned = read_fit(launch, *words)
    alone = json.loads(launch("fit", "format=json", *words).out)
    assert alone["memory"] == planned["memory"] and alone["verdict"] == "fits"
    set_one = ("program.batch_size=1", "program.activation_checkpointing=full")
    alone = json.loads(launch("fit", "format=json", *words, *set_one).out)
    assert alone["memory"] == read_fit(launch, *words, *set_one)["memory"] != planned["memory"]
    done = launch("fit", "+model=llama70b", "fit.gpu=A100-40GB", "nproc_per_node=1")
    assert done.code == 3 and "does not fit" in done.out and "nodes=55" in done.out


def test_the_grid_marks_what_is_chosen(here: Path) -> None:
    words = ["+model=llama7b", "machine=dgx_h100", "nodes=4", "fit.grid=true"]
    done = run_outside(["plan", *words], here, {"COLUMNS": "80"})
    lines = done.out.partition("* is what is judged")[2].splitlines()
    assert done.code == 0 and lines and max(map(len, lines[:9])) <= 80, done
    assert "tokens/s" in done.out
    report = json.loads(run_outside(["plan", "format=json", *words], here).out)["fit"]
    grid = report["grid"]
    (chosen,) = (cell for cell in grid if cell["is_chosen"])
    assert chosen["total"] == report["memory"]["total"]
    assert done.out.count(f"{chosen['total']['high'] / (1 << 30):.1f}*") == 1
    too_much = [cell["total"]["high"] for cell in grid if cell["total"]["high"] > report["capacity"]]
    assert too_much and all(f"({size / (1 << 30):.1f})" in done.out for size in too_much)
    keys = ("micro_batch", "checkpointing", "framework")
    assert [chosen[key] for key in keys] == [report["settings"][key] for key in keys]
    assert len({tuple(cell[key] for key in keys) for cell in grid}) == len(grid) == 5 * 3 * 2
    sizes = {tuple(cell[key] for key in keys): cell["total"]["high"] for cell in grid}
    full, none = sizes[8, "full", "fsdp"], sizes[8, "none", "fsdp"]
    assert full < sizes[8, "selective", "fsdp"] < none and full < sizes[8, "full", "ddp"]


def test_a_run_has_the_values_and_goes_on_with_them(here: Path) -> None:
    def start(*words: str) -> str:
        done = run_outside([*words, "program.global_batch=6", "start.warm=false"], here)
        assert done.code == 0, done
        return done.out + done.err

    told = start("nproc_per_node=2", "program.steps=1", "new_run_dir=run")
    assert "chosen: program.batch_size=3 " in told
    assert "3 sequences x 128 x 2 ranks x 1 micro-steps" in told
    expected = {
        "batch_size": 3,
        "grad_accumulation": 1,
        "activation_checkpointing": "none",
        "parallel": "ddp",
    }
    manifest = json.loads((here / "run/manifest.json").read_text())
    assert manifest["training"] == expected
    program = yaml.safe_load((here / "run/config.yaml").read_text())["program"]
    assert {key: program[key] for key in expected} == expected
    again = start("nproc_per_node=1", "program.steps=2", "run_dir=run")
    assert "program.batch_size" not in again.partition("other settings")[2].partition("\n")[0]
    assert "3 sequences x 128 x 1 ranks x 2 micro-steps" in again
