"""The command line, the learning rate, the peaks."""

import subprocess
import sys

import pytest
import torch

from launcher.programs.dimensions import ModelConfig, count_flops
from launcher.programs.metrics import Peak, SpeedMeter, choose_peak, find_peak
from launcher.programs.training_config import TrainConfig, parse_config
from launcher.programs.training_loop import compute_learning_rate


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
    assert config.model == ModelConfig(layers=2, tied_embeddings=False, kv_heads=1)
    assert config.data.path == "a b;$(c)"


def test_what_is_not_given_follows_from_the_model() -> None:
    config = parse_config(["--model.hidden_size", "4096", "--model.max_seq_len", "131072"])
    assert (config.lr, config.seq_len) == (3e-4, 4096)
    assert parse_config(["--model.max_seq_len", "64"]).seq_len == 64


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--lr", "nan"], "--lr nan must be above 0"),
        (["--lr", "0"], "--lr 0.0 must be above 0"),
        (["--weight-decay", "nan"], "--weight-decay nan must be at least 0"),
        (["--min-lr-ratio", "2"], "--min-lr-ratio 2.0 must lie between 0 and 1"),
        (["--seq-len", "129"], "--seq-len 129 is above model.max_seq_len=128"),
        (["--data.val_fraction", "0.9"], "--data.val_fraction 0.9 must lie between 0 and 0.5"),
        (["--model.heads", "6"], "model.hidden_size=128 is not divisible by model.heads=6"),
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
    assert done.stderr == "train: error: --steps 0 must be at least 1\n"


def test_the_rate_warms_up_and_falls_to_its_end() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, min_lr_ratio=0.1)
    rates = [compute_learning_rate(config, 1.0, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert compute_learning_rate(TrainConfig(steps=1, warmup_steps=0), 1.0, 1) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_published_peaks(name: str, peak: float | None) -> None:
    assert find_peak(name) == peak


def test_a_given_peak_wins_and_a_cpu_has_none_of_its_own() -> None:
    cpu = torch.device("cpu")
    assert choose_peak(2.5, cpu, torch.float32) == Peak(2.5, "given")
    assert choose_peak(None, cpu, torch.float32) is None


def test_speed_counts_recomputation_in_tflops_and_not_in_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.0, 12.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    model = ModelConfig()
    meter = SpeedMeter(model, 128, recompute=True, world_size=2, peak=Peak(0.01, "given"), start=10.0)
    meter.restart()
    meter.tokens = 4000
    speed = meter.read_speed()
    assert speed.tokens == 2000
    assert speed.mfu is not None
    assert speed.mfu == pytest.approx(count_flops(model, 128) * 1000 / 1e12 / 0.01)
    assert speed.tflops == pytest.approx(count_flops(model, 128, recompute=True) * 1000 / 1e12)
    assert speed.tflops > speed.mfu * 0.01
