/* slow_disk SOURCE MOUNTPOINT LATENCY_MS MIB_PER_S: a network disk to measure with, as a FUSE file system.
 *
 * It shows SOURCE, read-only, and answers every request after LATENCY_MS, many at the same time; all reads
 * together get MIB_PER_S. A new mount has nothing in the page cache. It prints a line once it is mounted, and
 * ends once it is unmounted. Needs root, and no libfuse: the protocol is that of linux/fuse.h.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define THREADS 64
#define SLOTS (1 << 20)
#define LARGEST (1 << 20)

static int device;
static double latency, bandwidth, busy_until;
static char *paths[SLOTS];
static uint64_t nodes[SLOTS], root_node;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

static void wait_until(double when) {
    double left = when - now();
    if (left > 0) {
        struct timespec pause = {(time_t)left, (long)((left - (time_t)left) * 1e9)};
        nanosleep(&pause, NULL);
    }
}

/* Nodes are inodes of the source, so that hard links and repeated lookups are the same file. */
static char **find_slot(uint64_t node) {
    uint64_t at = node * 0x9e3779b97f4a7c15ull >> 44;
    while (paths[at] && nodes[at] != node) at = (at + 1) % SLOTS;
    nodes[at] = node;
    return &paths[at];
}

static void keep_path(uint64_t node, const char *path) {
    pthread_mutex_lock(&lock);
    char **slot = find_slot(node);
    if (!*slot) *slot = strdup(path);
    pthread_mutex_unlock(&lock);
}

static const char *get_path(uint64_t node) {
    pthread_mutex_lock(&lock);
    const char *path = *find_slot(node == 1 ? root_node : node);
    pthread_mutex_unlock(&lock);
    return path ? path : "";
}

static void reply(uint64_t unique, int error, const void *data, size_t size) {
    char buffer[sizeof(struct fuse_out_header) + LARGEST];
    struct fuse_out_header header = {sizeof header + (error ? 0 : size), -error, unique};
    memcpy(buffer, &header, sizeof header);
    if (!error && size) memcpy(buffer + sizeof header, data, size);
    if (write(device, buffer, header.len) < 0) return; /* the request was given up */
}

static struct fuse_attr describe(const struct stat *file) {
    return (struct fuse_attr){.ino = file->st_ino, .size = file->st_size, .blocks = file->st_blocks,
                              .mtime = file->st_mtim.tv_sec, .mtimensec = file->st_mtim.tv_nsec,
                              .ctime = file->st_ctim.tv_sec, .ctimensec = file->st_ctim.tv_nsec,
                              .mode = file->st_mode, .nlink = file->st_nlink, .uid = file->st_uid,
                              .gid = file->st_gid, .blksize = 4096};
}

static void look_up(struct fuse_in_header *in, const char *name) {
    char path[4096];
    struct stat file;
    snprintf(path, sizeof path, "%s/%s", get_path(in->nodeid), name);
    struct fuse_entry_out out = {.entry_valid = 600, .attr_valid = 600};
    if (!lstat(path, &file)) {
        keep_path(file.st_ino, path);
        out.nodeid = file.st_ino;
        out.attr = describe(&file);
    } else if (errno != ENOENT) {
        reply(in->unique, errno, NULL, 0);
        return;
    } /* node 0: the kernel remembers that there is no such name */
    reply(in->unique, 0, &out, sizeof out);
}

static void list_folder(struct fuse_in_header *in, struct fuse_read_in *read) {
    char buffer[65536];
    size_t used = 0;
    uint64_t number = 0;
    DIR *folder = opendir(get_path(in->nodeid));
    if (!folder) {
        reply(in->unique, errno, NULL, 0);
        return;
    }
    for (struct dirent *entry; (entry = readdir(folder));) {
        size_t length = strlen(entry->d_name);
        if (number++ < read->offset) continue;
        struct fuse_dirent out = {entry->d_ino, number, length, entry->d_type};
        size_t size = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + length);
        if (used + size > read->size || used + size > sizeof buffer) break;
        memset(buffer + used, 0, size);
        memcpy(buffer + used, &out, FUSE_NAME_OFFSET);
        memcpy(buffer + used + FUSE_NAME_OFFSET, entry->d_name, length);
        used += size;
    }
    closedir(folder);
    reply(in->unique, 0, buffer, used);
}

static void read_file(struct fuse_in_header *in, struct fuse_read_in *read) {
    char *buffer = malloc(LARGEST);
    ssize_t got = pread((int)read->fh, buffer, read->size < LARGEST ? read->size : LARGEST, read->offset);
    if (got > 0) {
        pthread_mutex_lock(&lock);
        double begin = now();
        busy_until = (busy_until > begin ? busy_until : begin) + got / bandwidth;
        double when = busy_until;
        pthread_mutex_unlock(&lock);
        wait_until(when);
    }
    reply(in->unique, got < 0 ? errno : 0, buffer, got < 0 ? 0 : got);
    free(buffer);
}

static void answer(struct fuse_in_header *in, void *argument) {
    struct stat file;
    char target[4096];
    if (in->opcode == FUSE_FORGET || in->opcode == FUSE_BATCH_FORGET || in->opcode == FUSE_INTERRUPT) return;
    /* For an ioctl, network file systems ask nobody. */
    if (in->opcode != FUSE_INIT && in->opcode != FUSE_RELEASE && in->opcode != FUSE_RELEASEDIR &&
        in->opcode != FUSE_IOCTL)
        wait_until(now() + latency);
    switch (in->opcode) {
    case FUSE_INIT: {
        struct fuse_init_in *asked = argument;
        struct fuse_init_out out = {.major = 7, .minor = 31, .max_readahead = 128 << 10, .max_write = 1 << 20,
                                    .max_background = THREADS, .congestion_threshold = THREADS,
                                    .max_pages = 256, .time_gran = 1};
        out.flags = asked->flags & (FUSE_ASYNC_READ | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES);
        reply(in->unique, 0, &out, sizeof out);
        return;
    }
    case FUSE_LOOKUP:
        look_up(in, argument);
        return;
    case FUSE_GETATTR: {
        struct fuse_attr_out out = {.attr_valid = 600};
        int error = lstat(get_path(in->nodeid), &file) ? errno : 0;
        if (!error) out.attr = describe(&file);
        reply(in->unique, error, &out, sizeof out);
        return;
    }
    case FUSE_READLINK: {
        ssize_t size = readlink(get_path(in->nodeid), target, sizeof target);
        reply(in->unique, size < 0 ? errno : 0, target, size < 0 ? 0 : size);
        return;
    }
    case FUSE_OPEN: {
        int descriptor = open(get_path(in->nodeid), O_RDONLY | O_CLOEXEC);
        struct fuse_open_out out = {.fh = descriptor, .open_flags = FOPEN_KEEP_CACHE};
        reply(in->unique, descriptor < 0 ? errno : 0, &out, sizeof out);
        return;
    }
    case FUSE_OPENDIR: {
        struct fuse_open_out out = {.open_flags = FOPEN_KEEP_CACHE | FOPEN_CACHE_DIR};
        reply(in->unique, 0, &out, sizeof out);
        return;
    }
    case FUSE_READ:
        read_file(in, argument);
        return;
    case FUSE_READDIR:
        list_folder(in, argument);
        return;
    case FUSE_RELEASE:
        close((int)((struct fuse_release_in *)argument)->fh);
        reply(in->unique, 0, NULL, 0);
        return;
    case FUSE_RELEASEDIR:
        reply(in->unique, 0, NULL, 0);
        return;
    case FUSE_STATFS: {
        struct fuse_statfs_out out = {.st = {.bsize = 4096, .namelen = 255, .frsize = 4096}};
        reply(in->unique, 0, &out, sizeof out);
        return;
    }
    default:
        reply(in->unique, ENOSYS, NULL, 0);
    }
}

static void *serve(void *unused) {
    char *buffer = malloc(LARGEST + 65536);
    for (;;) {
        ssize_t size = read(device, buffer, LARGEST + 65536);
        if (size < 0 && errno == ENODEV) exit(0);
        if (size >= (ssize_t)sizeof(struct fuse_in_header))
            answer((struct fuse_in_header *)buffer, buffer + sizeof(struct fuse_in_header));
    }
    return unused;
}

int main(int count, char **words) {
    char options[128];
    struct stat root;
    pthread_t thread;
    if (count != 5) return 2;
    latency = atof(words[3]) * 1e-3;
    bandwidth = atof(words[4]) * (1 << 20);
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (device < 0 || stat(words[1], &root)) return 1;
    root_node = root.st_ino;
    keep_path(root_node, words[1]);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,max_read=1048576",
             device);
    if (mount("slow_disk", words[2], "fuse", MS_RDONLY | MS_NOSUID | MS_NODEV, options)) return 1;
    for (int number = 1; number < THREADS; number++) pthread_create(&thread, NULL, serve, NULL);
    printf("mounted\n");
    fflush(stdout);
    serve(NULL);
}
