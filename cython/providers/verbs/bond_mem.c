/* bond_mem.c - memory of a bond: registered with every rail; descriptors with a key for each; taken back on all lanes.
 */

/*
 * A descriptor carries the keys of all rails, so that what moves from a rail to another needs no word from the owner.
 * It has 32 bytes: 57 bits of address, which is what there is, three of rights, 40 of length, and a check of 24 over
 * these and the number of the bond. The serial number is that of the registration, the same on all rails; with a spare
 * rail it is the key there, which is never given twice.
 */

#include <stdlib.h>
#include <string.h>

#include "providers/verbs/bond.h"

#define PATIENCE (1000 * HR_VERBS_MS)
enum { ADDRESS_BITS = 57, LENGTH_BITS = 40 };

struct bond_desc {
    uint64_t addr; /* and rights above it */
    uint32_t rkeys[HR_VERBS_RAILS], serial;
    uint8_t len[5], check[3];
};
_Static_assert(sizeof(struct bond_desc) == HR_DESC_BYTES, "fills a descriptor");

/* ---- registrations ---- */

/* With those rails that knew it. */
static void forget(struct hr_bond *bond, struct hr_bond_reg *reg) {
    for (int i = 0; i < bond->n; i++)
        if (bond->rails[i] && reg->mems[i].priv) hr_verbs_mem_deregister(&bond->rails[i]->base, &reg->mems[i]);
    free(reg);
}

hr_status hr_bond_mem_register(struct hr_domain *domain, void *addr, size_t len, uint32_t access,
                               struct hr_mem *mem_p) {
    struct hr_bond *bond = (struct hr_bond *)domain;
    if (len >> LENGTH_BITS || (uint64_t)(uintptr_t)addr >> ADDRESS_BITS) return HR_ERR_NOMEM;
    struct hr_bond_reg *reg = calloc(1, sizeof *reg);
    if (!reg) return HR_ERR_NOMEM;
    uint64_t serial = 0;
    for (int i = bond->n - 1; i >= 0; i--) { /* the spare one first */
        if (!bond->rails[i] || bond->rails[i]->gone) continue;
        hr_status status = hr_verbs_mem_register(&bond->rails[i]->base, addr, len, access, &reg->mems[i]);
        if (status != HR_OK) {
            memcpy(domain->refused, bond->rails[i]->base.refused, sizeof domain->refused);
            forget(bond, reg);
            return status;
        }
        if (i == HR_BOND_SPARE) serial = (uint32_t)reg->mems[i].rkey;
        if (!serial && !(serial = ++bond->registrations)) serial = bond->registrations = 1; /* 0 is nobody's */
        reg->mems[i].rkey = serial << 32 | (uint32_t)reg->mems[i].rkey;
    }
    *mem_p = (struct hr_mem){.addr = addr, .len = len, .priv = reg, .access = access};
    mem_p->rkey = serial << 32;
    return HR_OK;
}

void hr_bond_mem_deregister(struct hr_domain *domain, struct hr_mem *mem) {
    forget((struct hr_bond *)domain, mem->priv);
}

/* ---- descriptors ---- */

static void put_check(struct bond_desc *desc, uint64_t session) {
    uint64_t words[4], x = session ^ 0x243f6a8885a308d3u;
    memset(desc->check, 0, sizeof desc->check);
    memcpy(words, desc, sizeof words);
    for (int i = 0; i < 4; i++) {
        x = (x ^ words[i]) * 0xff51afd7ed558ccdu;
        x ^= x >> 32;
    }
    memcpy(desc->check, &x, sizeof desc->check);
}

hr_status hr_bond_mem_export(struct hr_ep *base, const struct hr_mem *mem, void *addr, size_t len,
                             struct hr_desc *desc_p) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    const struct hr_bond_reg *reg = mem->priv;
    uint64_t rights = mem->access, bytes = len;
    struct bond_desc desc = {.addr = (uintptr_t)addr | rights << ADDRESS_BITS, .serial = (uint32_t)(mem->rkey >> 32)};
    size_t offset = (uintptr_t)addr - (uintptr_t)mem->addr;
    if (ep->plain)
        return ep->lanes[ep->first].ep
                   ? hr_verbs_mem_export(&ep->lanes[ep->first].ep->base, &reg->mems[ep->first], addr, len, desc_p)
                   : HR_ERR_PEER_LOST;
    if ((uintptr_t)addr < (uintptr_t)mem->addr || offset > mem->len || len > mem->len - offset) return HR_ERR_INVALID;
    for (int i = 0; i < ep->n && i < HR_VERBS_RAILS; i++) desc.rkeys[i] = (uint32_t)reg->mems[i].rkey;
    memcpy(desc.len, &bytes, sizeof desc.len);
    put_check(&desc, ep->session);
    memcpy(desc_p, &desc, sizeof desc);
    return HR_OK;
}

hr_status hr_bond_mem_import(struct hr_ep *base, const struct hr_desc *bytes, struct hr_rmem *rmem_p) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    struct bond_desc desc, whole;
    uint64_t len = 0;
    if (ep->state == HR_BOND_OVER || ep->state == HR_BOND_CLOSED) return HR_ERR_PEER_LOST;
    if (ep->plain) return hr_verbs_mem_import(&ep->lanes[ep->first].ep->base, bytes, rmem_p);
    memcpy(&desc, bytes, sizeof desc);
    whole = desc;
    put_check(&whole, ep->session);
    if (memcmp(&whole, &desc, sizeof desc) != 0) return HR_ERR_ACCESS;
    memcpy(&len, desc.len, sizeof desc.len);
    *rmem_p = (struct hr_rmem){.addr = desc.addr, .len = len};
    rmem_p->rkey = (uint64_t)desc.serial << 32 | desc.rkeys[0];
    rmem_p->priv = (void *)(uintptr_t)((uint64_t)desc.rkeys[1] << 32 | desc.rkeys[2]);
    return HR_OK;
}

void hr_bond_mem_release(struct hr_ep *base, struct hr_rmem *rmem) { (void)base, (void)rmem; /* nothing was mapped */ }

uint32_t hr_bond_access(const struct hr_rmem *remote) { return (uint32_t)(remote->addr >> ADDRESS_BITS); }

struct hr_rmem hr_bond_rmem(const struct hr_rmem *remote, int rail) {
    uint64_t more = (uintptr_t)remote->priv, serial = remote->rkey >> 32;
    uint32_t rkey = rail == HR_BOND_SPARE ? (uint32_t)serial
                    : rail == 0           ? (uint32_t)remote->rkey
                                          : (uint32_t)(rail == 1 ? more >> 32 : more);
    struct hr_rmem one = {.addr = remote->addr & ((1ull << ADDRESS_BITS) - 1), .len = remote->len};
    one.rkey = serial << 32 | rkey;
    one.priv = (void *)(uintptr_t)hr_bond_access(remote);
    return one;
}

/* ---- taking back ---- */

/* Asked on all lanes at once, and all are looked at while one waits: the peer may be asking on another. A lane on which
 * no answer comes is broken, which keeps the peer out as well. One without a queue pair is left: when it comes up, the
 * peer knows. */
hr_status hr_bond_mem_quiet(struct hr_ep *base, const struct hr_mem *mem) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    struct hr_bond *bond = hr_bond_of(base);
    const struct hr_bond_reg *reg = mem->priv;
    uint32_t serial = (uint32_t)(mem->rkey >> 32);
    int64_t start = hr_now(), limit = start + PATIENCE;
    unsigned asked = 0, open = 0, answered = 0, gone = 0;
    if (ep->plain)
        return ep->lanes[ep->first].ep ? hr_verbs_mem_quiet(&ep->lanes[ep->first].ep->base, &reg->mems[ep->first])
                                       : HR_OK;
    if (!(mem->access & (HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_ATOMIC))) return HR_OK;
    if (ep->state == HR_BOND_OVER || ep->state == HR_BOND_CLOSED) return HR_OK; /* all lanes are broken */
    for (int i = 0; i < ep->n; i++)
        if (hr_bond_lane_up(ep, i)) {
            ep->lanes[i].ep->answered = 0;
            open |= 1u << i;
        }
    while (open & ~(answered | gone) && hr_now() < limit) {
        for (int i = 0; i < bond->n; i++) {
            if (!bond->rails[i]) continue;
            struct hr_verbs_ep *lane = open >> i & 1 ? ep->lanes[i].ep : NULL;
            if (lane && !(asked >> i & 1) && hr_verbs_send_control(lane, HR_VERBS_REVOKE, serial)) asked |= 1u << i;
            if (lane && hr_verbs_hung_up(lane)) gone |= 1u << i; /* what it answered before is there */
            if (hr_verbs_fetch(bond->rails[i]) >= 0) hr_verbs_quiet_look(bond->rails[i]);
            if (lane && lane->answered == serial) answered |= 1u << i;
            if (lane && lane->state != HR_VERBS_UP) open &= ~(1u << i); /* broken, which is as good */
        }
        if (open & ~(answered | gone)) hr_verbs_quiet_rest(start);
    }
    if (!answered) return HR_ERR_UNSUPPORTED;
    for (int i = 0; i < ep->n; i++)
        if (ep->lanes[i].ep && ep->lanes[i].ep->qp && !(answered >> i & 1))
            hr_verbs_ep_fail(ep->lanes[i].ep, HR_ERR_PEER_LOST, "no answer when memory was taken back", 0);
    return HR_OK;
}
