#!/bin/bash
# The mechanics of the wrapper scripts known as numa-set.sh: nvidia-smi, sysfs, numactl.
bus=$(nvidia-smi --query-gpu=pci.bus_id -i "$LOCAL_RANK" --format=csv,noheader)
bus=${bus,,}
node=$(cat "$SYSFS/bus/pci/devices/${bus:4}/numa_node")
exec numactl --cpunodebind="$node" --membind="$node" "$@"
