/* inject.h - faults at the level of the verbs: between the provider and its device. */
#ifndef HR_VERBS_INJECT_H
#define HR_VERBS_INJECT_H

/*
 *   wc_error=P   a completion's status is rewritten to an error, and the queue pair goes to its error state
 *   wc_status=S  which: retry (default), rnr, access, flush, local, fatal
 *   errno=P      posting fails with ENOMEM: the device's queue is full for a moment
 *   reg_errno=P  registering memory fails with ENOMEM, as beyond the memlock limit
 *   deaf=N       the first N pairs of GIDs that a connection is tried on carry nothing
 *   narrow=N     the N pairs after them carry small packets only
 *   fault_seed=N, fault_budget=N (of wc_error, errno, reg_errno)
 *
 * Each queue pair has a generator of its own, so what hits its n-th completion depends on the seed, the peers and n.
 * The provider asks here where it meets the device, so the same faults come with every device.
 */

#include <stdint.h>

#include "hr/status.h"
#include "providers/verbs/abi.h"

struct hr_verbs_inject {
    double wc_error, post_error, reg_error;
    enum ibv_wc_status status;
    uint64_t seed, budget;
    uint64_t deaf, narrow;
    uint64_t completions, posts, registrations, tries; /* injected so far */
    uint64_t registered;                               /* whether they were hit or not */
};

struct hr_verbs_inject_ep {
    uint64_t random;
};

/* 1: it was ours; 0: not; -1: ours and wrong, detail says how. */
int hr_verbs_inject_option(struct hr_verbs_inject *inject, const char *key, const char *value, char detail[256]);
void hr_verbs_inject_start(const struct hr_verbs_inject *inject, struct hr_verbs_inject_ep *ep, uint64_t self,
                           uint64_t peer, uint32_t stream);
/* Whether this completion becomes an error; rewrites it. */
int hr_verbs_inject_wc(struct hr_verbs_inject *inject, struct hr_verbs_inject_ep *ep, struct ibv_wc *wc);
/* Whether a greeting on this pair of GIDs gets no answer. */
int hr_verbs_inject_try(struct hr_verbs_inject *inject, int turn, int greeting);
/* The errno with which registering fails, or 0. */
int hr_verbs_inject_register(struct hr_verbs_inject *inject);
/* The errno with which posting fails, or 0. */
int hr_verbs_inject_post(struct hr_verbs_inject *inject, struct hr_verbs_inject_ep *ep);

#endif
