"""What the program is given: its options, and the text in its order."""

import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from launcher.programs.data import Schedule, Windows
from launcher.programs.options import parse_config


def write_text(path: Path, windows: int) -> str:
    """Write a text of so many windows of one byte."""
    path.write_bytes(bytes(windows + 1))
    return str(path)


def consume(
    windows: Windows, world_size: int, accumulation: int, batch_size: int, steps: int, first: int = 0
) -> list[list[int]]:
    """Give what all ranks together take in each optimizer step, sorted."""
    ranks = [
        list(Schedule(windows, 5, first, steps * accumulation, batch_size, rank, world_size))
        for rank in range(world_size)
    ]
    taken = [sorted(chain(*(rank[m] for rank in ranks))) for m in range(steps * accumulation)]
    return [sorted(chain(*taken[s * accumulation : (s + 1) * accumulation])) for s in range(steps)]


def test_steps_depend_on_neither_the_world_size_nor_a_resumption(tmp_path: Path) -> None:
    windows = Windows(write_text(tmp_path / "text", 70), 1, 1 / 7)
    whole = consume(windows, 1, 1, 8, steps=12)
    for world_size, accumulation, batch_size in ((1, 4, 2), (2, 2, 2), (4, 1, 2), (8, 1, 1)):
        assert consume(windows, world_size, accumulation, batch_size, steps=12) == whole
    assert consume(windows, 2, 1, 4, steps=5, first=7 * 8) == whole[7:]


def test_each_epoch_is_another_order_of_the_windows_for_training(tmp_path: Path) -> None:
    windows = Windows(write_text(tmp_path / "text", 60), 1, 1 / 6)
    epochs = [next(iter(Schedule(windows, 3, epoch * 50, 1, 50, 0, 1))) for epoch in range(3)]
    assert (windows.training, windows.validation) == (50, 10)
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != sorted(epochs[0])
    assert epochs[0] != next(iter(Schedule(windows, 4, 0, 1, 50, 0, 1)))


def test_a_share_is_held_out_one_window_at_least(tmp_path: Path) -> None:
    cases = ((1, 0.0, 0), (40, 0.0, 0), (2, 0.5, 1), (3, 0.01, 1), (100, 0.01, 1), (477, 0.03, 14))
    for count, fraction, held_out in cases:
        windows = Windows(write_text(tmp_path / "text", count), 1, fraction)
        assert (windows.validation, windows.training, len(windows)) == (held_out, count - held_out, count)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(101)))
    return path


def test_windows_overlap_by_the_byte_to_predict(text: Path) -> None:
    windows = Windows(str(text), 10, 0)
    assert len(windows) == 10
    assert windows[0].tolist() == list(range(11))
    assert windows[9].tolist() == list(range(90, 101))
    assert windows[9].dtype == torch.uint8
    assert len(pickle.dumps(windows)) < 1000
    assert pickle.loads(pickle.dumps(windows))[1].tolist() == list(range(10, 21))


def test_loaders_give_the_schedule_also_through_workers(text: Path) -> None:
    windows = Windows(str(text), 10, 0.2)
    schedule = Schedule(windows, 1, 0, 6, 2, 0, 1)
    plain = [batch.tolist() for batch in schedule.make_loader(0, pin=False)]
    worked = [batch.tolist() for batch in schedule.make_loader(1, pin=False)]
    assert plain == worked == [[windows[i].tolist() for i in indices] for indices in schedule]
    assert len(plain) == 6


@pytest.mark.parametrize(("size", "fraction"), [(10, 0.0), (20, 0.1), (0, 0.01)])
def test_a_text_too_short(tmp_path: Path, size: int, fraction: float) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(size))
    with pytest.raises(ValueError, match=f"the text has {size} bytes"):
        Windows(str(path), 10, fraction)


def test_pythons_library_without_its_tests() -> None:
    windows = Windows(None, 1000, 0)
    content = b"".join(bytes(windows[index][:-1].tolist()) for index in range(len(windows)))
    assert len(content) > 1_000_000 and b"class ArgumentParser" in content
    assert b"class TestOptionalsSingleDash(" not in content


def test_a_directory_is_one_text_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    (folder / "b").mkdir(parents=True)
    (folder / "z").write_text("last ")
    (folder / "a").write_text("first ")
    (folder / "empty").touch()
    (folder / "b" / "c").write_text("below ")
    for number in reversed(range(9)):
        (folder / f"d{number}").mkdir()
        (folder / f"d{number}" / "file").write_text(f"{number} ")
    text = b"first last below 0 1 2 3 4 5 6 7 8 "
    for length in (1, 5, 17, len(text) - 1):
        windows = Windows(str(folder), length, 0)
        for index in range(len(windows)):
            start = index * length
            assert bytes(windows[index].tolist()) == text[start : start + length + 1]
    assert bytes(Windows(str(folder / "a"), 5, 0)[0].tolist()) == b"first "
    assert Windows(str(folder / "a"), 5, 0).size == 6


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_no_text(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"--data\.path"):
        Windows(str(tmp_path / path), 1, 0)


def test_options_reach_the_configuration() -> None:
    given = (
        "--batch-size 3 --no-compile --activation-checkpointing full --lr 1e-3 --num-workers 0"
        " --model.layers 2"
    )
    more = ["--no-model.tied_embeddings", "--model.kv_heads=1", "--data.path", "a b;$(c)"]
    config = parse_config([*given.split(), *more])
    train = config.train
    assert (train.batch_size, train.compile, train.activation_checkpointing) == (3, False, "full")
    assert (config.lr, config.workers, config.seq_len) == (1e-3, 0, 128)
    assert config.model == replace(parse_config([]).model, layers=2, tied_embeddings=False, kv_heads=1)
    assert config.data.path == "a b;$(c)"


def test_what_is_not_given_follows_from_the_model() -> None:
    config = parse_config(["--model.hidden_size", "4096", "--model.max_seq_len", "131072"])
    assert (config.lr, config.seq_len) == (3e-4, 4096)
    assert parse_config(["--model.max_seq_len", "64"]).seq_len == 64
    assert parse_config(["--lr", "0"]).lr == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--lr", "nan"], "lr=nan must be at least 0"),
        (["--weight-decay", "nan"], "weight_decay=nan must be at least 0"),
        (["--seq-len", "129"], "seq_len=129 is above model.max_seq_len=128"),
        (["--data.val_fraction", "-1"], "data.val_fraction=-1.0 must be at least 0"),
        (["--model.heads", "6"], "model.hidden_size=128 is not divisible by model.heads=6"),
        (["--model.kv_heads", "3"], "model.heads=4 is not divisible by model.kv_heads=3"),
        (["--model.vocab_size", "255"], "model.vocab_size=255 must be at least 256"),
        (["--model.layers", "0"], "model.layers=0 must be at least 1"),
        (["--model.head_dim", "5"], "rotary embeddings need an even width of a head, not 5"),
        (["--model.norm", "batch"], "argument --model.norm: invalid choice: 'batch'"),
        (["--nonsense", "a\nb"], "unrecognized arguments: --nonsense a b"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(argv)
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.err.startswith(f"train: error: {message}")
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_a_mistake_is_found_without_torch() -> None:
    code = "import sys, launcher.programs.train as t\ntry: t.main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--steps", "0"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr == "train: error: steps=0 must be at least 1\n"
