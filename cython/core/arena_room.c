/* arena_room.c - what the host and the control groups have left. */

/*
 * Shared memory that is not there is not refused: the kernel overcommits, and kills a process when a page cannot be
 * had. So a request is held against what is left before it is tried. That is a check of good sense, not a reservation:
 * others may take the memory meanwhile.
 *
 * What a group keeps for files counts as free, as in MemAvailable: the kernel drops it when it needs room. Shared
 * memory is accounted with the files and is not dropped.
 */

#include "core/arena_room.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Control groups, version 2 and 1. */
struct layout {
    const char *membership; /* line of /proc/self/cgroup */
    const char *folder;
    const char *limit, *usage;
    const char *file, *shmem; /* lines of memory.stat */
};
static const struct layout layouts[] = {
    {"0::%511[^\n]", "", "memory.max", "memory.current", "file %llu", "shmem %llu"},
    {"%*d:memory:%511[^\n]", "/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache %llu",
     "total_shmem %llu"},
};

/* The number in the first line of this form. */
static size_t read_number(const char *folder, const char *name, const char *form, size_t otherwise) {
    char path[1024], line[512];
    unsigned long long value;
    size_t found = otherwise;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return otherwise;
    FILE *f = fopen(path, "re");
    if (!f) return otherwise;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, form, &value) != 1) continue;
        found = (size_t)value;
        break;
    }
    fclose(f);
    return found;
}

static size_t left_in(const struct layout *layout, const char *folder) {
    size_t limit = read_number(folder, layout->limit, "%llu", SIZE_MAX);
    if (limit == SIZE_MAX) return SIZE_MAX; /* not a group, or "max" */
    size_t usage = read_number(folder, layout->usage, "%llu", 0);
    size_t file = read_number(folder, "memory.stat", layout->file, 0);
    size_t shmem = read_number(folder, "memory.stat", layout->shmem, 0);
    size_t kept = usage + shmem > file ? usage + shmem - file : 0;
    return kept < limit ? limit - kept : 0;
}

/* The least of our group and those above it. In a container the path may be the host's: then only the top exists. */
static size_t groups_left(const struct layout *layout, const char *proc, const char *cgroup) {
    char path[1024], line[600], group[512] = "";
    size_t least = SIZE_MAX;
    if (snprintf(path, sizeof path, "%s/self/cgroup", proc) >= (int)sizeof path) return SIZE_MAX;
    FILE *f = fopen(path, "re");
    if (!f) return SIZE_MAX;
    int member = 0;
    while (!member && fgets(line, sizeof line, f)) member = sscanf(line, layout->membership, group) == 1;
    fclose(f);
    if (!member) return SIZE_MAX;
    for (char *end = group + strlen(group);; *end = 0) {
        int fits = snprintf(path, sizeof path, "%s%s%s", cgroup, layout->folder, group) < (int)sizeof path;
        size_t left = fits ? left_in(layout, path) : SIZE_MAX;
        if (left < least) least = left;
        if (end == group) return least;
        do end--;
        while (end > group && *end != '/');
    }
}

size_t hr_arena_room_under(const char *proc, const char *cgroup) {
    size_t kib = read_number(proc, "meminfo", "MemAvailable: %llu", SIZE_MAX);
    size_t least = kib == SIZE_MAX ? SIZE_MAX : (kib + read_number(proc, "meminfo", "SwapFree: %llu", 0)) * 1024;
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        size_t left = groups_left(&layouts[i], proc, cgroup);
        if (left < least) least = left;
    }
    return least;
}

size_t hr_arena_room(void) { return hr_arena_room_under("/proc", "/sys/fs/cgroup"); }
