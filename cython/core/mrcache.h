/* mrcache.h - registrations kept for the next operation on the same memory. */
#ifndef HR_MRCACHE_H
#define HR_MRCACHE_H

/*
 * Registering pins pages: on an RDMA device that may take longer than to send them. So a registration is kept when its
 * operation is over, and found again by address.
 *
 *   hr_mrcache_get(cache, buf, len, HR_ACCESS_LOCAL, &mr, detail);
 *   ... post with &mr->mem ...
 *   hr_mrcache_put(cache, mr);      when the operation has ended
 *
 * Memory that goes away must be named to hr_mrcache_invalidate before: nothing hooks malloc, and the kernel keeps the
 * old pages pinned, so that a later operation at a reused address would move bytes that nobody sees. For arenas this is
 * not needed: their ids tell.
 *
 * The bounds are on what is registered in all; only registrations without users can be given up, so what is in use may
 * pass them. All calls may come from any thread. Registering and deregistering happen without the cache's lock held:
 * the provider's two slots must be safe to call at once, or the caller holds the lock that makes them so.
 */

#include "hr/provider.h"

#define HR_MR_LONGEST ((size_t)1 << 30) /* one get; longer transfers go piece by piece. Registrations reach 2 GiB. */

struct hr_mrcache;

struct hr_mr {
    struct hr_mem mem; /* covers what was asked for; the rest is the cache's */
    struct hr_mr *next, *prev;
    uintptr_t begin, end;
    uint32_t access;
    uint32_t users;
    uint32_t listed; /* others may find it */
    uint64_t arena;  /* id of the arena it lies in; 0: other memory */
};

struct hr_mrcache_stats {
    uint64_t hits, misses, evictions, bytes, entries;
};

/* 0 for a bound keeps nothing. Made for one domain, freed before it is closed. */
hr_status hr_mrcache_new(struct hr_domain *domain, uint64_t max_bytes, uint32_t max_entries,
                         struct hr_mrcache **cache_p);
/* Deregisters everything, also what was not put back. */
void hr_mrcache_free(struct hr_mrcache *cache);

/*
 * A registration that covers [addr, addr+len) with at least this access (HR_ACCESS_*). It may be wider: whole pages,
 * the whole arena, the union with registrations that it overlaps. Where a peer may write it is none of this: exact,
 * shared with nobody, and deregistered by put, so that a peer which was given up cannot write later.
 *
 * HR_ERR_INVALID: len is 0 or above HR_MR_LONGEST. HR_ERR_NOMEM: over a limit even after all idle registrations were
 * given up. Else the provider's error. detail says what and why.
 */
hr_status hr_mrcache_get(struct hr_mrcache *cache, void *addr, size_t len, uint32_t access, struct hr_mr **mr_p,
                         char detail[256]);
void hr_mrcache_put(struct hr_mrcache *cache, struct hr_mr *mr);

/* This memory is about to go. What overlaps it is found no more: deregistered now, or by its last user's put. */
void hr_mrcache_invalidate(struct hr_mrcache *cache, const void *addr, size_t len);

void hr_mrcache_stats(struct hr_mrcache *cache, struct hr_mrcache_stats *stats_p);

#endif
