/* Answers as `nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader` does, NVIDIA_SMI_MS later. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(void) {
    const char *ms = getenv("NVIDIA_SMI_MS");
    usleep(1000 * (ms ? atoi(ms) : 0));
    return puts("00000000:07:00.0") < 0;
}
