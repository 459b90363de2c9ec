/* backend.h - the verbs that this provider calls: a table, filled by libibverbs or by the simulated device. */
#ifndef HR_VERBS_BACKEND_H
#define HR_VERBS_BACKEND_H

/* Signatures and results are those of libibverbs: NULL or -1 with errno, or an errno. The data path (post_send,
 * post_recv, poll_cq, req_notify_cq) goes through the context's own table, see abi.h. */

#include "providers/verbs/abi.h"

#define HR_VERBS_BACKEND_CALLS(X)                                                                              \
    X(struct ibv_device **, get_device_list, (int *n_p))                                                       \
    X(void, free_device_list, (struct ibv_device * *list))                                                     \
    X(struct ibv_context *, open_device, (struct ibv_device * device))                                         \
    X(int, close_device, (struct ibv_context * ctx))                                                           \
    X(int, query_device, (struct ibv_context * ctx, struct ibv_device_attr * attr))                            \
    X(int, query_port, (struct ibv_context * ctx, uint8_t port, struct ibv_port_attr *attr))                   \
    X(int, query_gid, (struct ibv_context * ctx, uint8_t port, int index, union ibv_gid *gid))                 \
    X(int, get_async_event, (struct ibv_context * ctx, struct ibv_async_event * event))                        \
    X(void, ack_async_event, (struct ibv_async_event * event))                                                 \
    X(struct ibv_pd *, alloc_pd, (struct ibv_context * ctx))                                                   \
    X(int, dealloc_pd, (struct ibv_pd * pd))                                                                   \
    X(struct ibv_mr *, reg_mr, (struct ibv_pd * pd, void *addr, size_t len, int access))                       \
    X(int, dereg_mr, (struct ibv_mr * mr))                                                                     \
    X(struct ibv_comp_channel *, create_comp_channel, (struct ibv_context * ctx))                              \
    X(int, destroy_comp_channel, (struct ibv_comp_channel * channel))                                          \
    X(struct ibv_cq *, create_cq,                                                                              \
      (struct ibv_context * ctx, int cqe, void *cq_context, struct ibv_comp_channel *channel, int vector))     \
    X(int, resize_cq, (struct ibv_cq * cq, int cqe))                                                           \
    X(int, destroy_cq, (struct ibv_cq * cq))                                                                   \
    X(int, get_cq_event, (struct ibv_comp_channel * channel, struct ibv_cq * *cq, void **cq_context))          \
    X(void, ack_cq_events, (struct ibv_cq * cq, unsigned n))                                                   \
    X(struct ibv_srq *, create_srq, (struct ibv_pd * pd, struct ibv_srq_init_attr * attr))                     \
    X(int, destroy_srq, (struct ibv_srq * srq))                                                                \
    X(struct ibv_qp *, create_qp, (struct ibv_pd * pd, struct ibv_qp_init_attr * attr))                        \
    X(int, modify_qp, (struct ibv_qp * qp, struct ibv_qp_attr * attr, int mask))                               \
    X(int, query_qp, (struct ibv_qp * qp, struct ibv_qp_attr * attr, int mask, struct ibv_qp_init_attr *init)) \
    X(int, destroy_qp, (struct ibv_qp * qp))

#define HR_VERBS_MEMBER(type, name, args) type(*name) args;
struct hr_verbs_backend {
    HR_VERBS_BACKEND_CALLS(HR_VERBS_MEMBER)
};

/* libibverbs, opened when first asked for and kept; NULL with a static text that says what is missing. Any thread. */
const struct hr_verbs_backend *hr_verbs_lib(const char **why_p);

/* Whether memory may stay registered across a fork: the kernel gives the child a copy of pages that a device has, or
 * there is no such device. Where it does not, a write of the parent would move it to other pages than the device's. */
int hr_verbs_fork_safe(const struct hr_verbs_backend *verbs);

/* What queue pairs are brought up with. 4.096 us * 2^14 until the first retry, then 6 more: half a second of silence,
 * at least (qp.c). */
enum {
    HR_VERBS_ACK_TIMEOUT = 14,
    HR_VERBS_RETRIES = 6,
    HR_VERBS_ENDLESS = 7, /* for soft-RoCE */
    HR_VERBS_RNR_TIMER = 12,
    HR_VERBS_HOPS = 64,
    HR_VERBS_READS = 16 /* reads under way at a time, in either direction */
};
/* So long retries last, at least, where others count a peer lost after that silence. */
#define HR_VERBS_OUTLASTS(silence) ((silence) + (silence) * 2 / 5)

/* Index of the wanted GID, or of the best where that is -1; -1: there is none. */
int hr_verbs_gid_choose(const struct hr_verbs_backend *verbs, struct ibv_context *ctx, uint8_t port, int entries,
                        int wanted, union ibv_gid *gid_p);
/* What a completion's status means, in words. */
const char *hr_verbs_wc_text(enum ibv_wc_status status);

/* The simulated devices; see sim.h. */
extern const struct hr_verbs_backend hr_verbs_sim;
int hr_verbs_sim_named(const char *name);

#endif
