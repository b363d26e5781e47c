#!/bin/sh
# Stands for srun, squeue, sinfo, sacct, scontrol, scancel and sbatch, by the name that it is called by: answers from
# the files in ../facts, and writes what it is asked into ../calls.
name=${0##*/} folder=${0%/*}/..
facts=$folder/facts

# Print the next line of a file of answers, the last one again and again; a line "! TEXT" is an error.
answer() {
    asked=0 at=0 found=
    [ -e "$facts/$1.asked" ] && read -r asked <"$facts/$1.asked"
    echo $((asked + 1)) >"$facts/$1.asked"
    while IFS= read -r line; do
        found=$line
        [ "$at" -ge "$asked" ] && break
        at=$((at + 1))
    done <"$facts/$1"
    case $found in
    "! "*)
        echo "$name: error: ${found#! }" >&2
        exit 1
        ;;
    ?*) echo "$found" ;;
    esac
}

# Wait for a line on stdin: an order of the first node's.
await_order() {
    while read -r order; do
        [ "$order" = "$1" ] && return
    done
}

echo "$name $*" >>"$folder/calls"
case "$name $*" in
srun*launcher.slurm.task*)
    answer starts
    . "$facts/step.sh"
    ;;
srun*launcher.preflight*) . "$facts/preflight" ;;
srun*slurm.lost_nodes*)
    echo .
    . "$facts/guards"
    ;;
"squeue "*--Format=*) answer job ;;
squeue*) answer excluded ;;
sinfo*StateLong*) sed 's/$/|127.0.0.1|1|/' "$facts/states" ;;
sinfo*) cat "$facts/partition" ;;
"scontrol requeue"* | "scontrol update"*) # a requeue ends the batch step, and this is not to die of it
    kill -TERM $$
    [ "$1" = update ] || answer requeue
    ;;
"scontrol show topology"*) . "$facts/topology" ;;
"scontrol show config"*) echo "KillWait = 30" ;;
sacct*) answer accounting ;;
sbatch*) echo "Submitted batch job 7" ;;
esac
