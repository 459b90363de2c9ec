/* arena_index.c - sorted tables of arenas, read under a sequence lock. */

/*
 * Every large transfer asks where its memory lies; arenas come and go a few times in a job. So readers write nothing
 * (a reader-writer lock would have all threads write one line): they search, then look whether the sequence
 * number moved meanwhile, and search again if so. It is odd while a change is made.
 *
 * A change stores every field with release order and readers load it with acquire order: whoever saw a new value sees
 * the odd number too. (Fences would be cheaper on some machines, and the thread sanitizer does not know them.)
 *
 * A table that became too small is kept, as a reader may still be in it; each is twice as large as the one before, so
 * that all of them together are smaller than the one in use.
 */

#include "core/arena_index.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define FIRST_CAPACITY 64
#define TRIES_BEFORE_YIELD 100 /* the writer may have lost its processor in mid-change */

struct entry {
    _Atomic uintptr_t base, end;
    _Atomic uint64_t id;
    _Atomic uint64_t fd_flags;
    struct hr_arena *arena; /* under the lock only */
};

struct table {
    struct table *smaller;
    size_t capacity;
    _Atomic uint64_t *ids;  /* ascending */
    struct entry entries[]; /* by base */
};

static _Atomic uint64_t sequence;
static struct table *_Atomic current;
static _Atomic size_t count;

#define GET(field) atomic_load_explicit(&(field), memory_order_acquire)
#define SET(field, value) atomic_store_explicit(&(field), (value), memory_order_release)

static uint64_t begin_read(void) {
    uint64_t seq;
    for (int tries = 0; (seq = GET(sequence)) & 1; tries++) {
        if (tries >= TRIES_BEFORE_YIELD) sched_yield();
    }
    return seq;
}

static int changed_since(uint64_t seq) { return atomic_load_explicit(&sequence, memory_order_relaxed) != seq; }
static void begin_change(void) { atomic_store_explicit(&sequence, sequence + 1, memory_order_relaxed); }
static void end_change(void) { SET(sequence, sequence + 1); }

/* How many entries may be looked at: a reader can meet a new count with an old table. */
static size_t visible(const struct table *t) {
    size_t n = t ? GET(count) : 0;
    return t && n > t->capacity ? t->capacity : n;
}

/* The entry that begins last at or before addr; NULL if none does. */
static struct entry *below(struct table *t, size_t n, uintptr_t addr) {
    size_t low = 0;
    while (n > low) {
        size_t mid = low + (n - low) / 2;
        if (GET(t->entries[mid].base) <= addr)
            low = mid + 1;
        else
            n = mid;
    }
    return low ? &t->entries[low - 1] : NULL;
}

/* Where this id is, or would be. */
static size_t place_of_id(struct table *t, size_t n, uint64_t id) {
    size_t low = 0;
    while (n > low) {
        size_t mid = low + (n - low) / 2;
        if (GET(t->ids[mid]) < id)
            low = mid + 1;
        else
            n = mid;
    }
    return low;
}

int hr_arena_index_find(uintptr_t begin, uintptr_t end, struct hr_arena_info *info_p) {
    struct hr_arena_info info = {0};
    uint64_t seq;
    int found;
    do {
        seq = begin_read();
        struct table *t = GET(current);
        struct entry *e = below(t, visible(t), begin);
        uintptr_t base = e ? GET(e->base) : 0, limit = e ? GET(e->end) : 0;
        found = e && end <= limit && begin < limit;
        if (found) {
            uint64_t fd_flags = GET(e->fd_flags);
            info = (struct hr_arena_info){.id = GET(e->id),
                                          .fd = (int)(uint32_t)fd_flags,
                                          .base = (void *)base,
                                          .size = limit - base,
                                          .flags = (uint32_t)(fd_flags >> 32)};
        }
    } while (changed_since(seq));
    if (found) *info_p = info;
    return found;
}

int hr_arena_index_alive(uint64_t id) {
    uint64_t seq;
    int found;
    do {
        seq = begin_read();
        struct table *t = GET(current);
        size_t n = visible(t), i = place_of_id(t, n, id);
        found = i < n && GET(t->ids[i]) == id;
    } while (changed_since(seq));
    return found;
}

struct hr_arena *hr_arena_index_owner(const void *addr) {
    struct table *t = current;
    struct entry *e = below(t, visible(t), (uintptr_t)addr);
    return e && (uintptr_t)addr < e->end ? e->arena : NULL;
}

uint64_t hr_arena_index_kept(uintptr_t begin, uintptr_t end) {
    struct table *t = current;
    struct entry *e = end > begin ? below(t, visible(t), end - 1) : NULL;
    return e && e->end > begin && (uint32_t)(e->fd_flags >> 32) & HR_MEMORY_KEPT ? e->id : 0;
}

static void copy_entry(struct entry *to, struct entry *from) {
    SET(to->base, GET(from->base));
    SET(to->end, GET(from->end));
    SET(to->id, GET(from->id));
    SET(to->fd_flags, GET(from->fd_flags));
    to->arena = from->arena;
}

int hr_arena_index_reserve(void) {
    struct table *old = current;
    size_t n = count, capacity = old ? old->capacity : 0;
    if (n < capacity) return 0;
    capacity = capacity ? 2 * capacity : FIRST_CAPACITY;
    struct table *t = calloc(1, sizeof *t + capacity * sizeof(struct entry));
    _Atomic uint64_t *ids = calloc(capacity, sizeof *ids);
    if (!t || !ids) {
        free(t);
        free((void *)ids);
        return -1;
    }
    t->smaller = old;
    t->capacity = capacity;
    t->ids = ids;
    for (size_t i = 0; i < n; i++) {
        copy_entry(&t->entries[i], &old->entries[i]);
        SET(ids[i], GET(old->ids[i]));
    }
    SET(current, t); /* says the same as the old one */
    return 0;
}

void hr_arena_index_add(const struct hr_arena_info *info, struct hr_arena *arena) {
    struct table *t = current;
    uintptr_t base = (uintptr_t)info->base;
    size_t n = count, at = n, id_at = n;
    begin_change();
    for (; at > 0 && t->entries[at - 1].base > base; at--) copy_entry(&t->entries[at], &t->entries[at - 1]);
    SET(t->entries[at].base, base);
    SET(t->entries[at].end, base + info->size);
    SET(t->entries[at].id, info->id);
    SET(t->entries[at].fd_flags, (uint64_t)info->flags << 32 | (uint32_t)info->fd);
    t->entries[at].arena = arena;
    for (; id_at > 0 && t->ids[id_at - 1] > info->id; id_at--) SET(t->ids[id_at], GET(t->ids[id_at - 1]));
    SET(t->ids[id_at], info->id);
    SET(count, n + 1);
    end_change();
}

void hr_arena_index_remove(uint64_t id) {
    struct table *t = current;
    size_t n = count, at = 0;
    while (t->entries[at].id != id) at++;
    begin_change();
    for (; at + 1 < n; at++) copy_entry(&t->entries[at], &t->entries[at + 1]);
    for (at = place_of_id(t, n, id); at + 1 < n; at++) SET(t->ids[at], GET(t->ids[at + 1]));
    SET(count, n - 1);
    end_change();
}

/* The table stays where it is: a thread that is not here any more may have been about to free it. */
void hr_arena_index_restart(void) {
    SET(sequence, 0);
    SET(count, 0);
    SET(current, NULL);
}
