/* memory.c - the loop provider's registered memory: who may touch which range, and until when. */

/*
 * A registration is a slot in its domain's table; its key is the slot and the slot's generation. Peers copy to and from
 * it themselves, holding the owner's lock from the look-up to the last byte. That makes revoking exact: deregister and
 * abort take the same lock, so when they return, every access that was let in has ended and no other will be.
 *
 * rmem.ptr gives a plain address, which no lock can revoke. It must stay readable when the owner lets go of the memory
 * while somebody still reads it (one of two engines gave up on a collective), so between two domains it leads into a
 * read-only mapping of the owner's arena, made here and kept until the endpoint is destroyed. Memory outside arenas has
 * a ptr only within one domain: there owner and reader are the same engine.
 */

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "hr/memory.h"
#include "loop.h"

struct loop_map {
    uint64_t arena;
    char *base;         /* here */
    const char *theirs; /* the owner's address of the same bytes */
    size_t size;
    int users; /* imports not yet released */
    struct loop_map *next;
};

/* What a desc holds. */
struct loop_desc {
    uint64_t rkey, addr, len, access;
};
_Static_assert(sizeof(struct loop_desc) <= HR_DESC_BYTES, "a loop descriptor must fit");

static struct loop_shared *shared_of(struct hr_domain *domain) { return ((struct loop_domain *)domain)->shared; }

hr_status hr_loop_mem_register(struct hr_domain *domain, void *addr, size_t len, uint32_t access,
                               struct hr_mem *mem_p) {
    struct loop_shared *shared = shared_of(domain);
    struct loop_region *region;
    uint32_t i;

    if (!addr || !len) return HR_ERR_INVALID;
    pthread_mutex_lock(&shared->lock);
    i = shared->first_free;
    while (i < shared->nregions && shared->regions[i].addr) i++;
    if (i == shared->nregions) {
        uint32_t n = i ? 2 * i : 16;
        struct loop_region *regions = realloc(shared->regions, n * sizeof *regions);
        if (!regions) {
            pthread_mutex_unlock(&shared->lock);
            return HR_ERR_NOMEM;
        }
        memset(regions + i, 0, (n - i) * sizeof *regions);
        shared->regions = regions;
        shared->nregions = n;
    }
    shared->first_free = i + 1;
    region = &shared->regions[i];
    region->addr = addr;
    region->len = len;
    region->access = access;
    region->generation++;
    *mem_p = (struct hr_mem){.addr = addr, .len = len, .access = access};
    mem_p->rkey = (uint64_t)region->generation << 32 | i;
    pthread_mutex_unlock(&shared->lock);
    return HR_OK;
}

void hr_loop_mem_deregister(struct hr_domain *domain, struct hr_mem *mem) {
    struct loop_shared *shared = shared_of(domain);
    uint32_t i = (uint32_t)mem->rkey;
    pthread_mutex_lock(&shared->lock); /* waits for an access that is under way */
    shared->regions[i].addr = NULL;
    if (i < shared->first_free) shared->first_free = i;
    pthread_mutex_unlock(&shared->lock);
}

hr_status hr_loop_mem_quiet(struct hr_ep *ep, const struct hr_mem *mem) {
    (void)ep, (void)mem;
    return HR_OK; /* deregistering is enough */
}

hr_status hr_loop_mem_export(struct hr_ep *ep, const struct hr_mem *mem, void *addr, size_t len,
                             struct hr_desc *desc_p) {
    struct loop_desc desc = {.rkey = mem->rkey, .addr = (uintptr_t)addr, .len = len, .access = mem->access};
    size_t offset = (uintptr_t)addr - (uintptr_t)mem->addr;
    (void)ep; /* good on every endpoint: the key belongs to the domain */
    if ((uintptr_t)addr < (uintptr_t)mem->addr || offset > mem->len || len > mem->len - offset) return HR_ERR_INVALID;
    memset(desc_p, 0, sizeof *desc_p);
    memcpy(desc_p, &desc, sizeof desc);
    return HR_OK;
}

hr_status hr_loop_lock_remote(struct loop_ep *ep, uint64_t rkey, uint64_t addr, uint64_t len, uint32_t access,
                              char **ptr_p) {
    struct loop_shared *shared = ep->link->shared[!ep->side];
    uint32_t i = (uint32_t)rkey;
    const struct loop_region *region;

    pthread_mutex_lock(&shared->lock);
    if (atomic_load(&ep->link->closed[!ep->side])) {
        pthread_mutex_unlock(&shared->lock);
        return HR_AGAIN; /* it will be told */
    }
    region = i < shared->nregions ? &shared->regions[i] : NULL;
    if (region && region->addr && region->generation == rkey >> 32 && (region->access & access) == access) {
        uint64_t offset = addr - (uintptr_t)region->addr; /* wraps to something huge when addr lies before it */
        if (offset <= region->len && len <= region->len - offset) {
            *ptr_p = region->addr + offset;
            return HR_OK;
        }
    }
    pthread_mutex_unlock(&shared->lock);
    return HR_ERR_ACCESS;
}

void hr_loop_unlock_remote(struct loop_ep *ep) { pthread_mutex_unlock(&ep->link->shared[!ep->side]->lock); }

/* ---- mapping the peer's arenas ---- */

/* Mappings of arenas that are gone, and which nobody reads any more. */
static void drop_dead_maps(struct loop_ep *ep) {
    struct loop_map **at = &ep->maps, *map;
    while ((map = *at)) {
        if (map->users || hr_arena_alive(map->arena)) {
            at = &map->next;
            continue;
        }
        *at = map->next;
        munmap(map->base, map->size);
        free(map);
    }
}

/* Called with the owner's lock held and a live registration over addr, so its arena cannot go meanwhile. NULL: no
 * mapping, and post_read does it. */
static struct loop_map *map_arena(struct loop_ep *ep, const char *addr, size_t len) {
    struct hr_arena_info info;
    struct loop_map *map;

    if (!hr_arena_find(addr, len, &info)) return NULL;
    for (map = ep->maps; map; map = map->next)
        if (map->arena == info.id) return map;
    drop_dead_maps(ep);
    map = calloc(1, sizeof *map);
    if (!map) return NULL;
    map->base = mmap(NULL, info.size, PROT_READ, MAP_SHARED, info.fd, 0);
    if (map->base == MAP_FAILED) {
        free(map);
        return NULL;
    }
    map->arena = info.id;
    map->theirs = info.base;
    map->size = info.size;
    map->next = ep->maps;
    ep->maps = map;
    return map;
}

hr_status hr_loop_mem_import(struct hr_ep *base, const struct hr_desc *bytes, struct hr_rmem *rmem_p) {
    struct loop_ep *ep = (struct loop_ep *)base;
    struct hr_rmem rmem = {0};
    struct loop_desc desc;
    struct loop_map *map;
    hr_status status;
    char *addr;

    if (ep->phase != LOOP_OPEN) return ep->phase == LOOP_DEAD ? HR_ERR_PEER_LOST : HR_ERR_INVALID;
    memcpy(&desc, bytes, sizeof desc);
    if (desc.access > UINT32_MAX) return HR_ERR_ACCESS;
    status = hr_loop_lock_remote(ep, desc.rkey, desc.addr, desc.len, (uint32_t)desc.access, &addr);
    if (status != HR_OK) return status;
    rmem.addr = desc.addr;
    rmem.rkey = desc.rkey;
    rmem.len = desc.len;
    if (ep->link->shared[0] == ep->link->shared[1]) {
        rmem.ptr = addr;
    } else if (desc.access & HR_ACCESS_REMOTE_READ && (map = map_arena(ep, addr, desc.len))) {
        rmem.ptr = map->base + (addr - map->theirs);
        rmem.priv = map;
        map->users++;
    }
    hr_loop_unlock_remote(ep);
    *rmem_p = rmem;
    return HR_OK;
}

void hr_loop_mem_release(struct hr_ep *ep, struct hr_rmem *rmem) {
    struct loop_map *map = rmem->priv;
    (void)ep;
    if (map) map->users--; /* stays mapped for the next import */
}

void hr_loop_unmap_all(struct loop_ep *ep) {
    struct loop_map *map;
    while ((map = ep->maps)) {
        ep->maps = map->next;
        munmap(map->base, map->size);
        free(map);
    }
}
