/* pool.h - receives: their buffers, where the device finds them, and what of them the peers were promised. */
#ifndef HR_VERBS_POOL_H
#define HR_VERBS_POOL_H

/*
 * Endpoints of a domain share the receives of one pool, posted to a shared receive queue, but for the first two. Those,
 * and all where the device has no such queue or the user wants none, have pools of their own, posted to their queue
 * pairs. All else is alike.
 *
 * Room that a peer was told of is a promise. Each member's peer holds `base` from the start, and more, RECVS at most,
 * while it is busy and there is a surplus: receives beyond what all members' bases and control messages need. What it
 * holds above the base is not promised again after use when another has become busy since. At any time
 *
 *     posted >= promised + SPARE * members
 *
 * so that no message ever finds no receive. `posted` is honest: a device takes the receives of a shared queue in the
 * order in which they were posted, and may keep, for ever, those that a queue pair had taken when it broke.
 */

#include <stdint.h>

#include "hr/list.h"
#include "hr/status.h"
#include "providers/verbs/backend.h"

struct hr_verbs_domain;
struct hr_verbs_ep;

struct hr_verbs_buffer {
    uint8_t *bytes;
    uint32_t lkey, at; /* at: how many were posted before it */
};
struct hr_verbs_block { /* registered memory */
    struct hr_verbs_block *next;
    struct ibv_mr *mr;
    uint8_t *bytes;
    size_t len;
};

struct hr_verbs_pool {
    struct hr_verbs_domain *domain;
    struct hr_link link; /* domain.pools */
    struct ibv_srq *srq; /* NULL: of one endpoint, whose queue pair is: */
    struct ibv_qp *qp;
    uint32_t most, base, members, held; /* held: messages that are being looked at; it is there until they were */

    struct hr_verbs_block *blocks;
    struct hr_verbs_buffer *buffers;
    uint32_t total, *unposted, nunposted;

    uint32_t out;         /* buffers that were posted and have not come back */
    uint32_t next, taken; /* counters: of the next one posted; behind the last of those that have come back */
    uint32_t passed;      /* out, and before `taken`: being filled for a queue pair, or kept */
    uint32_t lost;        /* of them those that are kept, as far as can be told */
    uint32_t doubts;      /* queue pairs that broke, and may have kept one not before `taken` */
    uint16_t *doubt;      /* of them those that broke when this one was the last posted; by counter */
    uint32_t mask;

    uint32_t promised, beyond; /* to all members; of that above the base */
    uint32_t turn;             /* of being busy: those of an earlier one hold no more than the base in the long run */
};

/* pool.c */
/* The endpoint gets its pool; it leaves when its queue pair is gone. */
hr_status hr_verbs_pool_join(struct hr_verbs_ep *ep, char why[160]);
void hr_verbs_pool_leave(struct hr_verbs_ep *ep);
/* It has a new queue pair, which may be posted to: its peer is promised the base. */
hr_status hr_verbs_pool_start(struct hr_verbs_ep *ep, char why[160]);
/* Its queue pair is gone, and with it the promise; all that came from it was given back. */
void hr_verbs_pool_stop(struct hr_verbs_ep *ep);
/* A buffer has come back from the device. failed: with an error, so that its queue pair keeps none any more. */
void hr_verbs_pool_back(struct hr_verbs_ep *ep, const struct ibv_wc *wc, int failed);
/* The endpoint may be aborted between these two. 0: it was, and the buffer was seen to. */
struct hr_verbs_pool *hr_verbs_pool_hold(struct hr_verbs_ep *ep);
int hr_verbs_pool_release(struct hr_verbs_ep *ep, struct hr_verbs_pool *pool, const struct ibv_wc *wc);
/* Posts what has come back; returns an errno. */
int hr_verbs_pool_post(struct hr_verbs_pool *pool);
/* A message came that its peer had been promised a receive for. */
void hr_verbs_pool_used(struct hr_verbs_ep *ep);
/* Its peer has run out of room. */
void hr_verbs_pool_hungry(struct hr_verbs_ep *ep);
/* Promises what may be, which is then owed to be told; more: than the base, too. Returns an errno where its peer may be
 * left without room. */
int hr_verbs_pool_promise(struct hr_verbs_ep *ep, int more);
/* Receives that are with the device for certain. */
static inline int32_t hr_verbs_pool_posted(const struct hr_verbs_pool *pool) {
    return (int32_t)(pool->out - pool->lost - pool->doubts);
}

#endif
