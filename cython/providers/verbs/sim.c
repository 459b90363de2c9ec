/* sim.c - the simulated device: contexts, completion queues and channels. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "providers/verbs/sim.h"

enum { SIM, SIM2, SIM_RXE, LISTED, TCP = LISTED, DEVICES };
static struct ibv_device devices[DEVICES] = {
    [SIM] = {.node_type = 1, .name = "sim", .dev_name = "sim"},
    [SIM2] = {.node_type = 1, .name = "sim2", .dev_name = "sim2"},
    [SIM_RXE] = {.node_type = 1, .name = "sim_rxe", .dev_name = "sim_rxe"},
    [TCP] = {.node_type = 1, .name = "tcp", .dev_name = "tcp"},
};

static struct ibv_device **get_device_list(int *n_p) {
    struct ibv_device **list = calloc(LISTED + 1, sizeof *list);
    if (!list) return NULL;
    for (int i = 0; i < LISTED; i++) list[i] = &devices[i];
    *n_p = LISTED;
    return list;
}

int hr_verbs_sim_named(const char *name) {
    int i = 0;
    while (i < LISTED && strcmp(devices[i].name, name) != 0) i++;
    return i < LISTED;
}

static void free_device_list(struct ibv_device **list) { free(list); }

/* ---- completion queues ---- */

void sim_cq_push(struct sim_cq *cq, const struct ibv_wc *wc) {
    if (cq->count == cq->cap) {
        cq->overrun = 1; /* a completion is lost: polling says so from now on */
        return;
    }
    cq->ring[(cq->head + cq->count++) % cq->cap] = *wc;
    if (!cq->armed) return;
    cq->armed = 0;
    sim_of(cq->base.context)->armed--;
    if (!cq->base.channel) return;
    cq->events++;
    eventfd_write(cq->base.channel->fd, 1);
}

static int poll_cq(struct ibv_cq *base, int n, struct ibv_wc *wc) {
    struct sim_context *ctx = sim_of(base->context);
    struct sim_cq *cq = (struct sim_cq *)base;
    int found = 0;
    pthread_mutex_lock(&ctx->lock);
    ctx->polled = hr_now();
    if (!cq->count) sim_run(ctx);
    for (; found < n && cq->count; found++, cq->count--) {
        wc[found] = cq->ring[cq->head];
        cq->head = (cq->head + 1) % cq->cap;
    }
    if (cq->overrun && !found) found = -1;
    pthread_mutex_unlock(&ctx->lock);
    return found;
}

/* The thread may sleep through the pause that it leaves to pollers: from now on nobody polls. */
static int req_notify_cq(struct ibv_cq *base, int solicited_only) {
    struct sim_context *ctx = sim_of(base->context);
    struct sim_cq *cq = (struct sim_cq *)base;
    (void)solicited_only;
    pthread_mutex_lock(&ctx->lock);
    if (!cq->armed) {
        cq->armed = 1;
        if (!ctx->armed++) eventfd_write(ctx->kick, 1);
    }
    pthread_mutex_unlock(&ctx->lock);
    return 0;
}

static struct ibv_comp_channel *create_comp_channel(struct ibv_context *ctx) {
    struct sim_channel *channel = calloc(1, sizeof *channel);
    if (!channel) return NULL;
    channel->base.context = ctx;
    channel->base.fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    if (channel->base.fd >= 0) return &channel->base;
    free(channel);
    return NULL;
}

static int destroy_comp_channel(struct ibv_comp_channel *base) {
    struct sim_channel *channel = (struct sim_channel *)base;
    if (channel->cqs) return EBUSY;
    close(base->fd);
    free(channel);
    return 0;
}

static struct ibv_cq *create_cq(struct ibv_context *ctx, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                                int vector) {
    struct sim_cq *cq = NULL;
    (void)vector;
    if (cqe < 1 || cqe > SIM_MAX_CQE) {
        errno = EINVAL;
        return NULL;
    }
    cq = calloc(1, sizeof *cq);
    if (cq) cq->ring = calloc((size_t)cqe, sizeof *cq->ring);
    if (!cq || !cq->ring) {
        free(cq);
        return NULL;
    }
    cq->base.context = ctx;
    cq->base.channel = channel;
    cq->base.cq_context = cq_context;
    cq->base.cqe = cq->cap = cqe;
    if (channel) {
        pthread_mutex_lock(&sim_of(ctx)->lock);
        cq->next = ((struct sim_channel *)channel)->cqs;
        ((struct sim_channel *)channel)->cqs = cq;
        pthread_mutex_unlock(&sim_of(ctx)->lock);
    }
    return &cq->base;
}

static int resize_cq(struct ibv_cq *base, int cqe) {
    struct sim_cq *cq = (struct sim_cq *)base;
    struct ibv_wc *ring;
    int rc = 0;
    if (cqe < 1 || cqe > SIM_MAX_CQE) return EINVAL;
    ring = calloc((size_t)cqe, sizeof *ring);
    if (!ring) return ENOMEM;
    pthread_mutex_lock(&sim_of(base->context)->lock);
    if (cqe < cq->count) {
        rc = EINVAL;
        free(ring);
    } else {
        for (int i = 0; i < cq->count; i++) ring[i] = cq->ring[(cq->head + i) % cq->cap];
        free(cq->ring);
        cq->ring = ring;
        cq->head = 0;
        cq->base.cqe = cq->cap = cqe;
    }
    pthread_mutex_unlock(&sim_of(base->context)->lock);
    return rc;
}

static int destroy_cq(struct ibv_cq *base) {
    struct sim_context *ctx = sim_of(base->context);
    struct sim_cq *cq = (struct sim_cq *)base;
    pthread_mutex_lock(&ctx->lock);
    for (int i = 0; i < SIM_MAX_QP; i++)
        if (ctx->qps[i] && (ctx->qps[i]->base.send_cq == base || ctx->qps[i]->base.recv_cq == base)) {
            pthread_mutex_unlock(&ctx->lock);
            return EBUSY;
        }
    if (cq->armed) ctx->armed--;
    if (base->channel) {
        struct sim_cq **at = &((struct sim_channel *)base->channel)->cqs;
        while (*at != cq) at = &(*at)->next;
        *at = cq->next;
    }
    pthread_mutex_unlock(&ctx->lock);
    free(cq->ring);
    free(cq);
    return 0;
}

static int get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq_p, void **cq_context_p) {
    struct sim_cq *cq;
    eventfd_t one;
    if (eventfd_read(channel->fd, &one)) return -1;
    pthread_mutex_lock(&sim_of(channel->context)->lock);
    for (cq = ((struct sim_channel *)channel)->cqs; cq && !cq->events; cq = cq->next) {}
    if (cq) cq->events--;
    pthread_mutex_unlock(&sim_of(channel->context)->lock);
    if (!cq) {
        errno = EAGAIN; /* it was of a queue that is gone */
        return -1;
    }
    *cq_p = &cq->base;
    *cq_context_p = cq->base.cq_context;
    return 0;
}

static void ack_cq_events(struct ibv_cq *cq, unsigned n) { cq->comp_events_completed += n; }

/* ---- protection domains ---- */

static struct ibv_pd *alloc_pd(struct ibv_context *ctx) {
    struct ibv_pd *pd = calloc(1, sizeof *pd);
    if (pd) pd->context = ctx;
    return pd;
}

static int dealloc_pd(struct ibv_pd *pd) {
    struct sim_context *ctx = sim_of(pd->context);
    int used = 0;
    pthread_mutex_lock(&ctx->lock);
    for (uint32_t i = 0; i < ctx->nmrs; i++) used |= ctx->mrs[i] && ctx->mrs[i]->base.pd == pd;
    for (int i = 0; i < SIM_MAX_QP; i++) used |= ctx->qps[i] && ctx->qps[i]->base.pd == pd;
    for (struct sim_srq *srq = ctx->srqs; srq; srq = srq->next) used |= srq->base.pd == pd;
    pthread_mutex_unlock(&ctx->lock);
    if (used) return EBUSY;
    free(pd);
    return 0;
}

/* ---- contexts ---- */

static struct ibv_context *open_device(struct ibv_device *dev) {
    struct sim_context *ctx = calloc(1, sizeof *ctx);
    if (!ctx) return NULL;
    ctx->base.device = dev;
    ctx->tcp = dev == &devices[TCP];
    ctx->as_soft_roce = dev == &devices[SIM_RXE];
    ctx->base.num_comp_vectors = 1;
    ctx->base.ops.poll_cq = poll_cq;
    ctx->base.ops.req_notify_cq = req_notify_cq;
    ctx->base.ops.post_send = sim_post_send;
    ctx->base.ops.post_recv = sim_post_recv;
    ctx->base.ops.post_srq_recv = sim_post_srq_recv;
    ctx->base.cmd_fd = -1;
    ctx->base.async_fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    ctx->ports = dev == &devices[SIM2] ? SIM_PORTS : 1;
    ctx->ngids = dev == &devices[SIM2] ? SIM_GIDS : 1;
    pthread_mutex_init(&ctx->lock, NULL);
    if (ctx->base.async_fd >= 0 && sim_port_open(ctx) == 0) return &ctx->base;
    if (ctx->base.async_fd >= 0) close(ctx->base.async_fd);
    pthread_mutex_destroy(&ctx->lock);
    free(ctx);
    return NULL;
}

struct ibv_context *hr_verbs_sim_tcp(void) { return open_device(&devices[TCP]); }

static int close_device(struct ibv_context *base) {
    struct sim_context *ctx = sim_of(base);
    sim_port_close(ctx);
    close(base->async_fd);
    pthread_mutex_destroy(&ctx->lock);
    free(ctx->mrs);
    free(ctx->mr_generation);
    free(ctx);
    return 0;
}

static int query_device(struct ibv_context *ctx, struct ibv_device_attr *attr) {
    *attr = (struct ibv_device_attr){.fw_ver = "simulated",
                                     .vendor_id = sim_of(ctx)->as_soft_roce ? SIM_SOFT_ROCE : 0,
                                     .max_mr_size = UINT64_MAX >> 1,
                                     .max_qp = SIM_MAX_QP,
                                     .max_qp_wr = SIM_MAX_WR,
                                     .max_sge = SIM_SGE,
                                     .max_sge_rd = SIM_SGE,
                                     .max_cq = 1 << 16,
                                     .max_cqe = SIM_MAX_CQE,
                                     .max_mr = SIM_MAX_MR,
                                     .max_pd = 1 << 16,
                                     .max_qp_rd_atom = SIM_RD_ATOMIC,
                                     .max_qp_init_rd_atom = SIM_RD_ATOMIC,
                                     .atomic_cap = IBV_ATOMIC_GLOB,
                                     .max_srq = 1 << 16,
                                     .max_srq_wr = SIM_MAX_WR,
                                     .max_srq_sge = SIM_SGE,
                                     .max_pkeys = 1,
                                     .phys_port_cnt = (uint8_t)sim_of(ctx)->ports};
    return 0;
}

static int query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr) {
    if (port < 1 || port > sim_of(ctx)->ports) return EINVAL;
    pthread_mutex_lock(&sim_of(ctx)->lock);
    int down = sim_of(ctx)->down >> port & 1;
    pthread_mutex_unlock(&sim_of(ctx)->lock);
    *attr = (struct ibv_port_attr){.state = down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
                                   .max_mtu = IBV_MTU_4096,
                                   .active_mtu = IBV_MTU_4096,
                                   .gid_tbl_len = sim_of(ctx)->ngids,
                                   .max_msg_sz = SIM_MAX_MSG,
                                   .pkey_tbl_len = 1,
                                   .link_layer = IBV_LINK_LAYER_ETHERNET};
    return 0;
}

static int query_gid(struct ibv_context *ctx, uint8_t port, int index, union ibv_gid *gid) {
    if (port < 1 || port > sim_of(ctx)->ports || index < 0 || index >= sim_of(ctx)->ngids) return EINVAL;
    *gid = sim_of(ctx)->gids[port - 1][index];
    return 0;
}

/* What was told, then queue pairs that have broken. */
static int get_async_event(struct ibv_context *base, struct ibv_async_event *event) {
    struct sim_context *ctx = sim_of(base);
    int i = 0;
    eventfd_t one;
    if (eventfd_read(base->async_fd, &one)) return -1;
    pthread_mutex_lock(&ctx->lock);
    while (i < SIM_MAX_QP && !(ctx->qps[i] && ctx->qps[i]->last == 1)) i++;
    if (ctx->async_head != ctx->async_tail) {
        *event = ctx->async[ctx->async_head++ % SIM_ASYNC];
    } else if (i < SIM_MAX_QP) {
        *event = (struct ibv_async_event){.element.qp = &ctx->qps[i]->base};
        event->event_type = IBV_EVENT_QP_LAST_WQE_REACHED;
        ctx->qps[i]->last = 2;
    } else {
        errno = EAGAIN; /* it was of a queue pair that is gone */
        i = -1;
    }
    pthread_mutex_unlock(&ctx->lock);
    return i < 0 ? -1 : 0;
}

static void tell(struct sim_context *ctx, enum ibv_event_type type, int port) {
    if (ctx->async_tail - ctx->async_head >= SIM_ASYNC)
        return; /* those that nobody fetches are lost, as a device's are */
    ctx->async[ctx->async_tail++ % SIM_ASYNC] = (struct ibv_async_event){.element.port_num = port, .event_type = type};
    eventfd_write(ctx->base.async_fd, 1);
}

void hr_verbs_sim_port(struct ibv_context *base, int port, int up) {
    struct sim_context *ctx = sim_of(base);
    pthread_mutex_lock(&ctx->lock);
    if (up)
        ctx->down &= ~(1u << port);
    else
        ctx->down |= 1u << port;
    for (int i = 0; i < SIM_MAX_QP && !up; i++)
        if (ctx->qps[i] && ctx->qps[i]->attr.port_num == port) sim_hang_up(ctx->qps[i]);
    tell(ctx, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR, port);
    sim_look_again(ctx);
    pthread_mutex_unlock(&ctx->lock);
}

void hr_verbs_sim_remove(struct ibv_context *base) {
    struct sim_context *ctx = sim_of(base);
    pthread_mutex_lock(&ctx->lock);
    tell(ctx, IBV_EVENT_DEVICE_FATAL, 0);
    pthread_mutex_unlock(&ctx->lock);
}

static void ack_async_event(struct ibv_async_event *event) { (void)event; }

const struct hr_verbs_backend hr_verbs_sim = {
    .get_device_list = get_device_list,
    .free_device_list = free_device_list,
    .open_device = open_device,
    .close_device = close_device,
    .query_device = query_device,
    .query_port = query_port,
    .query_gid = query_gid,
    .get_async_event = get_async_event,
    .ack_async_event = ack_async_event,
    .alloc_pd = alloc_pd,
    .dealloc_pd = dealloc_pd,
    .reg_mr = sim_reg_mr,
    .dereg_mr = sim_dereg_mr,
    .create_comp_channel = create_comp_channel,
    .destroy_comp_channel = destroy_comp_channel,
    .create_cq = create_cq,
    .resize_cq = resize_cq,
    .destroy_cq = destroy_cq,
    .get_cq_event = get_cq_event,
    .ack_cq_events = ack_cq_events,
    .create_srq = sim_create_srq,
    .destroy_srq = sim_destroy_srq,
    .create_qp = sim_create_qp,
    .modify_qp = sim_modify_qp,
    .query_qp = sim_query_qp,
    .destroy_qp = sim_destroy_qp,
};
