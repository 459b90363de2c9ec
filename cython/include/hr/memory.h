/* memory.h - arenas: the registered memory that hrdma.empty() hands out; and other memory that is kept registered. */
#ifndef HR_MEMORY_H
#define HR_MEMORY_H

/*
 * An arena is one memfd: sealed against shrinking, allocated in full (ENOMEM here, never SIGBUS later), prefaulted, in
 * huge pages where they are not refused and the kernel can be brought to it, aligned to 2 MiB. Blocks are cut from
 * arenas, 64-byte aligned, first fit, neighbours merged on free; an empty arena is kept up to a bound and then given
 * back. Peers on the host map an arena read-only (F_SEAL_FUTURE_WRITE after our own mapping), unless it was made with
 * HR_ARENA_WRITABLE_BY_PEERS: then blocks are whole pages, and what a peer that was stopped may still write to can be
 * left to it (hr_arena_abandon). Nothing has a name in any file system, so nothing is left after kill -9. Arenas belong
 * to the process, not to an engine, and are thread safe.
 *
 * After fork the child shares the pages (MAP_SHARED): it may read and write blocks it inherited, which are the parent's
 * to free (here nothing happens) and to hr_arena_find no arena's. What it allocates is in arenas of its own. Pages that
 * the parent has got instead of abandoned ones are its own: a child has a copy.
 */

#include <stddef.h>
#include <stdint.h>

#include "hr/status.h"

enum {
    HR_ARENA_WRITABLE_BY_PEERS = 1,
    HR_MEMORY_KEPT = 2,
    HR_ARENA_SMALL_PAGES = 4, /* for who has a deadline: a huge page can take seconds (arena_pages.c) */
    HR_ARENA_PASSING = 8      /* for what is soon given back: not in one arena with what stays */
};

struct hr_arena_info {
    uint64_t id; /* unique in this process, never reused */
    int fd;      /* the memfd; owned by the arena */
    void *base;
    size_t size;
    uint32_t flags;
};

/* len bytes, 64-aligned, contents zero only when fresh. NULL with errno on failure. len 0 gives a unique block. */
void *hr_arena_alloc(size_t len, uint32_t flags);
void hr_arena_free(void *block);
/* The arena that covers [addr, addr+len) in full: 1 and *info_p, else 0. Cheap: called on every large transfer. */
int hr_arena_find(const void *addr, size_t len, struct hr_arena_info *info_p);
/* Is the arena, or kept memory, with this id still there? Providers drop what they cached for those that went. */
int hr_arena_alive(uint64_t id);

/*
 * Kept memory is other memory whose owner says when it goes: a provider that has to register what it moves keeps the
 * registration for the next operation, as it does with arenas. Nothing hooks malloc: the binding knows the object that
 * owns the memory, and hears of its end. It may not overlap memory that is known already.
 */
/* Its id, never reused; 0 where there is no memory to note it. */
uint64_t hr_memory_keep(void *base, size_t size);
/* It is about to go: on return nobody finds it. */
void hr_memory_forget(uint64_t id);
/* How many have gone: when this has changed there is something to drop. */
uint64_t hr_memory_forgotten(void);
/* As hr_arena_find, and finds kept memory as well: fd -1, flags HR_MEMORY_KEPT. */
int hr_memory_find(const void *addr, size_t len, struct hr_arena_info *info_p);

/* Whether what somebody asked for ends here: what follows on the page is nobody's. Takes a lock. */
int hr_arena_ends(const void *end);
/* Peers may write to this, and one that was stopped will when it goes on: it gets the pages, and here are new ones,
 * whose contents are undefined. What else lies in the arena stays; no peer is shown it any more. */
void hr_arena_abandon(void *addr, size_t len);

size_t hr_page(void); /* bytes of a page of this host's */
static inline uintptr_t hr_page_down(uintptr_t at) { return at & ~((uintptr_t)hr_page() - 1); }
static inline uintptr_t hr_page_up(uintptr_t at) { return hr_page_down(at + hr_page() - 1); }

struct hr_arena_stats {
    uint64_t arenas, bytes_mapped, bytes_used, bytes_huge, blocks;
};
void hr_arena_stats(struct hr_arena_stats *stats_p);

#endif
