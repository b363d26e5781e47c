/* A libnvidia-ml.so.1 whose GPUs are lines of the file that NVML_STUB names:
 *
 *   init CODE                                    what nvmlInit and nvmlDeviceGetCount return
 *   gpu OPEN MIG_RESULT MIG_MODE BUS_ID UUID MIG,MIG,... NAME
 *
 * OPEN is what opening the GPU returns, MIG_RESULT what asking for its MIG mode returns; "-" is an empty
 * MIG slot. A GPU has memory where its name has 80GB, and persistence mode is off for an A100, on for an
 * H100. Built for the tests of the probe, with the functions that it calls.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPUS = 16, SLOTS = 7 };

struct gpu {
    int open, mig_result, mig_mode, slots;
    char bus_id[32], uuid[96], name[96], mig[SLOTS][96];
};

struct pci_info { /* nvmlPciInfo_t */
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

static struct gpu gpus[GPUS];
static unsigned count;
static int init_result, ready;

static void read_gpu(const char *line)
{
    struct gpu *gpu = &gpus[count];
    char slots[512];
    if (sscanf(line, "gpu %d %d %d %31s %95s %511s %95[^\n]", &gpu->open, &gpu->mig_result, &gpu->mig_mode,
               gpu->bus_id, gpu->uuid, slots, gpu->name) != 7)
        return;
    for (char *slot = strtok(slots, ","); slot && gpu->slots < SLOTS; slot = strtok(NULL, ","))
        strncpy(gpu->mig[gpu->slots++], slot, 95);
    count++;
}

int nvmlInitWithFlags(unsigned flags)
{
    char line[1024];
    FILE *file = fopen(getenv("NVML_STUB"), "r");
    (void)flags;
    count = 0;
    if (!file)
        return UNINITIALIZED;
    while (count < GPUS && fgets(line, sizeof line, file))
        if (sscanf(line, "init %d", &init_result) != 1)
            read_gpu(line);
    fclose(file);
    ready = init_result == SUCCESS;
    return init_result;
}

int nvmlShutdown(void)
{
    int was_ready = ready;
    ready = 0;
    return was_ready ? SUCCESS : UNINITIALIZED;
}

const char *nvmlErrorString(int code)
{
    static char text[32];
    snprintf(text, sizeof text, "stub error %d", code);
    return text;
}

int nvmlDeviceGetCount_v2(unsigned *out)
{
    *out = count;
    return ready ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    *handle = &gpus[index];
    return ready ? gpus[index].open : UNINITIALIZED;
}

int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci_info *out)
{
    memset(out, 0, sizeof *out);
    strcpy(out->bus_id, gpu->bus_id);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *out, unsigned size)
{
    struct gpu *gpu = handle;
    /* A MIG instance's handle is its UUID's place in gpus; a GPU's is its element. */
    size_t at = (size_t)((char *)handle - (char *)gpus) % sizeof(struct gpu);
    snprintf(out, size, "%s", at ? (char *)handle : gpu->uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(struct gpu *gpu, char *out, unsigned size)
{
    snprintf(out, size, "%s", gpu->name);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *current, unsigned *pending)
{
    *current = *pending = (unsigned)gpu->mig_mode;
    return gpu->mig_result;
}

int nvmlDeviceGetMaxMigDeviceCount(struct gpu *gpu, unsigned *out)
{
    (void)gpu;
    *out = SLOTS;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *gpu, unsigned slot, void **handle)
{
    *handle = gpu->mig[slot];
    return (int)slot < gpu->slots && strcmp(gpu->mig[slot], "-") ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo(struct gpu *gpu, unsigned long long *out)
{
    out[0] = 85520809984; /* total, free, used: nvmlMemory_t */
    out[1] = out[2] = 0;
    return strstr(gpu->name, "80GB") ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetPersistenceMode(struct gpu *gpu, unsigned *out)
{
    *out = strstr(gpu->name, "H100") != NULL;
    return strstr(gpu->name, "A100") || *out ? SUCCESS : NOT_SUPPORTED;
}
