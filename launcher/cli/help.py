"""`launch --help`: what a newcomer needs, without loading Hydra."""

from textwrap import fill

from launcher.cli.verbs import VERBS, load_help
from launcher.config.hydra_flags import make_parser
from launcher.config.sources import Sources, find_shipped, find_sources
from launcher.errors import UsageError
from launcher.text import print_text

RUN = """\
usage: launch [KEY=VALUE ...] [PROGRAM ARGUMENT ...]
       launch VERB [KEY=VALUE ...]

Starts distributed PyTorch training with every rank on the cores and the memory
next to its GPU: on this machine, in a SLURM job, or through SLURM's queue.

  launch train.py --lr 3e-4                      a rank for each GPU
  launch -m package.train                        a module
  launch -- PROGRAM ARGUMENT                     any other program
  launch nproc_per_node=2 train.py               two ranks
  launch dataloader=8 train.py                   8 DataLoader workers a rank
  launch env.CUDA_VISIBLE_DEVICES=0,1 train.py   two of this machine's GPUs
  launch nodes=4 cluster.time=12:00:00 train.py  four nodes through SLURM
  launch dry_run=true train.py                   show the plan and start nothing
  launch                                         train the bundled model here

verbs
  plan, topo, fit where the ranks would run; the machine; memory of a step
  doctor, tune    what slows jobs down here; the fastest workers, batch
  status, watch   how runs stand; live, what a run's ranks do
  logs, cancel    what ranks have printed; end runs
  report, nodes   a run as one HTML page; past troubles of each node

More: launch VERB --help, and launch --help-all with all keys, groups and flags
"""
FULL = """\
usage: launch [KEY=VALUE ...] [PROGRAM ARGUMENT ...]
       launch plan|topo|doctor [KEY=VALUE ...]
       launch fit [KEY=VALUE ...] [PROGRAM ARGUMENT ...]
       launch tune dataloader|batch [KEY=VALUE ...] [PROGRAM ARGUMENT ...]
       launch status|logs|watch|report|cancel [RUN ...] [KEY=VALUE ...]
       launch nodes [NODE ...] [KEY=VALUE ...]

Starts distributed PyTorch training with every rank where it belongs: on the cores and memory next to its
GPU, with thread counts and DataLoader workers to match: here, in a SLURM allocation, or through SLURM's
queue. torchrun does the rest; your program is not changed.

  launch                                       train the bundled tiny model here
  launch nproc_per_node=2 train.py --lr 3e-4   your own script, with its own arguments
  launch -m package.train                      a module
  launch -- ./train                            any other program
  launch +model=gpt2 program.steps=1000        the bundled program with another model
  launch nodes=4 train.py                      four nodes through SLURM; in a job script, nodes of that job
  launch nodes=4 cluster.partition=gpu cluster.time=12:00:00 follow=true train.py
  launch plan format=json                      where the ranks would run, and why

The program begins at the first word that is no setting and is a file or ends in .py, at -m before a
module, or after `--`, which any other program needs. What follows is the program's own.
"""
KEYS = """\
keys (all of them: launch --cfg job)
  nproc_per_node  ranks on each node: a number, or auto (the visible GPUs, else one for each NUMA node)
  nodes           a number, min:max for an elastic job, or auto: all of the allocation's, else 1
  cluster.X       SLURM's options by SLURM's names: partition, account, qos, time, mem, constraint, …;
                  cluster.additional.X is any other, cluster.requeue.X how often a job is requeued for what
  agent           direct: launch starts the ranks; torchrun: torchrun does; auto: torchrun where it is needed
  follow=true     stay with a submitted job: queue, output, exit code; Ctrl-C asks whether to cancel it
  name, runs_dir  the run directory is RUNS_DIR/NAME/ID; run_dir=DIR goes on with an earlier one
  env.NAME=VALUE  a variable for the program; env.from_file=FILE, or [A,B], takes all those of dotenv files,
                  which env.NAME comes over; `launch plan explain=true` lists variables and who set them
  gc.X            garbage collection in the ranks: gc=synchronized, at the same steps on all (gc.every=50)
  dataloader.X    DataLoader workers: dataloader=vision or a number; default=true gives them to a DataLoader
                  that names none
  allocator.X     PyTorch's settings by their names, as allocator.max_split_size_mb=512;
                  allocator.host=tcmalloc or jemalloc serves malloc
  devices         all: every rank sees the job's GPUs; own: each its own; spread: of more GPUs than ranks,
                  all see those that are spread over packages and NICs
  logs.console    rank0, all or none: whose output is shown (the run directory keeps all of it)
  torchrun.X      torchrun's own options, such as torchrun.max_restarts=3
  parallel.X,     how the program splits and trains its model, for the estimate of memory and speed in
  fit.X           `launch plan +model=…` (--help there); fit.check=error, warn or off: a job of the bundled
                  program that cannot fit in memory is refused before it starts
  objective       loss or file (objective.txt in the run directory): what a sweeper plugin of Hydra's, as in
                  -m hydra/sweeper=optuna, optimizes
  dry_run=true    show the plan and the command or the submission script, start nothing
"""
WIDTH = 106


def print_help(verb: str) -> int:
    """Print the help of a verb, and return exit code 0."""
    print_text(RUN if verb == "run" else load_help(verb))
    return 0


def print_full_help() -> int:
    """Print the help of all verbs, keys, groups and flags; return exit code 0."""
    sources = find_readable()
    lines = [FULL, "verbs (launch VERB --help)"]
    lines += [f"  {name:<14}  {verb.summary}" for name, verb in VERBS.items()]
    lines += ["", KEYS, "groups (choose with GROUP=OPTION; ./conf is searched first)"]
    for group in sources.list_groups():
        options = ", ".join(sources.list_options(group))
        lines.append(fill(options, WIDTH, initial_indent=f"  {group:<14}  ", subsequent_indent=" " * 18))
    lines += ["", "flags", *list_flags()]
    lines += [
        "",
        "exit codes: the program's own, 128+n for a signal; 2 wrong command line, 3 not possible here,",
        "            4 refused by SLURM",
    ]
    print_text("\n".join(lines) + "\n")
    return 0


def find_readable() -> Sources:
    """Return the usual sources, or the shipped ones alone if ./conf cannot be read: help always works."""
    try:
        return find_sources(None, None, None)
    except UsageError:
        return Sources((find_shipped(),))


def list_flags() -> list[str]:
    """Return a line for each flag."""
    actions = make_parser()._actions
    return [f"  {', '.join(action.option_strings):<25}  {action.help}" for action in actions]
