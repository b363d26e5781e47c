"""`launch --help`: what a newcomer needs, without loading Hydra."""

from textwrap import fill

from launcher.config.hydra_flags import make_parser
from launcher.config.search_path import Sources, find_shipped, find_sources
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
  plan, topo      where the ranks would run, and why; the machine
  doctor          what slows jobs down here, and the fix
  tune            find the best number of DataLoader workers
  status, logs    how runs stand; what their ranks have printed
  cancel          end runs

More: launch VERB --help, and launch --help-all with all keys, groups and flags
"""
FULL = """\
usage: launch [KEY=VALUE ...] [PROGRAM ARGUMENT ...]
       launch plan|topo|doctor [KEY=VALUE ...]
       launch tune dataloader [KEY=VALUE ...] [PROGRAM ARGUMENT ...]
       launch status|logs|cancel [RUN ...] [KEY=VALUE ...]

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

verbs (launch VERB --help)
  plan            show placement and variables, start nothing; explain=true: why, format=json: for programs
  topo            show the machine, and what this job may use of it
  doctor          look for what slows jobs down here, and compare the last run with its plan
  tune            find the number of DataLoader workers that a program is fastest with
  status          how runs stand: state, nodes, step, last line; those that are named in detail
  logs            what a run's ranks have printed; -f goes on to its end, rank=3 is that rank alone
  cancel          end runs, in SLURM's queue or here, after asking

keys (all of them: launch --cfg job)
  nproc_per_node  ranks on each node: a number, or auto (the visible GPUs, else one for each NUMA node)
  nodes           a number, min:max for an elastic job, or auto: all of the allocation's, else 1
  cluster.X       SLURM's options by SLURM's names: partition, account, qos, time, mem, constraint, …;
                  cluster.additional.X is any other, cluster.requeue.X how often a job is requeued for what
  agent           torchrun, or srun: each rank a SLURM task
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
  objective       loss or file (objective.txt in the run directory): what a sweeper plugin of Hydra's, as in
                  -m hydra/sweeper=optuna, optimizes
  dry_run=true    show the plan and the command or the submission script, start nothing
"""
PLAN = """\
usage: launch plan [KEY=VALUE ...] [PROGRAM ARGUMENT ...]

Shows where each rank would run, with which threads, DataLoader workers and
variables. It starts nothing. The keys are those of `launch`, and

  explain=true         why each rank is where it is, and who set each variable
  format=table|json    json is the very value that a run uses
  machine=NAME         plan for a shipped machine (see `launch --help-all`)
  machine.snapshot=F   plan for the machine that `launch topo save=F` described
  machine.root=DIR     read the machine from DIR/sys and DIR/proc

  launch plan
  launch plan nproc_per_node=2 binding=numa explain=true
  launch plan machine=dgx_h100 format=json
"""
TOPO = """\
usage: launch topo [KEY=VALUE ...]

Shows the machine as a tree of packages, NUMA nodes, caches, cores, GPUs and
NICs, and what this job may use of it.

  explain=true         every cache and core on a line of its own
  format=table|json    json is the snapshot that save=FILE writes
  save=FILE            write a snapshot, to plan for this machine anywhere:
                       `launch plan machine.snapshot=FILE`
  image=FILE.svg|png   draw the machine with the ranks on it, which
                       nproc_per_node and binding place as for `launch`
  machine=NAME, machine.snapshot=F, machine.root=DIR    another machine

  launch topo
  launch topo machine=dgx_a100 explain=true
"""
DOCTOR = """\
usage: launch doctor [KEY=VALUE ...]

Checks what slows or breaks training jobs on this machine, and compares what the
last run's ranks had with their plan. Each finding says why it matters, and the
fix. Nothing is changed. The exit code is 1 if a finding is an error (x) or a
warning (!), and 0 if there are notes (i) and unmade checks (?) at most.

  format=table|json    json: {"schema": 1,
                       "findings": [{level, subject, what, why, fix}]}
  run_dir=DIR          compare this run, not the last one below runs_dir

  launch doctor
  launch doctor format=json
"""
TUNE = """\
usage: launch tune dataloader [KEY=VALUE ...] [PROGRAM ARGUMENT ...]

Runs the program on this machine with several numbers of DataLoader workers, for
some dozens of steps each, and ends it when its steps per second and its waiting
for data are clear. The program is not changed: a DataLoader(...) without
num_workers gets the number to be tried, and so do LAUNCH_NUM_WORKERS and
`{num_workers}` among the arguments. It starts from its beginning each time, and
writes what it writes. The choice, the fewest workers that are as fast as any,
is kept as an option of the group dataloader.

  save=FILE            where to keep it (conf/dataloader/tuned.yaml, which
                       `launch dataloader=tuned` takes)
  yes=true             replace a file there that launch has not written
  format=table|json    json: {"schema": 1, "num_workers": N,
                       "trials": [{workers, ...}]}
  dry_run=true         show what would be tried
  tune.max_workers=N   workers of a rank at most (auto: two for each of its
                       cores, if memory allows)
  tune.steps=N         measured steps at most for each number of workers (48)
  tune.seconds=N       seconds of measuring for each number (60)
  tune.timeout=N       seconds that a run of the program may take (900)

  launch tune dataloader train.py --epochs 1
  launch tune dataloader nproc_per_node=2 tune.max_workers=8 train.py
"""
STATUS = """\
usage: launch status [RUN ...] [KEY=VALUE ...]

Shows how runs stand, here and in SLURM's queue: the newest 10 and all that wait
or run, or those that are named. One that is named is shown in detail, with its
attempts and the first rank that failed. RUN is NAME/ID, an ID, a NAME (its
newest run), a run directory, or a job (12, or 12_3 of an array).

  format=table|json    json: {"schema": 1,
                       "runs": [{run, state, reason, step, ...}]}
  runs_dir=DIR         where the runs are (runs)

  launch status
  launch status train
  launch status format=json
"""
LOGS = """\
usage: launch logs [-f] [rank=K] [RUN] [KEY=VALUE ...]

Prints what the ranks of a run's last attempt have printed, each line with its
host and rank; if no rank has printed anything, the job's own log. RUN is the
newest run, or NAME/ID, an ID, a NAME (its newest run), a run directory, or a
job (12, or 12_3 of an array).

  -f                   go on to the run's end, over all attempts; it begins
                       with the last lines of each rank
  logs.tail=N          how many of those (20)
  rank=K               this rank alone, without host and rank before each line
  runs_dir=DIR         where the runs are (runs)

  launch logs
  launch logs rank=1
  launch logs -f train logs.tail=100
"""
CANCEL = """\
usage: launch cancel RUN ... [KEY=VALUE ...]

Ends runs after asking, and waits for their ends: jobs by scancel, also those
that wait; runs on this machine by SIGTERM to their `launch`. RUN is NAME/ID, an
ID, a NAME (its newest run), a run directory, or a job; an array's number means
all of its members.

  yes=true             do not ask
  runs_dir=DIR         where the runs are (runs)

  launch cancel train
  launch cancel 12 13 yes=true
"""
WIDTH = 106
HELP = {
    "run": RUN,
    "plan": PLAN,
    "topo": TOPO,
    "doctor": DOCTOR,
    "tune": TUNE,
    "status": STATUS,
    "logs": LOGS,
    "cancel": CANCEL,
}


def print_help(verb: str) -> int:
    """Print the help of a verb, and return exit code 0."""
    print_text(HELP[verb])
    return 0


def print_full_help() -> int:
    """Print the help of all verbs, keys, groups and flags; return exit code 0."""
    sources = find_readable()
    lines = [FULL, "groups (choose with GROUP=OPTION; ./conf is searched first)"]
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
    """Return the usual sources, the shipped ones alone where ./conf cannot be read: help is always there."""
    try:
        return find_sources(None, None, None)
    except UsageError:
        return Sources((find_shipped(),))


def list_flags() -> list[str]:
    """Return a line for each flag."""
    actions = make_parser()._actions
    return [f"  {', '.join(action.option_strings):<25}  {action.help}" for action in actions]
