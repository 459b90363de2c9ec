/* ledger.c - how a receiver that reads a sender's memory knows that the sender has not taken it back meanwhile. */

/*
 * A peer that pulls from mapped memory cannot be stopped, and a buffer whose send was withdrawn is its owner's again at
 * once. So each engine keeps a table in memory that its peers map: at the index of every transfer that it offers stands
 * the offer's key, until it is over. The receiver looks there after it has read the last byte. The key still stands:
 * every byte was read before the owner could change it. It does not: what was read is worthless, and a CANCEL is on its
 * way. The table's descriptor goes to a peer before the first offer; transfers beyond its end are not offered for
 * pulling.
 *
 * Who writes back (HR_HDR_OPEN) takes hold of the entry for each piece; after the last it is FIN that ends it. The
 * owner strikes what nobody holds, and waits for who does: a piece is a fraction of a millisecond. If that is not
 * enough the peer was stopped with the piece in its hands, and the owner leaves it the pages, or takes away from its
 * kernel where to write (mem_quiet). It may go on at any time, and look for its entry: so no key is ever used again, by
 * whatever engine of this process.
 */

#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "core/engine.h"
#include "hr/clock.h"
#include "hr/line.h"
#include "hr/memory.h"

#define ENTRIES 4096
#define BYTES (ENTRIES * sizeof(uint64_t))
#define HELD 1ull
#define TAKEN 1          /* from this bit on: how many pieces (share.c) */
#define KEY 16           /* from this bit on */
#define PATIENCE 5000000 /* ns: a peer that shares this core has its turn meanwhile */

static int ledger_open(struct hr_engine *engine) {
    if (engine->ledger) return 1;
    engine->ledger = hr_arena_alloc(BYTES, HR_ARENA_SMALL_PAGES | HR_ARENA_WRITABLE_BY_PEERS);
    if (engine->ledger) memset((void *)engine->ledger, 0, BYTES);
    return engine->ledger != NULL;
}

void hr_ledger_close(struct hr_engine *engine) { hr_arena_free((void *)engine->ledger); }

static hr_status ledger_export(struct hr_conn *conn, struct hr_desc *desc_p) {
    struct hr_ep *ep = conn->lanes[0].ep;
    const struct hr_provider *ops = ep->domain->ops;
    if (!ledger_open(conn->engine)) return HR_ERR_NOMEM;
    if (!conn->has_ledger) {
        hr_status status = ops->mem_register(ep->domain, (void *)conn->engine->ledger, BYTES,
                                             HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_MAP, &conn->ledger_mem);
        if (status != HR_OK) return status;
        conn->has_ledger = 1;
    }
    return ops->mem_export(ep, &conn->ledger_mem, (void *)conn->engine->ledger, BYTES, desc_p);
}

/* HR_OK: the peer knows the table. HR_AGAIN: no room now. An error: nothing can be offered to it. */
static hr_status ledger_show(struct hr_conn *conn) {
    struct hr_hdr_long m = {.h = {.kind = HR_MSG_LEDGER}, .size = BYTES};
    if (conn->ledger_shown) return HR_OK;
    hr_status status = ledger_export(conn, &m.desc);
    if (status == HR_OK) status = hr_conn_post(conn, &m.h, sizeof m, NULL, 0, NULL);
    if (status == HR_INPROGRESS) status = HR_OK;
    conn->ledger_shown = status == HR_OK;
    return status;
}

hr_status hr_ledger_enter(struct hr_xfer *x) {
    static _Atomic uint64_t last;
    if (HR_ID_INDEX(x->id) >= ENTRIES) return HR_ERR_UNSUPPORTED;
    hr_status status = ledger_show(x->conn);
    if (status != HR_OK) return status;
    x->key = atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1;
    atomic_store_explicit(&x->conn->engine->ledger[HR_ID_INDEX(x->id)], x->key << KEY, memory_order_release);
    return HR_OK;
}

static int is(uint64_t entry, const struct hr_xfer *x) { return entry >> KEY == x->key; }

/* What nobody holds is struck; who holds it has PATIENCE to let go. A peer that keeps changing it is no friend. */
static int strike(_Atomic uint64_t *entry, const struct hr_xfer *x) {
    uint64_t found = atomic_load_explicit(entry, memory_order_relaxed);
    int64_t deadline = 0;
    for (int tries = 0; is(found, x) && tries < 1000;) {
        int held = (found & HELD) != 0, waits = held && !x->conn->stopped;
        if (waits && !deadline) deadline = hr_now() + PATIENCE;
        if (waits && hr_now() < deadline) {
            sched_yield();
            found = atomic_load_explicit(entry, memory_order_relaxed);
            continue;
        }
        if (held) x->conn->stopped = 1; /* one wait is enough */
        if (atomic_compare_exchange_strong(entry, &found, 0)) return !held;
        tries++;
    }
    return !is(found, x);
}

/* Peers map the whole table: of an entry that is the owner's alone to end, another value is somebody's meddling. */
static int meddled(const struct hr_xfer *x, const _Atomic uint64_t *entry) {
    return x->open && !is(atomic_load_explicit(entry, memory_order_relaxed), x);
}

/* Counts up what is taken, of so many: what was there before; -1: nothing is left, or it does not stand. */
static int64_t take(_Atomic uint64_t *entry, const struct hr_xfer *x, uint32_t n, uint64_t held) {
    uint64_t found = atomic_load_explicit(entry, memory_order_relaxed);
    while (is(found, x)) {
        uint64_t taken = (found & ((1ull << KEY) - 1)) >> TAKEN;
        if (taken >= n) return -1;
        if (atomic_compare_exchange_strong(entry, &found, (found + (1ull << TAKEN)) | held)) return (int64_t)taken;
    }
    return -1;
}

static _Atomic uint64_t *own(const struct hr_xfer *x) { return &x->conn->engine->ledger[HR_ID_INDEX(x->id)]; }

static int offered(const struct hr_xfer *x) { return x->key && x->mode < HR_XFER_PULL; }

/* Comes before all else that ends an offer: its memory may be revoked, and its owner may write there, which nobody is
 * to see before this. The entry is not looked at first: the peer had the line last, and a store waits for nobody. */
void hr_ledger_strike(struct hr_xfer *x) {
    if (!offered(x)) return;
    atomic_store_explicit(own(x), 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
}

int hr_ledger_take_back(struct hr_xfer *x) {
    int free = !offered(x) || (!meddled(x, own(x)) && strike(own(x), x));
    atomic_thread_fence(memory_order_acq_rel);
    return free;
}

int64_t hr_ledger_take_own(struct hr_xfer *x, uint32_t n) { return take(own(x), x, n, HELD); }

void hr_ledger_let_go_own(struct hr_xfer *x) {
    atomic_fetch_and(own(x), ~HELD); /* a receiver that has struck it left 0 */
}

int hr_ledger_stands_own(const struct hr_xfer *x) { return is(atomic_load(own(x)), x); }

void hr_ledger_arrived(struct hr_conn *conn, const struct hr_hdr_long *m) {
    struct hr_ep *ep = conn->lanes[0].ep;
    hr_status status = conn->peer_ledger.len ? HR_ERR_PROTOCOL : HR_OK; /* one is enough */
    if (status == HR_OK) status = ep->domain->ops->mem_import(ep, &m->desc, &conn->peer_ledger);
    if (status != HR_OK || conn->peer_ledger.len < BYTES || (uintptr_t)conn->peer_ledger.ptr % sizeof(uint64_t))
        hr_conn_no_import(conn, status, "a ledger that cannot be read");
}

int hr_ledger_covers(const struct hr_xfer *x) { return x->conn->peer_ledger.ptr && HR_ID_INDEX(x->remote) < ENTRIES; }

int hr_ledger_stands(const struct hr_xfer *x) {
    if (!hr_ledger_covers(x)) return 1;        /* read from memory that is revoked when it is taken back */
    atomic_thread_fence(memory_order_acquire); /* the bytes first */
    const _Atomic uint64_t *entries = x->conn->peer_ledger.ptr;
    return is(atomic_load_explicit(&entries[HR_ID_INDEX(x->remote)], memory_order_relaxed), x);
}

static _Atomic uint64_t *theirs(const struct hr_xfer *x) {
    return (_Atomic uint64_t *)x->conn->peer_ledger.out + HR_ID_INDEX(x->remote);
}

/* Each end had the line last when the other wants it: it is asked for as soon as the message shows that it will be. */
void hr_ledger_claim(struct hr_conn *conn, uint32_t id, int own) {
    const uint64_t *entries = (const uint64_t *)(own ? (void *)conn->engine->ledger : conn->peer_ledger.out);
    if (entries && HR_ID_INDEX(id) < ENTRIES) hr_claim(&entries[HR_ID_INDEX(id)]);
}

int hr_ledger_hold(struct hr_xfer *x) {
    uint64_t stands = x->key << KEY, held = stands | HELD;
    return atomic_compare_exchange_strong(theirs(x), &stands, held) || stands == held;
}

void hr_ledger_let_go(struct hr_xfer *x) {
    uint64_t stands = x->key << KEY, held = stands | HELD; /* unless it was struck meanwhile */
    atomic_compare_exchange_strong(theirs(x), &held, stands);
}

int64_t hr_ledger_take(struct hr_xfer *x, uint32_t n) { return take(theirs(x), x, n, 0); }

int hr_ledger_revoke(struct hr_xfer *x) {
    int free = strike(theirs(x), x);
    atomic_thread_fence(memory_order_acq_rel);
    return free;
}

void hr_ledger_forget(struct hr_conn *conn) {
    struct hr_ep *ep = conn->lanes[0].ep;
    if (conn->peer_ledger.len) ep->domain->ops->mem_release(ep, &conn->peer_ledger);
    if (conn->has_ledger) ep->domain->ops->mem_deregister(ep->domain, &conn->ledger_mem);
    conn->peer_ledger.len = 0;
    conn->has_ledger = 0;
}
