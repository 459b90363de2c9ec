/* comm.c - communicators: a set of peers with a name of its own on the wire, that works until one of them is lost. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/engine.h"

struct hr_comm *hr_comm_find(struct hr_engine *engine, uint64_t id) {
    for (struct hr_link *l = engine->comms.next; l != &engine->comms; l = l->next) {
        struct hr_comm *comm = hr_container(l, struct hr_comm, link);
        if (comm->id == id) return comm;
    }
    return NULL;
}

/* --- ids that are over: their late frames are dropped
 * ------------------------------------------------------------------ */

static uint64_t *retired_slot(uint64_t *table, uint32_t cap, uint64_t id) {
    uint32_t i = (uint32_t)((id * 0x9e3779b97f4a7c15ull) >> 32) & (cap - 1);
    while (table[i] && table[i] != id) i = (i + 1) & (cap - 1);
    return &table[i];
}

int hr_comm_retired(struct hr_engine *engine, uint64_t id) {
    return engine->retired_cap && *retired_slot(engine->retired, engine->retired_cap, id) == id;
}

static void retire(struct hr_engine *engine, uint64_t id) {
    if (engine->nretired * 2 >= engine->retired_cap) {
        uint32_t cap = engine->retired_cap ? engine->retired_cap * 2 : 64;
        uint64_t *table = calloc(cap, sizeof *table);
        if (!table) return; /* late frames then lie unmatched, bounded by credit */
        for (uint32_t i = 0; i < engine->retired_cap; i++)
            if (engine->retired[i]) *retired_slot(table, cap, engine->retired[i]) = engine->retired[i];
        free(engine->retired);
        engine->retired = table;
        engine->retired_cap = cap;
    }
    uint64_t *slot = retired_slot(engine->retired, engine->retired_cap, id);
    if (*slot != id) {
        *slot = id;
        engine->nretired++;
    }
}

/* -------------------------------------------------------------------------------------------------------------------------
 */

int hr_comm_rank_of(struct hr_comm *comm, struct hr_conn *conn) {
    return conn->index < comm->nranks ? comm->ranks[conn->index] : -1;
}

static struct hr_conn *way_to(struct hr_engine *engine, uint64_t peer, uint32_t channel) {
    struct hr_conn *conn = channel ? hr_conn_find(engine, peer, channel) : NULL;
    return conn ? conn : hr_conn_find(engine, peer, 0);
}

hr_status hr_comm_open(struct hr_engine *engine, uint64_t id, const uint64_t *peers, int size, int rank,
                       struct hr_comm **comm_p) {
    return hr_comm_open_classed(engine, id, peers, size, rank, HR_NO_CLASS, comm_p);
}

hr_status hr_comm_open_classed(struct hr_engine *engine, uint64_t id, const uint64_t *peers, int size, int rank,
                               int dscp, struct hr_comm **comm_p) {
    hr_status status = HR_ERR_NOMEM;
    if (dscp < HR_NO_CLASS || dscp > 63) return HR_ERR_INVALID;
    if (size < 1 || rank < 0 || rank >= size || peers[rank] != engine->config.self_id || !id) return HR_ERR_INVALID;
    hr_lock(engine);
    struct hr_comm *comm = calloc(1, sizeof *comm);
    if (hr_comm_find(engine, id) || hr_comm_retired(engine, id)) {
        status = HR_ERR_INVALID;
        goto fail;
    }
    if (!comm || !(comm->conns = calloc((size_t)size, sizeof *comm->conns)) ||
        !(comm->ranks = malloc(engine->nconns * sizeof(int))))
        goto fail;
    comm->engine = engine;
    comm->id = id;
    comm->size = size;
    comm->rank = rank;
    if ((status = hr_onesided_open(comm)) != HR_OK) goto fail;
    comm->nranks = engine->nconns;
    comm->state.peer = -1;
    comm->state.sequence = -1;
    hr_list_init(&comm->runs);
    hr_list_init(&comm->strays);
    for (uint32_t i = 0; i < comm->nranks; i++) comm->ranks[i] = -1;
    for (int i = 0; i < size; i++) {
        comm->conns[i] = way_to(engine, peers[i], HR_CHANNEL(dscp));
        if (!comm->conns[i]) {
            status = HR_ERR_INVALID;
            goto fail;
        }
        comm->ranks[comm->conns[i]->index] = i;
    }
    hr_list_push(&engine->comms, &comm->link);
    for (int i = 0; i < size; i++) {
        struct hr_conn *conn = comm->conns[i];
        if (conn->state == HR_CONN_CLOSED || conn->was_closed)
            comm->nclosed++;
        else if (conn->state == HR_CONN_LOST)
            hr_comm_break_locked(comm, conn->why, i, HR_PHASE_CONNECT, conn->provider ? conn->provider->name : NULL,
                                 conn->detail, 1);
    }
    hr_match_take_break(comm);
    hr_settle(engine);
    hr_unlock(engine);
    *comm_p = comm;
    return HR_OK;
fail:
    if (comm) {
        free(comm->conns);
        free(comm->ranks);
        free(comm->notes);
    }
    free(comm);
    hr_unlock(engine);
    return status;
}

/* Everybody who waits on it hears. Members hear too, and pass it on once: whoever began may have reached only some. */
void hr_comm_break_locked(struct hr_comm *comm, hr_status status, int peer, int phase, const char *provider,
                          const char *detail, int tell) {
    struct hr_engine *engine = comm->engine;
    if (comm->state.status != HR_OK) return;
    comm->state.status = status;
    comm->state.peer = peer;
    comm->state.phase = phase;
    comm->state.provider = provider;
    snprintf(comm->state.detail, sizeof comm->state.detail, "%s", detail ? detail : "");
    if (tell) {
        /* a deadline of ours is no loss to the others: to them this rank has broken it */
        int own = status == HR_ERR_TIMEOUT || status == HR_ERR_CANCELED || hr_is_device_error(status);
        struct hr_hdr h = {.kind = HR_MSG_BREAK,
                           .flags = (uint8_t)phase,
                           .status = (int8_t)(own ? HR_ERR_BROKEN : status),
                           .bucket = (uint8_t)(int8_t)(own ? status : comm->state.cause),
                           .aux = (uint64_t)comm->state.sequence,
                           .comm = comm->id,
                           .tag = (uint64_t)(int64_t)(own ? comm->rank : peer)};
        for (int i = 0; i < comm->size; i++)
            if (i != comm->rank) {
                struct hr_hdr copy = h;
                hr_conn_send_ctl(comm->conns[i], &copy, sizeof copy);
            }
    }
    hr_runs_fail(comm);
    while (comm->pending) hr_abort_request(engine, comm->pending, status, peer, phase, NULL);
    hr_runs_end(comm);
    /* nobody can receive here any more: what came and what still comes must not hold credit that others need */
    retire(engine, comm->id);
    hr_match_purge_comm(engine, comm->id);
}

/* A member says so. */
void hr_comm_on_break(struct hr_comm *comm, struct hr_conn *conn, const struct hr_hdr *h) {
    int64_t blame = (int64_t)h->tag;
    hr_status status = h->status < 0 ? h->status : HR_ERR_BROKEN;
    char detail[sizeof comm->state.detail];
    if (hr_comm_rank_of(comm, conn) < 0 || blame < -1 || blame >= comm->size) {
        hr_conn_lost(conn, HR_ERR_PROTOCOL, "a break of what it is no member of, or that names no member");
        return;
    }
    if (comm->state.status == HR_OK) {
        comm->state.cause = (int8_t)h->bucket;
        comm->state.sequence = (int64_t)h->aux;
    }
    if (status == HR_ERR_BROKEN)
        snprintf(detail, sizeof detail, "rank %d ended a call before it was complete (deadline, interrupt, device)",
                 (int)blame);
    else
        snprintf(detail, sizeof detail, "rank %d says so", hr_comm_rank_of(comm, conn));
    hr_comm_break_locked(comm, status, (int)blame, h->flags, conn->provider->name, detail, 1);
}

void hr_comm_give_up(struct hr_comm *comm, hr_status status, uint64_t sequence) {
    if (comm->state.status == HR_OK) comm->state.sequence = (int64_t)sequence;
    hr_comm_break_locked(comm, status, comm->rank, HR_PHASE_TRANSFER, NULL, NULL, 1);
}

void hr_comm_break(struct hr_comm *comm, hr_status status, int peer, enum hr_phase phase, const char *detail,
                   int tell) {
    struct hr_engine *engine = comm->engine;
    hr_lock(engine);
    hr_comm_break_locked(comm, status, peer, phase, NULL, detail, tell);
    hr_settle(engine);
    hr_unlock(engine);
}

void hr_comm_state(struct hr_comm *comm, struct hr_comm_state *state_p) {
    hr_lock(comm->engine);
    *state_p = comm->state;
    hr_unlock(comm->engine);
}

void hr_comm_free(struct hr_comm *comm) {
    hr_onesided_close(comm);
    hr_list_remove(&comm->link);
    free(comm->conns);
    free(comm->ranks);
    free(comm);
}

void hr_comm_close(struct hr_comm *comm) {
    struct hr_engine *engine = comm->engine;
    hr_lock(engine);
    hr_comm_break_locked(comm, HR_ERR_BROKEN, comm->rank, HR_PHASE_CLOSE, NULL, "closed", 0);
    hr_comm_free(comm);
    hr_settle(engine);
    hr_unlock(engine);
}
