/* arena.c - arenas: where blocks are cut, which empty arenas are kept, and what becomes of them in a forked child. */

/*
 * Small blocks share arenas: the first has 4 MiB, each further one as much as all before it up to 64 MiB, so that a
 * hundred thousand small arrays cost hundreds of descriptors and imports, not a hundred thousand. Where pages are small
 * an arena costs by its size, and has what is asked for, in steps of 2 MiB. A big block (32 MiB
 * and more) has an arena of its own, so that freeing it gives the memory back whatever else was allocated meanwhile.
 *
 * An arena that became empty stays until the empty ones together pass a bound; the one that has been empty longest goes
 * first. A big block takes an empty big arena that is at most a quarter larger than it needs.
 *
 * The lock is not held while memory is mapped, filled or unmapped (milliseconds): two threads may so make an arena each
 * where one would have done.
 *
 * A forked child begins anew. It shares the pages of its parent's arenas, and may read and write blocks that it was
 * left, but they are not its arenas: it frees none, peers of its own get them as any other memory, and what it
 * allocates is its own. The lock and the index may be in any state there, so they are made anew, by pthread_atfork's
 * handler.
 */

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/arena_extents.h"
#include "core/arena_index.h"
#include "core/arena_pages.h"
#include "hr/memory.h"

#define MIB ((size_t)1 << 20)
#define ALIGNMENT ((size_t)64)
#define FIRST_SHARED (4 * MIB)
#define LARGEST_SHARED (64 * MIB)
#define BIG_BLOCK (32 * MIB)
#define KEPT_EMPTY (512 * MIB) /* or a sixteenth of the host's memory, if that is less */

struct hr_arena {
    struct hr_arena *next, *prev;
    struct hr_pages pages;
    struct hr_extents extents;
    uint64_t id;
    uint64_t emptied; /* tick when its last block went */
    uint32_t flags;
    uint32_t big; /* made for one block */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hr_arena *arenas; /* oldest first */
static uint64_t last_id, tick;
static size_t shared_bytes, empty_bytes;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int inherited; /* there are blocks of a parent's */
static size_t empty_bound;
static _Atomic uint64_t forgotten;

static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
    arenas = NULL;
    shared_bytes = empty_bytes = 0;
    inherited = 1;
    hr_arena_index_restart();
}

static void prepare(void) {
    size_t host = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    empty_bound = host / 16 < KEPT_EMPTY ? host / 16 : KEPT_EMPTY;
    pthread_atfork(NULL, NULL, in_child);
}

static size_t round_up(size_t len, size_t to) { return (len + to - 1) / to * to; }

static int is_empty(const struct hr_arena *a) { return a->extents.blocks == 0; }

#define SPENT                                                                                              \
    0x80000000u /* peers have some of its pages for good: no peer is shown it, and no block is cut from it \
                 */

/* What it has of the arenas from whose sizes the next one's follows. */
static size_t counted(const struct hr_arena *a) {
    return a->big || a->flags & HR_ARENA_SMALL_PAGES ? 0 : a->pages.size;
}

static void arena_discard(struct hr_arena *a) {
    hr_extents_free(&a->extents);
    hr_pages_unmap(&a->pages);
    free(a);
}

/* Without the lock. NULL with errno. */
static struct hr_arena *arena_new(size_t size, uint32_t flags, int big) {
    struct hr_arena *a = calloc(1, sizeof *a);
    if (!a) return NULL;
    int rc = hr_extents_init(&a->extents, size) ? ENOMEM : 0;
    if (!rc) rc = hr_pages_map(size, flags, &a->pages);
    if (rc) {
        hr_extents_free(&a->extents);
        free(a);
        errno = rc;
        return NULL;
    }
    a->flags = flags;
    a->big = (uint32_t)big;
    return a;
}

/* With the lock: from here on it can be found. */
static int arena_link(struct hr_arena *a) {
    if (hr_arena_index_reserve()) return ENOMEM;
    struct hr_arena **tail = &arenas;
    while (*tail) {
        a->prev = *tail;
        tail = &(*tail)->next;
    }
    *tail = a;
    a->id = ++last_id;
    struct hr_arena_info info = {a->id, a->pages.fd, a->pages.base, a->pages.size, a->flags};
    hr_arena_index_add(&info, a);
    empty_bytes += a->pages.size;
    shared_bytes += counted(a);
    return 0;
}

static void arena_unlink(struct hr_arena *a) {
    hr_arena_index_remove(a->id);
    if (a->next) a->next->prev = a->prev;
    if (a->prev)
        a->prev->next = a->next;
    else
        arenas = a->next;
    empty_bytes -= a->pages.size;
    shared_bytes -= counted(a);
}

/* Unlinks empty arenas, longest empty first, until those left are within bound. The list is the caller's to discard. */
static struct hr_arena *trim(size_t bound) {
    struct hr_arena *gone = NULL;
    while (empty_bytes > bound) {
        struct hr_arena *oldest = NULL;
        for (struct hr_arena *a = arenas; a; a = a->next) {
            if (is_empty(a) && (!oldest || a->emptied < oldest->emptied)) oldest = a;
        }
        arena_unlink(oldest);
        oldest->next = gone;
        gone = oldest;
    }
    return gone;
}

static int discard_all(struct hr_arena *a) {
    int any = a != NULL;
    while (a) {
        struct hr_arena *next = a->next;
        arena_discard(a);
        a = next;
    }
    return any;
}

size_t hr_page(void) {
    static _Atomic size_t known;
    size_t page = atomic_load_explicit(&known, memory_order_relaxed);
    if (!page) atomic_store_explicit(&known, page = (size_t)sysconf(_SC_PAGESIZE), memory_order_relaxed);
    return page;
}

/* What peers may write to has pages of its own. */
static size_t granule(uint32_t flags) { return flags & HR_ARENA_WRITABLE_BY_PEERS ? hr_page() : ALIGNMENT; }

static void *cut(struct hr_arena *a, size_t len) {
    int was_empty = is_empty(a);
    size_t offset = hr_extents_take(&a->extents, round_up(len, granule(a->flags)), len);
    if (offset == SIZE_MAX) return NULL;
    if (was_empty) empty_bytes -= a->pages.size;
    return (uint8_t *)a->pages.base + offset;
}

/* A block from the arenas there are. */
static void *cut_shared(size_t len, uint32_t flags) {
    for (struct hr_arena *a = arenas; a; a = a->next) {
        void *block = NULL;
        if (!a->big && a->flags == flags && hr_extents_longest(&a->extents) >= len) block = cut(a, len);
        if (block) return block;
    }
    return NULL;
}

static void *cut_big(size_t len, uint32_t flags) {
    struct hr_arena *best = NULL;
    for (struct hr_arena *a = arenas; a; a = a->next) {
        size_t size = a->pages.size;
        if (!a->big || !is_empty(a) || a->flags != flags || size < len || size - len > len / 4) continue;
        if (!best || size < best->pages.size) best = a;
    }
    return best ? cut(best, len) : NULL;
}

static size_t shared_size(size_t len, uint32_t flags) {
    if (flags & HR_ARENA_SMALL_PAGES) return round_up(len, HR_HUGE_PAGE);
    size_t size = shared_bytes < FIRST_SHARED ? FIRST_SHARED : shared_bytes;
    if (size > LARGEST_SHARED) size = LARGEST_SHARED;
    return round_up(size > len ? size : len, HR_HUGE_PAGE);
}

void *hr_arena_alloc(size_t len, uint32_t flags) {
    if (len > SIZE_MAX / 4) { /* so that no sum below wraps */
        errno = ENOMEM;
        return NULL;
    }
    pthread_once(&once, prepare);
    if (!len) len = 1;
    size_t asked = len;
    len = round_up(len, granule(flags));
    int big = len >= BIG_BLOCK;

    pthread_mutex_lock(&lock);
    void *block = big ? cut_big(asked, flags) : cut_shared(asked, flags);
    size_t size = big ? round_up(len, HR_HUGE_PAGE) : shared_size(len, flags);
    pthread_mutex_unlock(&lock);
    if (block) return block;

    struct hr_arena *a = arena_new(size, flags, big);
    if (!a) { /* what is kept for later is wanted now, its descriptors too; and a smaller arena may do */
        int rc = errno;
        pthread_mutex_lock(&lock);
        struct hr_arena *gone = trim(0);
        pthread_mutex_unlock(&lock);
        size_t least = round_up(len, HR_HUGE_PAGE);
        int again = discard_all(gone) || least < size;
        errno = rc;
        if (again) a = arena_new(least, flags, big);
    }
    if (!a) return NULL;

    pthread_mutex_lock(&lock);
    int rc = arena_link(a);
    if (!rc && !(block = cut(a, asked))) { /* no memory to note the block: the arena stays, empty */
        a->emptied = ++tick;
        rc = ENOMEM;
    }
    int linked = a->id != 0;
    pthread_mutex_unlock(&lock);
    if (!linked) arena_discard(a);
    if (rc) errno = rc;
    return block;
}

void hr_arena_free(void *block) {
    if (!block) return;
    pthread_mutex_lock(&lock);
    struct hr_arena *a = hr_arena_index_owner(block), *gone = NULL;
    if (!a && inherited) {
        pthread_mutex_unlock(&lock);
        return;
    }
    if (!a || !hr_extents_give(&a->extents, (size_t)((uint8_t *)block - (uint8_t *)a->pages.base))) {
        pthread_mutex_unlock(&lock);
        fprintf(stderr, "hr_arena_free: %p is not a block, or was freed before\n", block);
        abort(); /* as free() does: what follows would corrupt somebody's array */
    }
    if (is_empty(a)) {
        a->emptied = ++tick;
        empty_bytes += a->pages.size;
        if (a->flags & SPENT) {
            arena_unlink(a);
            a->next = NULL;
            gone = a;
        } else {
            gone = trim(empty_bound);
        }
    }
    pthread_mutex_unlock(&lock);
    discard_all(gone);
}

int hr_memory_find(const void *addr, size_t len, struct hr_arena_info *info_p) {
    uintptr_t begin = (uintptr_t)addr;
    struct hr_arena_info info;
    if (begin + len < begin || !hr_arena_index_find(begin, begin + len, &info) || info.flags & SPENT) return 0;
    *info_p = info;
    return 1;
}

int hr_arena_ends(const void *end) {
    pthread_mutex_lock(&lock);
    const uint8_t *last = (const uint8_t *)end - 1;
    struct hr_arena *a = hr_arena_index_owner(last);
    int ends = a && hr_extents_ends(&a->extents, (size_t)(last + 1 - (uint8_t *)a->pages.base));
    pthread_mutex_unlock(&lock);
    return ends;
}

int hr_arena_find(const void *addr, size_t len, struct hr_arena_info *info_p) {
    struct hr_arena_info info;
    if (!hr_memory_find(addr, len, &info) || info.flags & HR_MEMORY_KEPT) return 0;
    *info_p = info;
    return 1;
}

/* The address of the new pages is the old one: no pointer to them changes. What the arena was known by is gone. */
void hr_arena_abandon(void *addr, size_t len) {
    uintptr_t begin = hr_page_down((uintptr_t)addr), end = hr_page_up((uintptr_t)addr + len);
    pthread_mutex_lock(&lock);
    struct hr_arena *a = hr_arena_index_owner(addr);
    if (a && !(a->flags & SPENT)) {
        hr_arena_index_remove(a->id); /* which leaves room for one */
        a->id = ++last_id;
        a->flags |= SPENT;
        struct hr_arena_info info = {a->id, a->pages.fd, a->pages.base, a->pages.size, a->flags};
        hr_arena_index_add(&info, a);
        atomic_fetch_add_explicit(&forgotten, 1, memory_order_release);
    }
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (a && mmap((void *)begin, end - begin, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) {
        perror("hr_arena_abandon: memory that a stopped process may change could not be replaced (vm.max_map_count?)");
        abort();
    }
    pthread_mutex_unlock(&lock);
}

/* ---- kept memory: known to the index alone ---- */

static void drop(uint64_t id) {
    hr_arena_index_remove(id);
    atomic_fetch_add_explicit(&forgotten, 1, memory_order_release);
}

/* Whoever owned it has not said that it went: there is other memory now. */
static void drop_overlapped(uintptr_t base, size_t size) {
    uint64_t id;
    while ((id = hr_arena_index_kept(base, base + size))) drop(id);
}

uint64_t hr_memory_keep(void *base, size_t size) {
    struct hr_arena_info info = {.fd = -1, .base = base, .size = size, .flags = HR_MEMORY_KEPT};
    pthread_once(&once, prepare);
    pthread_mutex_lock(&lock);
    drop_overlapped((uintptr_t)base, size);
    if (!hr_arena_index_owner(base) && hr_arena_index_reserve() == 0) {
        info.id = ++last_id;
        hr_arena_index_add(&info, NULL);
    }
    pthread_mutex_unlock(&lock);
    return info.id;
}

/* A forked child knows none of its parent's. */
void hr_memory_forget(uint64_t id) {
    pthread_mutex_lock(&lock);
    if (hr_arena_index_alive(id)) drop(id);
    pthread_mutex_unlock(&lock);
}

uint64_t hr_memory_forgotten(void) { return atomic_load_explicit(&forgotten, memory_order_acquire); }

int hr_arena_alive(uint64_t id) { return hr_arena_index_alive(id); }

void hr_arena_stats(struct hr_arena_stats *stats_p) {
    struct hr_arena_stats stats = {0};
    pthread_mutex_lock(&lock);
    for (struct hr_arena *a = arenas; a; a = a->next) {
        stats.arenas++;
        stats.bytes_mapped += a->pages.size;
        stats.bytes_used += a->extents.used;
        stats.bytes_huge += a->pages.huge;
        stats.blocks += a->extents.blocks;
    }
    pthread_mutex_unlock(&lock);
    *stats_p = stats;
}
