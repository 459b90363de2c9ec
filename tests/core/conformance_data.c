/* conformance_data.c - test data, operations and windows of memory for the conformance suite. */

#include "conformance.h"

/* ---- test data ---- */

static uint64_t word(uint64_t seed, size_t i) {
    uint64_t x = seed * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u + 0x94d049bb133111ebu;
    return x ^ x >> 29;
}

void fill(void *buf, size_t len, uint64_t seed) {
    char *at = buf;
    for (size_t i = 0; i < len; i += 8) {
        uint64_t w = word(seed, i / 8);
        memcpy(at + i, &w, len - i < 8 ? len - i : 8);
    }
}

int filled(const void *buf, size_t len, uint64_t seed) {
    const char *at = buf;
    for (size_t i = 0; i < len; i += 8) {
        uint64_t w = word(seed, i / 8);
        size_t n = len - i < 8 ? len - i : 8;
        if (memcmp(at + i, &w, n) == 0) continue;
        if (check_note())
            fprintf(stderr, "%s: wrong data in word %zu of %zu bytes, seed %lld\n", check_current, i / 8, len,
                    (long long)seed);
        return 0;
    }
    return 1;
}

/* ---- operations ---- */

static struct op *ops;

struct op *op_new(size_t cap) {
    struct op *op = calloc(1, sizeof *op);
    REQUIRE(op);
    op->buf = malloc(cap ? cap : 1);
    REQUIRE(op->buf);
    op->cap = cap;
    op->next = ops;
    ops = op;
    return op;
}

void op_free(struct op *op) {
    struct op **at = &ops;
    while (*at != op) at = &(*at)->next;
    *at = op->next;
    free(op->buf);
    free(op);
}

void op_free_all(void) {
    while (ops) op_free(ops);
}

hr_status end_send(struct end *end, size_t len, struct op *op) {
    uint64_t hdr[HR_MAX_HDR / 8], seq = end->next_tx;
    struct hr_msg msg = {.hdr = hdr, .hdr_len = test_hdr_len(seq), .len = len, .cookie = op};
    hr_status status;

    REQUIRE(len <= op->cap && op->state != OP_OPEN);
    hdr[0] = seq << 32 | len;
    fill(hdr + 1, msg.hdr_len - 8, seq);
    fill(op->buf, len, ~seq);
    msg.payload = len ? op->buf : NULL;
    op->state = OP_OPEN; /* before the call, so that a callback from inside it is not taken for a second one */
    status = end->side->domain->ops->post_send(end->ep, &msg);
    memset(hdr, 0xee, sizeof hdr);
    if (status == HR_OK || status == HR_INPROGRESS) end->next_tx++;
    if (status != HR_INPROGRESS) {
        op->state = OP_FREE;
        memset(op->buf, 0xee, len);
    }
    return status;
}

static hr_status finish(struct rig *rig, struct op *op, hr_status status) {
    int64_t end = rig_now() + settings.limit;
    if (status != HR_INPROGRESS) return status;
    while (op->state == OP_OPEN && rig_now() < end) rig_pump(rig);
    CHECK_EQ(op->state, OP_ENDED);
    return op->state == OP_ENDED ? op->status : HR_ERR_TIMEOUT;
}

/* Local memory of an operation, registered where the provider wants that. */
static const struct hr_mem *local_mem(struct end *end, void *addr, size_t len, struct hr_mem *mem) {
    struct hr_domain *domain = end->side->domain;
    if (domain->caps.flags & HR_CAP_ANYMEM || !len) return NULL;
    REQUIRE(domain->ops->mem_register(domain, addr, len, HR_ACCESS_LOCAL, mem) == HR_OK);
    return mem;
}

static void local_done(struct end *end, const struct hr_mem *used, struct hr_mem *mem) {
    if (used) end->side->domain->ops->mem_deregister(end->side->domain, mem);
}

hr_status rma_run(struct rig *rig, struct end *end, enum rma_kind kind, struct hr_rma *rma) {
    const struct hr_provider *ops = end->side->domain->ops;
    struct op *op = op_new(0); /* kept when it does not end: a late done must not hit freed memory */
    int64_t limit = rig_now() + settings.limit;
    struct hr_mem mem;
    hr_status status;

    rma->cookie = op;
    rma->mem = local_mem(end, rma->local, rma->len, &mem);
    for (;;) {
        op->state = OP_OPEN;
        status = kind == RMA_READ ? ops->post_read(end->ep, rma) : ops->post_write(end->ep, rma);
        if (status != HR_AGAIN || rig_now() > limit) break;
        rig_pump(rig);
    }
    status = finish(rig, op, status);
    local_done(end, rma->mem, &mem);
    if (status != HR_ERR_TIMEOUT) op_free(op);
    return status;
}

hr_status atomic_run(struct rig *rig, struct end *end, struct hr_atomic *atomic) {
    const struct hr_provider *ops = end->side->domain->ops;
    struct op *op = op_new(0);
    int64_t limit = rig_now() + settings.limit;
    struct hr_mem mem;
    hr_status status;

    atomic->cookie = op;
    atomic->mem = local_mem(end, atomic->result, sizeof *atomic->result, &mem);
    for (;;) {
        op->state = OP_OPEN;
        status = ops->post_atomic(end->ep, atomic);
        if (status != HR_AGAIN || rig_now() > limit) break;
        rig_pump(rig);
    }
    status = finish(rig, op, status);
    local_done(end, atomic->mem, &mem);
    if (status != HR_ERR_TIMEOUT) op_free(op);
    return status;
}

/* ---- windows ---- */

hr_status share(struct rig *rig, struct end *owner, struct end *peer, const struct hr_mem *reg, void *addr, size_t len,
                struct hr_desc *desc_p, struct hr_rmem *rmem_p) {
    int64_t limit = rig_now() + settings.limit;
    hr_status status;
    memset(desc_p, 0, sizeof *desc_p);
    while ((status = owner->side->domain->ops->mem_export(owner->ep, reg, addr, len, desc_p)) == HR_AGAIN &&
           rig_now() < limit)
        rig_pump(rig);
    if (status != HR_OK) return status;
    while ((status = peer->side->domain->ops->mem_import(peer->ep, desc_p, rmem_p)) == HR_AGAIN && rig_now() < limit)
        rig_pump(rig);
    return status;
}

hr_status window_open(struct rig *rig, struct window *window, struct end *owner, struct end *peer, size_t len,
                      uint32_t access) {
    struct hr_domain *domain = owner->side->domain;
    int writable = (access & (HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_ATOMIC | HR_ACCESS_REMOTE_MAP)) != 0;
    hr_status status;

    memset(window, 0, sizeof *window);
    window->mem = hr_arena_alloc(len, writable ? HR_ARENA_WRITABLE_BY_PEERS : 0);
    REQUIRE(window->mem);
    window->len = len;
    window->owner = owner;
    window->peer = peer;
    REQUIRE(domain->ops->mem_register(domain, window->mem, len, access, &window->reg) == HR_OK);
    CHECK(window->reg.addr == window->mem);
    CHECK_EQ(window->reg.len, len);
    status = share(rig, owner, peer, &window->reg, window->mem, len, &window->desc, &window->rmem);
    if (status == HR_OK) {
        CHECK_EQ(window->rmem.len, len);
        return HR_OK;
    }
    domain->ops->mem_deregister(domain, &window->reg);
    hr_arena_free(window->mem);
    window->mem = NULL;
    return status;
}

/* Imports of an aborted endpoint ended with it. The owner may have deregistered already (reg.addr NULL). */
void window_close(struct window *window) {
    if (!window->mem) return;
    if (window->peer->ep && !window->peer->aborted)
        window->peer->side->domain->ops->mem_release(window->peer->ep, &window->rmem);
    if (window->reg.addr) window->owner->side->domain->ops->mem_deregister(window->owner->side->domain, &window->reg);
    hr_arena_free(window->mem);
    window->mem = NULL;
}
