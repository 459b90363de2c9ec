/* arena.c - peers' arenas mapped here, and which of ours the peers were given. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "hr/memory.h"
#include "providers/shm/shm.h"

#ifndef MADV_POPULATE_READ
#    define MADV_POPULATE_READ 22
#endif
#ifndef F_SEAL_FUTURE_WRITE
#    define F_SEAL_FUTURE_WRITE 0x0010
#endif
#define PIECE ((size_t)2 << 20) /* a huge page: alignment of mappings, and the unit of warming */
enum { MAX_ARENAS = 1 << 16 };

hr_status hr_shm_arena_give(struct shm_ep *e, const void *addr, size_t len, uint64_t *id_p) {
    struct hr_arena_info info;
    struct shm_frame frame = {.kind = SHM_ARENA};
    hr_status status;

    if (!hr_arena_find(addr, len, &info)) return HR_ERR_UNSUPPORTED;
    *id_p = info.id;
    for (uint32_t i = 0; i < e->nsent; i++) {
        if (e->sent[i] != info.id) continue;
        e->sent[i] = e->sent[0]; /* found at once next time */
        e->sent[0] = info.id;
        return HR_OK;
    }
    if (e->nsent >= MAX_ARENAS || !hr_shm_grow(&e->sent, e->nsent, &e->sent_cap, sizeof *e->sent)) return HR_ERR_NOMEM;
    frame.id = info.id;
    frame.addr = (uintptr_t)info.base;
    frame.size = info.size;
    status = hr_shm_frame_send(e, &frame, &info.fd, 1);
    if (status == HR_OK) e->sent[e->nsent++] = info.id;
    return status;
}

void hr_shm_arenas_sweep(struct shm_domain *dom) {
    for (struct shm_ep *e = dom->eps; e; e = e->next) {
        for (uint32_t i = 0; e->state == SHM_UP && !e->lost && i < e->nsent;) {
            struct shm_frame frame = {.kind = SHM_GONE, .id = e->sent[i]};
            if (hr_arena_alive(e->sent[i]))
                i++;
            else if (hr_shm_frame_send(e, &frame, NULL, 0) == HR_OK)
                e->sent[i] = e->sent[--e->nsent];
            else
                break; /* its socket is full: next time */
        }
    }
}

static void map_free(struct shm_map *map) {
    munmap(map->base, map->size);
    free(map->warm);
    free(map);
}

static void map_remove(struct shm_ep *e, uint32_t i) {
    map_free(e->maps[i]);
    e->maps[i] = e->maps[--e->nmaps];
}

/* Aligned so that pages of 2 MiB can be mapped as such. */
static uint8_t *map_aligned(int fd, size_t size, int prot) {
    uint8_t *whole = mmap(NULL, size + PIECE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), *base;
    size_t before;
    if (whole == MAP_FAILED) return NULL;
    before = -(uintptr_t)whole & (PIECE - 1);
    base = whole + before;
    if (mmap(base, size, prot, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        munmap(whole, size + PIECE);
        return NULL;
    }
    if (before) munmap(whole, before);
    munmap(base + size, PIECE - before);
    return base;
}

/* Looked at here, not believed: a file that can shrink would make our loads fault. */
static const char *wrong_arena(const struct shm_frame *frame, int fd) {
    struct stat st;
    int seals;
    if (fd < 0) return "no descriptor";
    seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) return "a file that can shrink";
    if (fstat(fd, &st) < 0 || frame->size == 0 || (uint64_t)st.st_size != frame->size) return "a file of another size";
    if (frame->size % (size_t)4096 || frame->addr + frame->size < frame->addr) return "an impossible range";
    return NULL;
}

static void on_arena(struct shm_ep *e, const struct shm_frame *frame, int fd) {
    const char *wrong = wrong_arena(frame, fd);
    struct shm_map *map;
    if (wrong || hr_shm_map_find(e, frame->id) || e->nmaps >= MAX_ARENAS) {
        hr_shm_lose(e, HR_ERR_PROTOCOL, "process %d sent arena %llu with %s", (int)e->pid,
                    (unsigned long long)frame->id, wrong ? wrong : "a number it had used");
        return;
    }
    /* Without memory the arena stays unknown and imports from it fail. */
    if (!hr_shm_grow(&e->maps, e->nmaps, &e->maps_cap, sizeof *e->maps) || !(map = calloc(1, sizeof *map))) return;
    map->warm = calloc(1, frame->size / PIECE + 1);
    map->writable = !(fcntl(fd, F_GET_SEALS) & F_SEAL_FUTURE_WRITE);
    map->base = map->warm ? map_aligned(fd, frame->size, map->writable ? PROT_READ | PROT_WRITE : PROT_READ) : NULL;
    if (!map->base) {
        free(map->warm);
        free(map);
        return;
    }
    map->id = frame->id;
    map->peer_base = frame->addr;
    map->size = frame->size;
    e->maps[e->nmaps++] = map;
}

void hr_shm_on_arena_frame(struct shm_ep *e, const struct shm_frame *frame, int fd) {
    if (frame->kind == SHM_ARENA) {
        on_arena(e, frame, fd);
        return;
    }
    for (uint32_t i = 0; i < e->nmaps; i++) {
        if (e->maps[i]->id != frame->id) continue;
        e->maps[i]->gone = 1;
        if (!e->maps[i]->refs) map_remove(e, i);
        return;
    }
}

struct shm_map *hr_shm_map_find(struct shm_ep *e, uint64_t id) {
    for (uint32_t i = 0; i < e->nmaps; i++) {
        struct shm_map *map = e->maps[i];
        if (map->id != id || map->gone) continue;
        e->maps[i] = e->maps[0];
        e->maps[0] = map;
        return map;
    }
    return NULL;
}

void hr_shm_map_warm(struct shm_map *map, uint64_t offset, uint64_t len) {
    size_t end = (offset + len + PIECE - 1) / PIECE;
    for (size_t first = offset / PIECE; first < end; first++) {
        size_t last = first;
        while (last < end && !map->warm[last]) map->warm[last++] = 1;
        if (last == first) continue;
        size_t stop = last * PIECE < map->size ? last * PIECE : map->size;
        madvise(map->base + first * PIECE, stop - first * PIECE,
                MADV_POPULATE_READ); /* before Linux 5.14 they fault one by one */
        first = last;
    }
}

void hr_shm_map_put(struct shm_ep *e, struct shm_map *map) {
    if (--map->refs || !(map->gone || e->state == SHM_ABORTED)) return;
    for (uint32_t i = 0; i < e->nmaps; i++)
        if (e->maps[i] == map) {
            map_remove(e, i);
            return;
        }
}

void hr_shm_maps_drop(struct shm_ep *e, int all) {
    for (uint32_t i = 0; i < e->nmaps;)
        if (all || !e->maps[i]->refs)
            map_remove(e, i);
        else
            i++;
    if (!all) return;
    free(e->maps);
    e->maps = NULL;
    e->maps_cap = 0;
}
