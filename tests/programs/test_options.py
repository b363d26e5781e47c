"""The command line, the learning rate, the peaks."""

import subprocess
import sys

import pytest

from launcher.programs.options import ModelConfig, parse_config
from launcher.programs.training import compute_learning_rate


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


def test_the_rate_warms_up_and_falls_to_its_end() -> None:
    config = parse_config(["--steps", "100", "--warmup-steps", "10", "--min-lr-ratio", "0.1", "--lr", "1"])
    rates = [compute_learning_rate(config, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    short = parse_config(["--steps", "1", "--warmup-steps", "0", "--lr", "1"])
    assert compute_learning_rate(short, 1) == pytest.approx(0.1)
