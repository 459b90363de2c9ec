/* memory.c - registered memory: arenas once, other memory as asked; descriptors that a peer can check. */

/*
 * An arena is registered whole, with every right, when something in it is first used, and stays so while it lives: the
 * keys of all that lies in it are those of the arena, registering is free, and local buffers go to the device without a
 * copy. What a peer may do is in the descriptor and is checked by the peer before it posts: the key alone would allow
 * more, but every peer has proved the job key. A peer that was given up cannot use it: its queue pair is broken first.
 *
 * Memory outside of arenas is pinned for as long as its registration lives, `pin` bytes at most. Where its owner says
 * when it goes (kept memory), the registration stays for the next operation, whole and with every right, as an arena's
 * does; of those that nobody uses the one that was used longest ago makes room for others.
 *
 * On device "tcp", which pins nothing, each registration is of its own: its key is not given twice.
 *
 * A descriptor carries a check over its fields and a number that both ends agreed on for this connection: one that was
 * made up or damaged is refused at import, where on the wire it would break the queue pair.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "hr/memory.h"
#include "providers/verbs/verbs.h"

enum { ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC };

struct verbs_desc {
    uint64_t addr, len;
    uint32_t rkey, access;
    uint32_t serial; /* which registration */
    uint32_t check;
};
_Static_assert(sizeof(struct verbs_desc) == HR_DESC_BYTES, "fills a descriptor");

/* Not shared with a child of fork: what it writes there must not take the pages away from the device. */
void *hr_verbs_pages(size_t len) {
    void *pages = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return NULL;
    madvise(pages, len, MADV_DONTFORK);
    return pages;
}

/* ---- the device's registrations ---- */

void hr_verbs_mem_held(struct hr_verbs_domain *d, int64_t bytes) {
    d->counts.held += (uint64_t)bytes;
    if (d->counts.most < d->counts.held) d->counts.most = d->counts.held;
}

static void mr_free(struct hr_verbs_domain *d, struct hr_verbs_mr *mr) {
    struct hr_verbs_mr **at = &d->mrs;
    while (*at != mr) at = &(*at)->next;
    *at = mr->next;
    if (!mr->memory || mr->kept) {
        d->pinned -= mr->mr->length;
        hr_verbs_mem_held(d, -(int64_t)mr->mr->length);
    }
    d->verbs->dereg_mr(mr->mr);
    free(mr);
}

/* Gives up what is kept and nobody uses, the one that was used longest ago first, until no more than that is pinned. */
static int spare(struct hr_verbs_domain *d, uint64_t most) {
    while (d->pinned > most) {
        struct hr_verbs_mr *oldest = NULL;
        for (struct hr_verbs_mr *mr = d->mrs; mr; mr = mr->next)
            if (mr->kept && !mr->users) oldest = mr;
        if (!oldest) return 0;
        mr_free(d, oldest);
    }
    return 1;
}

struct ibv_mr *hr_verbs_pin(struct hr_verbs_domain *d, void *addr, size_t len, int access) {
    struct ibv_mr *mr = d->verbs->reg_mr(d->pd, addr, len, access);
    uint64_t pinned = d->pinned;
    if (mr || errno != ENOMEM) return mr;
    spare(d, 0);
    if (d->pinned < pinned) return d->verbs->reg_mr(d->pd, addr, len, access);
    errno = ENOMEM;
    return NULL;
}

static struct hr_verbs_mr *mr_new(struct hr_verbs_domain *d, void *addr, size_t len, int access, uint64_t memory,
                                  int kept) {
    struct hr_verbs_mr *mr = calloc(1, sizeof *mr);
    if (!mr) return NULL;
    errno = hr_verbs_inject_register(&d->inject);
    if (!errno) mr->mr = hr_verbs_pin(d, addr, len, access);
    if (!mr->mr) {
        int error = errno;
        free(mr);
        errno = error;
        return NULL;
    }
    d->counts.registered++;
    if (!memory || kept) {
        d->pinned += len;
        hr_verbs_mem_held(d, (int64_t)len);
    }
    mr->memory = memory;
    mr->kept = kept;
    mr->next = d->mrs;
    d->mrs = mr;
    return mr;
}

static void drop_dead(struct hr_verbs_domain *d) {
    d->forgotten = hr_memory_forgotten();
    for (struct hr_verbs_mr *mr = d->mrs, *next; mr; mr = next) {
        next = mr->next;
        if (mr->memory && !mr->users && !hr_arena_alive(mr->memory)) mr_free(d, mr);
    }
}

void hr_verbs_mem_tidy(struct hr_verbs_domain *d) {
    if (d->forgotten != hr_memory_forgotten()) drop_dead(d);
}

/* Whether so much more may be pinned outside arenas. */
static int make_room(struct hr_verbs_domain *d, size_t len) { return len <= d->pin && spare(d, d->pin - len); }

/* The registration of the arena, or kept memory, that covers this, or NULL: it is in none, or the device does not take
 * it; then errno says why, if it was asked at all. */
static struct hr_verbs_mr *lasting_mr(struct hr_verbs_domain *d, const void *addr, size_t len) {
    struct hr_arena_info info;
    struct hr_verbs_mr **at = &d->mrs, *mr;
    errno = 0;
    if (!hr_memory_find(addr, len, &info)) return NULL;
    int kept = info.flags & HR_MEMORY_KEPT;
    while (*at && (*at)->memory != info.id) at = &(*at)->next;
    if ((mr = *at)) {
        *at = mr->next;
        mr->next = d->mrs;
        return d->mrs = mr;
    }
    drop_dead(d);
    errno = 0;
    if (info.size > d->attr.max_mr_size || (kept && (!d->keeps || !make_room(d, info.size)))) return NULL;
    return mr_new(d, info.base, info.size, ALL, info.id, kept);
}

uint32_t hr_verbs_local_key(struct hr_verbs_domain *d, const void *addr, size_t len, const struct hr_mem *mem,
                            struct hr_verbs_mr **held_p) {
    struct hr_verbs_mr *mr;
    if (mem) return (uint32_t)mem->key;
    mr = lasting_mr(d, addr, len);
    if (mr && mr->kept) {
        mr->users++;
        *held_p = mr;
    }
    return mr ? mr->mr->lkey : 0;
}

void hr_verbs_mem_close(struct hr_verbs_domain *d) {
    while (d->mrs) mr_free(d, d->mrs);
}

/* Words for users: the device did not pin this, for that error. */
static hr_status refuse(struct hr_verbs_domain *d, size_t len, int error) {
    char limit[120];
    snprintf(d->base.refused, sizeof d->base.refused, "%zu bytes cannot be pinned: %.60s (the device has %d regions)%s",
             len, strerror(error), d->attr.max_mr, hr_verbs_memlock_text(error, limit));
    return HR_ERR_NOMEM;
}

/* Or what may be pinned outside arenas does not suffice. An arena whose own registration failed is refused for that. */
static hr_status refuse_more(struct hr_verbs_domain *d, const void *addr, size_t len, int error) {
    struct hr_arena_info info;
    if (error && hr_arena_find(addr, len, &info)) return refuse(d, info.size, error);
    snprintf(d->base.refused, sizeof d->base.refused,
             "HRDMA_VERBS=pin=%llu is what may be pinned outside arenas, and %llu bytes of it are taken",
             (unsigned long long)d->pin, (unsigned long long)d->pinned);
    return HR_ERR_NOMEM;
}

/* ---- slots of the vtable ---- */

hr_status hr_verbs_mem_register(struct hr_domain *domain, void *addr, size_t len, uint32_t access,
                                struct hr_mem *mem_p) {
    struct hr_verbs_domain *d = (struct hr_verbs_domain *)domain;
    struct hr_verbs_mr *mr;
    int flags = IBV_ACCESS_LOCAL_WRITE;
    if (!addr || !len) return HR_ERR_INVALID;
    if (!d->ctx) return HR_ERR_DEVICE;
    if (access & HR_ACCESS_REMOTE_READ) flags |= IBV_ACCESS_REMOTE_READ;
    if (access & HR_ACCESS_REMOTE_WRITE) flags |= IBV_ACCESS_REMOTE_WRITE;
    if (access & HR_ACCESS_REMOTE_ATOMIC) flags |= IBV_ACCESS_REMOTE_ATOMIC;
    mr = d->is_tcp ? NULL : lasting_mr(d, addr, len);
    if (!mr) {
        int error = errno;
        if (!d->is_tcp && !make_room(d, len)) return refuse_more(d, addr, len, error);
        mr = mr_new(d, addr, len, flags, 0, 0);
        /* Memory that this process itself may only read. */
        if (!mr && (errno == EFAULT || errno == EACCES) && !(access & ~(uint32_t)HR_ACCESS_REMOTE_READ))
            mr = mr_new(d, addr, len, flags & ~IBV_ACCESS_LOCAL_WRITE, 0, 0);
    }
    if (!mr) return refuse(d, len, errno);
    mr->users++;
    if (!++d->registrations) d->registrations = 1; /* 0 is nobody's */
    *mem_p = (struct hr_mem){.addr = addr, .len = len, .key = mr->mr->lkey, .priv = mr, .access = access};
    mem_p->rkey = (uint64_t)d->registrations << 32 | mr->mr->rkey;
    return HR_OK;
}

void hr_verbs_mem_deregister(struct hr_domain *domain, struct hr_mem *mem) {
    struct hr_verbs_domain *d = (struct hr_verbs_domain *)domain;
    struct hr_verbs_mr *mr = mem->priv;
    if (!d->ctx) return; /* closed with the device */
    if (--mr->users == 0 && (!mr->memory || (mr->kept && !hr_arena_alive(mr->memory)))) mr_free(d, mr);
}

static uint32_t check_of(const struct verbs_desc *desc, uint64_t nonce) {
    const uint64_t words[5] = {desc->addr, desc->len, (uint64_t)desc->rkey << 32 | desc->access, desc->serial, nonce};
    uint64_t x = 0x243f6a8885a308d3u;
    for (int i = 0; i < 5; i++) {
        x = (x ^ words[i]) * 0xff51afd7ed558ccdu;
        x ^= x >> 32;
    }
    return (uint32_t)x;
}

hr_status hr_verbs_mem_export(struct hr_ep *base, const struct hr_mem *mem, void *addr, size_t len,
                              struct hr_desc *desc_p) {
    struct hr_verbs_ep *ep = (struct hr_verbs_ep *)base;
    struct verbs_desc desc = {.addr = (uintptr_t)addr,
                              .len = len,
                              .rkey = (uint32_t)mem->rkey,
                              .access = mem->access,
                              .serial = (uint32_t)(mem->rkey >> 32)};
    size_t offset = (uintptr_t)addr - (uintptr_t)mem->addr;
    if ((uintptr_t)addr < (uintptr_t)mem->addr || offset > mem->len || len > mem->len - offset) return HR_ERR_INVALID;
    desc.check = check_of(&desc, ep->nonce);
    memcpy(desc_p, &desc, sizeof desc);
    return HR_OK;
}

hr_status hr_verbs_mem_import(struct hr_ep *base, const struct hr_desc *bytes, struct hr_rmem *rmem_p) {
    struct hr_verbs_ep *ep = (struct hr_verbs_ep *)base;
    struct verbs_desc desc;
    if (ep->state == HR_VERBS_LOST || ep->state == HR_VERBS_CLOSED) return HR_ERR_PEER_LOST;
    memcpy(&desc, bytes, sizeof desc);
    if (desc.check != check_of(&desc, ep->peer_nonce)) return HR_ERR_ACCESS;
    *rmem_p = (struct hr_rmem){.addr = desc.addr, .len = desc.len, .priv = (void *)(uintptr_t)desc.access};
    rmem_p->rkey = (uint64_t)desc.serial << 32 | desc.rkey;
    return HR_OK;
}

void hr_verbs_mem_release(struct hr_ep *ep, struct hr_rmem *rmem) { (void)ep, (void)rmem; /* nothing was mapped */ }
