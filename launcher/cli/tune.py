"""`launch tune`: finds a setting that a program is fastest with, by running it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.cli.run import try_anew
from launcher.cli.tune_batch import search_batch
from launcher.cli.tune_workers import search_workers
from launcher.errors import UsageError

if TYPE_CHECKING:
    from launcher.config.compose import Composed

SEARCHES = {"dataloader": search_workers, "batch": search_batch}
"""What can be tuned."""


def tune_program(
    composed: "Composed",
    names: Sequence[str],
    program: tuple[str, ...] | None,
    argv: Sequence[str],
) -> int:
    """Tune what is named for a program, and return the exit code; raises LaunchError."""
    name = names[0] if len(names) == 1 else None
    search = SEARCHES.get(name or "")
    if search is None:
        given = f"`{names[0]}` cannot be tuned" if names else "tune what?"
        raise UsageError(
            f"{given}: say `launch tune dataloader [KEY=VALUE …] [-- PROGRAM ARGUMENT …]`, or `launch tune"
            " batch tune.option=--batch-size …`"
        )
    return try_anew(lambda: search(composed, program, argv))


HELP = """\
usage: launch tune dataloader|batch [KEY=VALUE ...] [PROGRAM ARGUMENT ...]

Runs the program on this machine with several values of a setting, for some
dozens of steps each, and ends it when its speed is clear. The program is not
changed. It starts from its beginning each time, and writes what it writes.

dataloader  The number of DataLoader workers. A DataLoader(...) without
            num_workers gets the number to be tried, and so do
            LAUNCH_NUM_WORKERS and `{num_workers}` among the arguments. The
            choice, the fewest workers that are as fast as any, is kept as an
            option of the group dataloader.
batch       The largest micro-batch that fits in memory, and the fastest one, by
            the program's own option. The argument to use is printed.

  format=table|json    json: {"schema": 1, "trials": [...], ...} and the choice:
                       num_workers, or batch, largest, fastest, argument
  dry_run=true         show what would be tried
  save=FILE            where to keep the choice (dataloader: by default
                       conf/dataloader/tuned.yaml, which
                       `launch dataloader=tuned` takes; batch: for the bundled
                       program, such as conf/program/tuned.yaml)
  yes=true             replace a file there that launch has not written
  tune.option=OPTION   batch: the program's option, as --batch-size or
                       train.batch_size= (for Hydra's); the bundled program's
                       is known
  tune.max_batch=N     largest micro-batch to try (4096)
  tune.max_workers=N   workers of a rank at most (auto: two for each of its
                       cores, if memory allows)
  tune.steps=N         measured steps at most for each value (48)
  tune.seconds=N       seconds of measuring for each value (60)
  tune.timeout=N       seconds that a run of the program may take (900)

  launch tune dataloader train.py --epochs 1
  launch tune dataloader nproc_per_node=2 tune.max_workers=8 train.py
  launch tune batch tune.option=--batch-size train.py --epochs 1
  launch tune batch +model=gpt2 save=conf/program/tuned.yaml
"""
