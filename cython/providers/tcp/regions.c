/* regions.c - memory that peers may read and write, named by keys that are never used twice. */

/*
 * Every byte that a peer moves passes through this process, so registering is an entry in a table and revoking is its
 * removal: the receive path asks the table again before each read from the socket, never keeping an address across
 * two, and an answer that is still in a send queue gets its own copy of what it points to.
 */

#include <stdlib.h>
#include <string.h>

#include "providers/tcp/tcp.h"

struct desc {
    uint64_t key;
    uint64_t offset;
    uint64_t len;
    uint64_t guard;
};
_Static_assert(sizeof(struct desc) == HR_DESC_BYTES, "a descriptor has a fixed size");

#define DESC_GUARD 0x6373656470637468u

static uint32_t index_of(uint64_t key) { return (uint32_t)key; }

static struct hr_tcp_region *region_of(struct hr_tcp_domain *d, uint64_t key) {
    if (index_of(key) >= d->nregions) return NULL;
    struct hr_tcp_region *region = &d->regions[index_of(key)];
    return region->live && region->generation == key >> 32 ? region : NULL;
}

struct hr_tcp_region *hr_tcp_region_at(struct hr_tcp_domain *d, uint64_t key, uint32_t access, uint64_t offset,
                                       uint64_t len) {
    struct hr_tcp_region *region = region_of(d, key);
    if (!region || !(region->access & access) || offset > region->len || len > region->len - offset) return NULL;
    return region;
}

static int grow(struct hr_tcp_domain *d) {
    uint32_t n = d->nregions ? 2 * d->nregions : 16;
    struct hr_tcp_region *regions = n > d->nregions ? realloc(d->regions, n * sizeof *regions) : NULL;
    if (!regions) return -1;
    memset(regions + d->nregions, 0, (n - d->nregions) * sizeof *regions);
    for (uint32_t i = n; i-- > d->nregions;) {
        regions[i].next_free = d->free_region;
        d->free_region = i + 1;
    }
    d->regions = regions;
    d->nregions = n;
    return 0;
}

hr_status hr_tcp_mem_register(struct hr_domain *domain, void *addr, size_t len, uint32_t access, struct hr_mem *mem_p) {
    struct hr_tcp_domain *d = (struct hr_tcp_domain *)domain;
    if ((!addr && len) || (uintptr_t)addr + len < (uintptr_t)addr) return HR_ERR_INVALID;
    struct hr_mem mem = {.addr = addr, .len = len, .access = access};
    if (access != HR_ACCESS_LOCAL) {
        if (!d->free_region && grow(d)) return HR_ERR_NOMEM;
        uint32_t i = d->free_region - 1;
        struct hr_tcp_region *region = &d->regions[i];
        d->free_region = region->next_free;
        region->addr = addr;
        region->len = len;
        region->access = access;
        region->serving = 0;
        region->live = 1;
        region->generation++;
        mem.rkey = (uint64_t)region->generation << 32 | i;
    }
    *mem_p = mem;
    return HR_OK;
}

void hr_tcp_mem_deregister(struct hr_domain *domain, struct hr_mem *mem) {
    struct hr_tcp_domain *d = (struct hr_tcp_domain *)domain;
    struct hr_tcp_region *region = region_of(d, mem->rkey);
    if (!region) return;
    if (region->serving)
        for (struct hr_link *l = d->eps.next; l != &d->eps; l = l->next)
            hr_tcp_tx_detach(hr_container(l, struct hr_tcp_ep, link), mem->rkey);
    region->live = 0;
    if (region->generation != UINT32_MAX) { /* a slot whose generations are used up stays out */
        region->next_free = d->free_region;
        d->free_region = index_of(mem->rkey) + 1;
    }
    memset(mem, 0, sizeof *mem);
}

hr_status hr_tcp_mem_quiet(struct hr_ep *ep, const struct hr_mem *mem) {
    (void)ep, (void)mem;
    return HR_OK; /* deregistering is enough */
}

hr_status hr_tcp_mem_export(struct hr_ep *ep, const struct hr_mem *mem, void *addr, size_t len,
                            struct hr_desc *desc_p) {
    struct hr_tcp_domain *d = hr_tcp_domain_of(ep);
    if (!region_of(d, mem->rkey)) return HR_ERR_ACCESS;
    uintptr_t offset = (uintptr_t)addr - (uintptr_t)mem->addr;
    if ((uintptr_t)addr < (uintptr_t)mem->addr || offset > mem->len || len > mem->len - offset) return HR_ERR_INVALID;
    struct desc desc = {.key = mem->rkey, .offset = offset, .len = len, .guard = DESC_GUARD};
    memcpy(desc_p->bytes, &desc, sizeof desc);
    return HR_OK;
}

hr_status hr_tcp_mem_import(struct hr_ep *ep, const struct hr_desc *desc_in, struct hr_rmem *rmem_p) {
    struct desc desc;
    (void)ep;
    memcpy(&desc, desc_in->bytes, sizeof desc);
    if (desc.guard != DESC_GUARD || desc.offset + desc.len < desc.offset) return HR_ERR_INVALID;
    *rmem_p = (struct hr_rmem){.addr = desc.offset, .rkey = desc.key, .len = desc.len};
    return HR_OK;
}

void hr_tcp_mem_release(struct hr_ep *ep, struct hr_rmem *rmem) {
    (void)ep;
    memset(rmem, 0, sizeof *rmem);
}
