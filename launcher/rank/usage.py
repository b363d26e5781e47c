"""What `launch-rank --help` prints."""

HELP = """\
usage: launch-rank [--] program [argument ...]

Binds this rank to the CPUs and memory next to its GPU, then execs the program. Put it before the program
in an existing job, in place of numa-set.sh or numactl:

    torchrun --nproc-per-node=8 --no-python -- launch-rank train.py
    srun --ntasks-per-node=8 --gpus-per-node=8 --cpu-bind=none launch-rank python train.py
    mpirun --bind-to none -np 8 launch-rank python train.py
    accelerate launch --multi_gpu --num_processes=8 --no_python launch-rank python train.py
    deepspeed --num_gpus=8 --no_python --no_local_rank launch-rank python -u train.py

The local rank comes from LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID, PALS_LOCAL_RANKID or
SLURM_LOCALID, whichever is first. Each rank plans the whole node and takes its part. Ranks that srun,
mpirun or torchrun has bound one by one are placed again, on the CPUs of all of them together; if these
are not known, a rank keeps its CPUs, with memory and threads to match, and says so (--cpu-bind=none and
--bind-to none avoid that). Nothing goes beyond what the job may use.

Under srun, if nothing has set RANK, the program finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
GROUP_RANK, MASTER_ADDR (the step's first node) and MASTER_PORT as torchrun sets them.

One line on stderr says what the kernel has made of it. Whatever fails is a warning, and the program runs
all the same. An argument `{num_workers}` becomes the rank's number of DataLoader workers, and `{run_dir}`
what LAUNCH_RUN_DIR says; also after `OPTION=`, and before `/PATH`. `{{run_dir}}` is `{run_dir}` itself.
A program `train.py` is run by this Python, as torchrun runs it.

Variables that are read:

    LAUNCH_BINDING=POLICY  exclusive (default): whole cores next to the GPU for each rank alone; numa,
                           socket, l3: all of the GPU's NUMA node, socket or cache; none: no binding
    LAUNCH_PLAN=FILE       a plan from `launch plan format=json`; without it the node is planned here
    LAUNCH_STRICT=1        end with status 3 if the placement cannot be applied
    LAUNCH_QUIET=1         no line, and no advice about the plan
    LAUNCH_NUM_WORKERS=N   DataLoader workers for each rank, which the plan then leaves cores for
    LAUNCH_GC=default      leave garbage collection to Python; else all ranks collect at the same steps, as
                           synchronized,warmup=30,every=50 says (also: disabled,every=N; frozen,warmup=N)
    LAUNCH_AGENT=srun      srun's tasks are the ranks, whatever RANK a job script has set: the program finds
                           all variables of torchrun's; MASTER_ADDR and MASTER_PORT are the script's to set
    LAUNCH_RUN_DIR=DIR     what `{run_dir}` in arguments stands for; `launch` sets it
    OMP_NUM_THREADS, LAUNCH_NIC, NCCL_IB_HCA, CUDA_VISIBLE_DEVICES and the like are kept if set

Variables that the program finds, if you have not set them yourself: OMP_NUM_THREADS (the rank's cores
less its workers) and those of other libraries' threads, LAUNCH_NUM_WORKERS, LAUNCH_GC, and with GPUs
CUDA_DEVICE_ORDER=PCI_BUS_ID, PYTORCH_CUDA_ALLOC_CONF, and LAUNCH_NIC, the network card next to the GPU.
LAUNCH_RANK_PLAN is the rank's part of the plan as JSON, and tells a launch-rank inside the rank what the user
has not set. PYTHONPATH begins with a folder of launch's, whose sitecustomize takes it out again, starts
what LAUNCH_GC asks for, and then runs your own sitecustomize.

The program may open as many files as the hard limit (ulimit -Hn) allows.

Exit codes: the program's own; 127 if there is no such program, 126 if it cannot be run.
"""
