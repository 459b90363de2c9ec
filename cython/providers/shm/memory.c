/* memory.c - how a peer's memory is reached: mapped, by process_vm_readv, or not at all. */

/*
 * Memory in an arena is mapped by the peer, once per endpoint and arena, read-only: that is where HR_CAP_MAP comes
 * from. Other memory is read by process_vm_readv if the kernel permitted it when the endpoint was connected. What can
 * be reached in neither way is not exported, and the engine sends it in messages. So it does while every rank has a
 * core (HR_CAP_RELAYS) and that is faster: two copies that run at once, one behind the other through a ring in the
 * cache, against one of the kernel, which looks up every page. Measured, in GB/s:
 *
 *     Zen 4, a cache in common     1 MiB 25 and 10, 16 MiB 16 and 10, 256 MiB 12.5 and 10
 *     Granite Rapids, none         64 KiB 11 and 20, 256 KiB 15 and 27, 1 MiB 12 and 17, 4 MiB 12 and 11
 *
 * So the engine measures it (core/relay.h). What is put back, or by a sender that helps, is written by put.c. Reads
 * cannot be taken back (hence no HR_CAP_REVOKE); late ones see bytes that nobody needs any more.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "hr/memory.h"
#include "hr/reduce.h"
#include "providers/shm/shm.h"

#define REMOTE_CHANGE (HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_ATOMIC)

struct shm_desc {
    uint64_t key, addr, len, arena;
};
_Static_assert(sizeof(struct shm_desc) <= HR_DESC_BYTES, "a descriptor has to fit");

static int region_new(struct shm_domain *dom, void *addr, size_t len, uint32_t access, uint32_t *slot_p) {
    uint32_t i = 0;
    while (i < dom->nregions && dom->regions[i].access) i++;
    if (i == dom->nregions) {
        if (i > 0xffffff || !hr_shm_grow(&dom->regions, dom->nregions, &dom->regions_cap, sizeof *dom->regions))
            return 0;
        dom->regions[dom->nregions++] = (struct shm_region){0};
    }
    dom->regions[i] = (struct shm_region){addr, len, access, dom->regions[i].generation + 1};
    *slot_p = i;
    return 1;
}

hr_status hr_shm_mem_register(struct hr_domain *domain, void *addr, size_t len, uint32_t access, struct hr_mem *mem_p) {
    struct shm_domain *dom = shm_domain(domain);
    uint64_t key = access & SHM_ACCESS;
    if (access & REMOTE_CHANGE) { /* only what peers may change is looked up when they come */
        uint32_t slot = 0;
        if (!region_new(dom, addr, len, access, &slot)) return HR_ERR_NOMEM;
        key |= (uint64_t)slot << 8 | (uint64_t)dom->regions[slot].generation << 32;
    }
    *mem_p = (struct hr_mem){.addr = addr, .len = len, .rkey = key, .access = access};
    return HR_OK;
}

void hr_shm_mem_deregister(struct hr_domain *domain, struct hr_mem *mem) {
    struct shm_domain *dom = shm_domain(domain);
    uint32_t slot = shm_key_slot(mem->rkey);
    if (!(mem->access & REMOTE_CHANGE) || slot >= dom->nregions) return;
    if (dom->regions[slot].generation == shm_key_generation(mem->rkey)) dom->regions[slot].access = 0;
}

/* Writes by the ring end with the registration; what a peer maps it can write to while it lives. */
hr_status hr_shm_mem_quiet(struct hr_ep *ep, const struct hr_mem *mem) {
    if (!(mem->access & (HR_ACCESS_REMOTE_MAP | HR_ACCESS_REMOTE_PUT)) || hr_shm_ended(shm_ep(ep))) return HR_OK;
    if (mem->access & HR_ACCESS_REMOTE_PUT) return hr_shm_put_stop(shm_ep(ep));
    hr_arena_abandon(mem->addr, mem->len);
    return HR_OK;
}

struct shm_region *hr_shm_region_find(struct shm_domain *dom, uint64_t key, uint32_t access, uint64_t addr,
                                      uint64_t len) {
    struct shm_region *r = shm_key_slot(key) < dom->nregions ? &dom->regions[shm_key_slot(key)] : NULL;
    if (!r || !(r->access & access) || r->generation != shm_key_generation(key)) return NULL;
    uint64_t offset = addr - (uintptr_t)r->addr;
    return offset <= r->len && len <= r->len - offset ? r : NULL;
}

hr_status hr_shm_mem_export(struct hr_ep *ep, const struct hr_mem *mem, void *addr, size_t len,
                            struct hr_desc *desc_p) {
    struct shm_ep *e = shm_ep(ep);
    size_t offset = (uintptr_t)addr - (uintptr_t)mem->addr;
    struct shm_desc desc = {.key = mem->rkey, .addr = (uintptr_t)addr, .len = len};
    enum shm_route route = SHM_ROUTE_NONE;

    if (e->state != SHM_UP) return e->lost ? e->lost : HR_ERR_PEER_LOST;
    if (e->lost) return HR_AGAIN;
    if (!mem->access || offset > mem->len || len > mem->len - offset) return HR_ERR_ACCESS;
    if (mem->access & HR_ACCESS_REMOTE_READ) {
        hr_status status = hr_shm_arena_give(e, addr, len, &desc.arena);
        if (status == HR_OK)
            route = SHM_ROUTE_ARENA;
        else if (status == HR_ERR_UNSUPPORTED && e->peer_can_read)
            route = SHM_ROUTE_PROCESS;
        else
            return status;
    }
    if (route != SHM_ROUTE_PROCESS || !e->base.puts) desc.key &= ~(uint64_t)HR_ACCESS_REMOTE_PUT;
    desc.key |= (uint64_t)route << SHM_ROUTE;
    memset(desc_p, 0, sizeof *desc_p);
    memcpy(desc_p->bytes, &desc, sizeof desc);
    return HR_OK;
}

hr_status hr_shm_mem_import(struct hr_ep *ep, const struct hr_desc *desc_in, struct hr_rmem *rmem_p) {
    struct shm_ep *e = shm_ep(ep);
    struct shm_desc desc;
    struct shm_map *map = NULL;
    uint8_t *ptr = NULL;

    memcpy(&desc, desc_in->bytes, sizeof desc);
    if (e->state != SHM_UP) return HR_ERR_PEER_LOST;
    if (desc.addr + desc.len < desc.addr) return HR_ERR_ACCESS;
    if (shm_key_route(desc.key) == SHM_ROUTE_ARENA) {
        uint64_t offset;
        map = hr_shm_map_find(e, desc.arena);
        if (!map) { /* sent before the descriptor, by another way */
            hr_shm_frames_drain(e);
            map = hr_shm_map_find(e, desc.arena);
        }
        if (!map) return HR_ERR_ACCESS;
        offset = desc.addr - map->peer_base;
        if (offset > map->size || desc.len > map->size - offset) return HR_ERR_ACCESS;
        hr_shm_map_warm(map, offset, desc.len);
        map->refs++;
        ptr = map->base + offset;
    } else if (shm_key_route(desc.key) == SHM_ROUTE_PROCESS && !e->can_read) {
        return HR_ERR_UNSUPPORTED;
    }
    int writable = map && map->writable && desc.key & HR_ACCESS_REMOTE_MAP;
    *rmem_p = (struct hr_rmem){.ptr = ptr,
                               .out = writable ? ptr : NULL,
                               .addr = desc.addr,
                               .rkey = desc.key,
                               .len = desc.len,
                               .priv = map,
                               .puts = e->base.puts && (desc.key & HR_ACCESS_REMOTE_PUT) != 0};
    return HR_OK;
}

void hr_shm_mem_release(struct hr_ep *ep, struct hr_rmem *rmem) {
    if (rmem->priv) hr_shm_map_put(shm_ep(ep), rmem->priv);
    rmem->priv = NULL;
    rmem->ptr = rmem->out = NULL;
}

static hr_status read_process(struct shm_ep *e, uint8_t *local, uint64_t addr, size_t len) {
    while (len) {
        struct iovec here = {local, len}, there = {(void *)(uintptr_t)addr, len};
        ssize_t n = process_vm_readv(e->pid, &here, 1, &there, 1, 0);
        if (n < 0 && errno == ESRCH) return HR_ERR_PEER_LOST;
        if (n <= 0) return n == 0 || errno == EFAULT ? HR_ERR_ACCESS : HR_ERR_IO;
        local += n;
        addr += (uint64_t)n;
        len -= (size_t)n;
    }
    /* It lives still, so the number was its own all the time and the bytes are not those of a newcomer. */
    return hr_shm_ended(e) ? HR_ERR_PEER_LOST : HR_OK;
}

hr_status hr_shm_post_read(struct hr_ep *ep, const struct hr_rma *rma) {
    struct shm_ep *e = shm_ep(ep);
    const struct hr_rmem *remote = rma->remote;

    if (e->state != SHM_UP || (e->lost && e->lost != HR_ERR_PEER_LOST)) return e->lost ? e->lost : HR_ERR_PEER_LOST;
    if (!(shm_key_access(remote->rkey) & HR_ACCESS_REMOTE_READ) || rma->offset > remote->len ||
        rma->len > remote->len - rma->offset)
        return HR_ERR_ACCESS;
    if (remote->ptr)
        hr_copy(rma->local, (const uint8_t *)remote->ptr + rma->offset, rma->len,
                remote->len >= HR_UNREAD_MIN ? HR_STORE_UNREAD : HR_STORE_CACHED);
    else if (shm_key_route(remote->rkey) == SHM_ROUTE_PROCESS)
        return read_process(e, rma->local, remote->addr + rma->offset, rma->len);
    else
        return HR_ERR_UNSUPPORTED;
    return HR_OK;
}
