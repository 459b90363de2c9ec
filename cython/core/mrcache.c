/* mrcache.c - the registration cache: an interval table, a list of idle registrations, and who may be in between. */

/*
 * Listed registrations stand in a table sorted by where they begin; `reach` is the furthest end of a slot and all
 * before it, so a search for one that covers a range goes left from the last that begins early enough and stops where
 * nothing reaches far enough. They may overlap. Finding is O(log n) as a rule, inserting O(n) beside a system call that
 * costs more.
 *
 * A miss registers without the lock and then looks again: if another thread registered the same meanwhile, its
 * registration is taken and ours dropped. If anything was invalidated meanwhile, ours serves this one user and is never
 * listed. So no miss waits for another and none is repeated.
 *
 * Every registration is in one of two lists: busy, or idle (least recently used first). Those to be deregistered
 * leave both under the lock, and are deregistered after it.
 */

#include "core/mrcache.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "hr/memory.h"

#define WIDEST (2 * HR_MR_LONGEST)
#define PRIVATE_ACCESS (HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_ATOMIC)

struct slot {
    struct hr_mr *mr;
    uintptr_t reach;
};

struct hr_mrcache {
    struct hr_domain *domain;
    uint64_t max_bytes;
    uint32_t max_entries;
    uintptr_t page;
    pthread_mutex_t lock;
    struct slot *slots;
    size_t count, capacity;
    struct hr_mr busy, idle; /* heads of rings */
    uint64_t invalidations;
    struct hr_mrcache_stats stats;
};

struct range {
    uintptr_t begin, end;
    uint64_t arena;
};

static void ring_init(struct hr_mr *head) { head->next = head->prev = head; }

static void ring_remove(struct hr_mr *mr) {
    mr->prev->next = mr->next;
    mr->next->prev = mr->prev;
}

static void ring_append(struct hr_mr *head, struct hr_mr *mr) {
    mr->next = head;
    mr->prev = head->prev;
    head->prev->next = mr;
    head->prev = mr;
}

/* How many slots begin at or before addr. */
static size_t slots_up_to(const struct hr_mrcache *cache, uintptr_t addr) {
    size_t low = 0, high = cache->count;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (cache->slots[mid].mr->begin <= addr)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static void refresh_reach(struct hr_mrcache *cache, size_t from) {
    uintptr_t reach = from ? cache->slots[from - 1].reach : 0;
    for (size_t i = from; i < cache->count; i++) {
        if (cache->slots[i].mr->end > reach) reach = cache->slots[i].mr->end;
        cache->slots[i].reach = reach;
    }
}

/* Without memory for a longer table the registration stays unlisted, and ends with its user. */
static void list(struct hr_mrcache *cache, struct hr_mr *mr) {
    if (cache->count == cache->capacity) {
        size_t capacity = cache->capacity ? 2 * cache->capacity : 64;
        struct slot *slots = realloc(cache->slots, capacity * sizeof *slots);
        if (!slots) return;
        cache->slots = slots;
        cache->capacity = capacity;
    }
    size_t at = slots_up_to(cache, mr->begin);
    memmove(cache->slots + at + 1, cache->slots + at, (cache->count - at) * sizeof *cache->slots);
    cache->slots[at].mr = mr;
    cache->count++;
    mr->listed = 1;
    refresh_reach(cache, at);
}

static void unlist(struct hr_mrcache *cache, struct hr_mr *mr) {
    size_t at = slots_up_to(cache, mr->begin);
    while (cache->slots[--at].mr != mr) {}
    cache->count--;
    memmove(cache->slots + at, cache->slots + at + 1, (cache->count - at) * sizeof *cache->slots);
    mr->listed = 0;
    refresh_reach(cache, at);
}

/* Out of all lists and onto *gone_p, to be deregistered once the lock is released. */
static void leave(struct hr_mrcache *cache, struct hr_mr *mr, struct hr_mr **gone_p) {
    if (mr->listed) unlist(cache, mr);
    ring_remove(mr);
    cache->stats.bytes -= mr->end - mr->begin;
    cache->stats.entries--;
    mr->next = *gone_p;
    *gone_p = mr;
}

/* Nobody finds it any more; its users keep it until they put it. */
static void retire(struct hr_mrcache *cache, struct hr_mr *mr, struct hr_mr **gone_p) {
    if (mr->users)
        unlist(cache, mr);
    else
        leave(cache, mr, gone_p);
}

static int evict_oldest(struct hr_mrcache *cache, struct hr_mr **gone_p) {
    if (cache->idle.next == &cache->idle) return 0;
    leave(cache, cache->idle.next, gone_p);
    cache->stats.evictions++;
    return 1;
}

static void keep_bounds(struct hr_mrcache *cache, struct hr_mr **gone_p) {
    while (cache->stats.bytes > cache->max_bytes || cache->stats.entries > cache->max_entries) {
        if (!evict_oldest(cache, gone_p)) return;
    }
}

/* What lay in arenas that are gone: it would keep their pages. */
static void drop_dead(struct hr_mrcache *cache, struct hr_mr **gone_p) {
    for (struct hr_mr *mr = cache->idle.next, *next; mr != &cache->idle; mr = next) {
        next = mr->next;
        if (mr->arena && !hr_arena_alive(mr->arena)) leave(cache, mr, gone_p);
    }
}

static void deregister(struct hr_mrcache *cache, struct hr_mr *gone) {
    while (gone) {
        struct hr_mr *next = gone->next;
        cache->domain->ops->mem_deregister(cache->domain, &gone->mem);
        free(gone);
        gone = next;
    }
}

/* A listed registration that covers the range. Met on the way: those of arenas that are gone, or of memory where now an
 * arena lies. */
static struct hr_mr *find(struct hr_mrcache *cache, const struct range *want, uint32_t access, struct hr_mr **gone_p) {
    for (size_t i = slots_up_to(cache, want->begin); i > 0 && cache->slots[i - 1].reach >= want->end; i--) {
        struct hr_mr *mr = cache->slots[i - 1].mr;
        if (mr->end < want->end) continue;
        if (mr->arena != want->arena)
            retire(cache, mr, gone_p);
        else if ((mr->access & access) == access)
            return mr;
    }
    return NULL;
}

static void use(struct hr_mr *mr, struct hr_mrcache *cache) {
    if (!mr->users++) {
        ring_remove(mr);
        ring_append(&cache->busy, mr);
    }
}

/* What to register for a miss: the arena or, if that is too large, the part of it where the range lies; of other
 * memory, the union with what it overlaps. Parts of arenas overlap by half, so that every range lies in one. */
static struct range widened(const struct hr_mrcache *cache, struct range want, uint32_t access,
                            const struct hr_arena_info *info) {
    struct range wide = want;
    if (want.arena) {
        uintptr_t base = (uintptr_t)info->base;
        wide.begin = base + (want.begin - base) / HR_MR_LONGEST * HR_MR_LONGEST;
        wide.end = base + info->size - wide.begin > WIDEST ? wide.begin + WIDEST : base + info->size;
        return wide;
    }
    for (size_t i = slots_up_to(cache, want.end - 1); i > 0 && cache->slots[i - 1].reach > want.begin; i--) {
        const struct hr_mr *mr = cache->slots[i - 1].mr;
        uintptr_t begin = mr->begin < wide.begin ? mr->begin : wide.begin;
        uintptr_t end = mr->end > wide.end ? mr->end : wide.end;
        if (mr->end <= want.begin || mr->arena || mr->access != access || end - begin > WIDEST) continue;
        wide.begin = begin;
        wide.end = end;
    }
    return wide;
}

static hr_status try_register(struct hr_mrcache *cache, struct hr_mr *mr, struct range range) {
    mr->begin = range.begin;
    mr->end = range.end;
    mr->arena = range.arena;
    return cache->domain->ops->mem_register(cache->domain, (void *)range.begin, range.end - range.begin, mr->access,
                                            &mr->mem);
}

/* Gives up idle registrations of len bytes in all, or what there is; 0 if there is none. */
static int make_room(struct hr_mrcache *cache, size_t len) {
    struct hr_mr *gone = NULL;
    pthread_mutex_lock(&cache->lock);
    uint64_t before = cache->stats.bytes;
    while (before - cache->stats.bytes < len && evict_oldest(cache, &gone)) {}
    pthread_mutex_unlock(&cache->lock);
    int any = gone != NULL;
    deregister(cache, gone);
    return any;
}

/* The wide range may hold what cannot be registered, or be over a limit that what is wanted is not. */
static hr_status register_range(struct hr_mrcache *cache, struct hr_mr *mr, struct range want, struct range wide) {
    hr_status status = try_register(cache, mr, wide);
    if (hr_is_error(status) && (wide.begin != want.begin || wide.end != want.end))
        status = try_register(cache, mr, want);
    while (status == HR_ERR_NOMEM && make_room(cache, want.end - want.begin)) status = try_register(cache, mr, want);
    return status;
}

static void explain(hr_status status, void *addr, size_t len, char detail[256]) {
    struct rlimit limit;
    int n = snprintf(detail, 256, "cannot register %zu bytes at %p: %s", len, addr, hr_status_text(status));
    if (status != HR_ERR_NOMEM || getrlimit(RLIMIT_MEMLOCK, &limit) || limit.rlim_cur == RLIM_INFINITY) return;
    snprintf(detail + n, 256 - (size_t)n,
             "; locked memory is limited to %llu KiB, raise the memlock limit: ulimit -l unlimited",
             (unsigned long long)limit.rlim_cur / 1024);
}

/* A fresh registration joins the others, and replaces those that it makes superfluous. */
static void enter(struct hr_mrcache *cache, struct hr_mr *mr, int may_list, struct hr_mr **gone_p) {
    mr->users = 1;
    ring_append(&cache->busy, mr);
    cache->stats.bytes += mr->end - mr->begin;
    cache->stats.entries++;
    if (may_list) {
        for (size_t i = slots_up_to(cache, mr->end - 1); i > 0 && cache->slots[i - 1].mr->begin >= mr->begin; i--) {
            struct hr_mr *old = cache->slots[i - 1].mr;
            if (old->end <= mr->end && (mr->access & old->access) == old->access) retire(cache, old, gone_p);
        }
        list(cache, mr);
    }
    keep_bounds(cache, gone_p);
}

hr_status hr_mrcache_get(struct hr_mrcache *cache, void *addr, size_t len, uint32_t access, struct hr_mr **mr_p,
                         char detail[256]) {
    struct range want = {(uintptr_t)addr, (uintptr_t)addr + len, 0}, wide;
    struct hr_mr *mr = NULL, *fresh, *gone = NULL;
    struct hr_arena_info info = {0};
    int shared = !(access & PRIVATE_ACCESS);

    if (!len || len > HR_MR_LONGEST || want.begin > UINTPTR_MAX - len - cache->page) {
        snprintf(detail, 256, "cannot register %zu bytes at %p: give 1 to %zu bytes at a time", len, addr,
                 HR_MR_LONGEST);
        return HR_ERR_INVALID;
    }
    if (shared) {
        want.begin = want.begin / cache->page * cache->page;
        want.end = (want.end + cache->page - 1) / cache->page * cache->page;
        if (hr_arena_find(addr, len, &info)) want.arena = info.id;
    }

    pthread_mutex_lock(&cache->lock);
    if (shared) mr = find(cache, &want, access, &gone);
    if (mr) {
        use(mr, cache);
        cache->stats.hits++;
    } else {
        cache->stats.misses++;
        drop_dead(cache, &gone);
    }
    wide = shared && !mr ? widened(cache, want, access, &info) : want;
    uint64_t invalidations = cache->invalidations;
    pthread_mutex_unlock(&cache->lock);
    deregister(cache, gone);
    if (mr) {
        *mr_p = mr;
        return HR_OK;
    }

    fresh = calloc(1, sizeof *fresh);
    hr_status status = HR_ERR_NOMEM;
    if (fresh) {
        fresh->access = access;
        status = register_range(cache, fresh, want, wide);
    }
    if (hr_is_error(status)) {
        free(fresh);
        explain(status, addr, len, detail);
        return status;
    }

    gone = NULL;
    pthread_mutex_lock(&cache->lock);
    int may_list = shared && invalidations == cache->invalidations;
    if (may_list) mr = find(cache, &want, access, &gone);
    if (mr) {
        use(mr, cache);
        fresh->next = gone;
        gone = fresh;
    } else {
        mr = fresh;
        enter(cache, mr, may_list, &gone);
    }
    pthread_mutex_unlock(&cache->lock);
    deregister(cache, gone);
    *mr_p = mr;
    return HR_OK;
}

void hr_mrcache_put(struct hr_mrcache *cache, struct hr_mr *mr) {
    struct hr_mr *gone = NULL;
    pthread_mutex_lock(&cache->lock);
    if (!--mr->users) {
        if (mr->listed) {
            ring_remove(mr);
            ring_append(&cache->idle, mr);
        } else {
            leave(cache, mr, &gone);
        }
        keep_bounds(cache, &gone);
    }
    pthread_mutex_unlock(&cache->lock);
    deregister(cache, gone);
}

void hr_mrcache_invalidate(struct hr_mrcache *cache, const void *addr, size_t len) {
    uintptr_t begin = (uintptr_t)addr, end = len > UINTPTR_MAX - begin ? UINTPTR_MAX : begin + len;
    struct hr_mr *gone = NULL;
    if (!len) return;
    pthread_mutex_lock(&cache->lock);
    cache->invalidations++;
    for (size_t i = slots_up_to(cache, end - 1); i > 0 && cache->slots[i - 1].reach > begin; i--) {
        if (cache->slots[i - 1].mr->end > begin) retire(cache, cache->slots[i - 1].mr, &gone);
    }
    pthread_mutex_unlock(&cache->lock);
    deregister(cache, gone);
}

void hr_mrcache_stats(struct hr_mrcache *cache, struct hr_mrcache_stats *stats_p) {
    pthread_mutex_lock(&cache->lock);
    *stats_p = cache->stats;
    pthread_mutex_unlock(&cache->lock);
}

hr_status hr_mrcache_new(struct hr_domain *domain, uint64_t max_bytes, uint32_t max_entries,
                         struct hr_mrcache **cache_p) {
    struct hr_mrcache *cache = calloc(1, sizeof *cache);
    if (!cache) return HR_ERR_NOMEM;
    cache->domain = domain;
    cache->max_bytes = max_bytes;
    cache->max_entries = max_entries;
    cache->page = (uintptr_t)sysconf(_SC_PAGESIZE);
    pthread_mutex_init(&cache->lock, NULL);
    ring_init(&cache->busy);
    ring_init(&cache->idle);
    *cache_p = cache;
    return HR_OK;
}

void hr_mrcache_free(struct hr_mrcache *cache) {
    struct hr_mr *gone = NULL;
    if (!cache) return;
    cache->count = 0; /* nobody searches any more */
    while (cache->busy.next != &cache->busy) {
        cache->busy.next->listed = 0;
        leave(cache, cache->busy.next, &gone);
    }
    while (cache->idle.next != &cache->idle) {
        cache->idle.next->listed = 0;
        leave(cache, cache->idle.next, &gone);
    }
    deregister(cache, gone);
    pthread_mutex_destroy(&cache->lock);
    free(cache->slots);
    free(cache);
}
