/* sim_mem.c - memory of the simulated device: regions and their keys, copies. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "providers/verbs/sim.h"

/* Device "tcp" has its regions in the order of their keys, none of which is given twice: a peer may know memory by it.
 * Returns where the key is, or would be. */
static uint32_t mr_place(const struct sim_context *ctx, uint32_t key) {
    uint32_t low = 0, high = ctx->nmrs;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (ctx->mrs[mid]->base.lkey < key)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static int mr_add_last(struct sim_context *ctx, struct sim_mr *mr) {
    if (ctx->nmrs == ctx->mrs_cap) {
        uint32_t cap = ctx->mrs_cap ? 2 * ctx->mrs_cap : 16;
        struct sim_mr **mrs = realloc(ctx->mrs, cap * sizeof *mrs);
        if (!mrs) return ENOMEM;
        ctx->mrs = mrs;
        ctx->mrs_cap = cap;
    }
    if (ctx->next_key == UINT32_MAX) return ENOMEM;
    mr->base.lkey = mr->base.rkey = ++ctx->next_key;
    ctx->mrs[ctx->nmrs++] = mr;
    return 0;
}

/* A key is index and generation, as on hardware: 8 bits of it tell a key from its predecessors. */
static int mr_add(struct sim_context *ctx, struct sim_mr *mr) {
    uint32_t i = 0;
    while (i < ctx->nmrs && ctx->mrs[i]) i++;
    if (i == SIM_MAX_MR) return ENOMEM;
    if (i == ctx->nmrs) {
        uint32_t n = i ? 2 * i : 16;
        struct sim_mr **mrs = realloc(ctx->mrs, n * sizeof *mrs);
        if (mrs) ctx->mrs = mrs;
        uint8_t *generation = realloc(ctx->mr_generation, n);
        if (generation) ctx->mr_generation = generation;
        if (!mrs || !generation) return ENOMEM;
        memset(mrs + i, 0, (n - i) * sizeof *mrs);
        memset(generation + i, 0, n - i);
        ctx->nmrs = n;
    }
    mr->base.lkey = mr->base.rkey = (i + 1) << 8 | ++ctx->mr_generation[i];
    ctx->mrs[i] = mr;
    return 0;
}

struct ibv_mr *sim_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access) {
    struct sim_context *ctx = sim_of(pd->context);
    struct sim_mr *mr;
    int rc;
    if ((access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) && !(access & IBV_ACCESS_LOCAL_WRITE)) {
        errno = EINVAL;
        return NULL;
    }
    mr = calloc(1, sizeof *mr);
    if (!mr) return NULL;
    mr->base = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = addr, .length = len};
    mr->access = access;
    pthread_mutex_lock(&ctx->lock);
    rc = ctx->tcp ? mr_add_last(ctx, mr) : mr_add(ctx, mr);
    pthread_mutex_unlock(&ctx->lock);
    if (!rc) return &mr->base;
    free(mr);
    errno = rc;
    return NULL;
}

int sim_dereg_mr(struct ibv_mr *mr) {
    struct sim_context *ctx = sim_of(mr->context);
    pthread_mutex_lock(&ctx->lock);
    if (ctx->tcp) {
        uint32_t i = mr_place(ctx, mr->lkey);
        memmove(ctx->mrs + i, ctx->mrs + i + 1, (--ctx->nmrs - i) * sizeof *ctx->mrs);
    } else {
        ctx->mrs[(mr->lkey >> 8) - 1] = NULL;
    }
    pthread_mutex_unlock(&ctx->lock);
    free(mr);
    return 0;
}

struct sim_mr *sim_mr_find(struct sim_context *ctx, struct ibv_pd *pd, uint32_t key) {
    uint32_t i = ctx->tcp ? mr_place(ctx, key) : (key >> 8) - 1;
    struct sim_mr *mr = i < ctx->nmrs ? ctx->mrs[i] : NULL;
    return mr && mr->base.lkey == key && mr->base.pd == pd ? mr : NULL;
}

int sim_mr_allows(struct sim_context *ctx, struct ibv_pd *pd, uint32_t key, uint64_t addr, uint64_t len, int access) {
    struct sim_mr *mr = sim_mr_find(ctx, pd, key);
    if (!mr || (mr->access & access) != access) return 0;
    uint64_t offset = addr - (uintptr_t)mr->base.addr; /* wraps to something huge when addr lies before it */
    return offset <= mr->base.length && len <= mr->base.length - offset;
}

#ifdef __SANITIZE_THREAD__
typedef uint64_t __attribute__((aligned(1), may_alias)) word;
__attribute__((no_sanitize("thread"))) int sim_dma(struct sim_context *ctx, void *to, const void *from, size_t len) {
    const size_t words = len / 8;
    (void)ctx;
    for (size_t i = 0; i < words; i++) ((volatile word *)to)[i] = ((const volatile word *)from)[i];
    for (size_t i = words * 8; i < len; i++) ((volatile uint8_t *)to)[i] = ((const volatile uint8_t *)from)[i];
    return 1;
}
#else
int sim_dma(struct sim_context *ctx, void *to, const void *from, size_t len) {
    if (ctx->tcp) return sim_touch(to, from, len);
    memcpy(to, from, len);
    return 1;
}
#endif

/* Visits the pieces of [offset, offset+len) in a list of segments. */
static enum ibv_wc_status pieces(struct sim_qp *qp, const struct ibv_sge *sge, int n, uint64_t offset, uint8_t *bytes,
                                 size_t len, int in) {
    struct sim_context *ctx = sim_of(qp->base.context);
    for (int i = 0; i < n && len; i++) {
        if (offset >= sge[i].length) {
            offset -= sge[i].length;
            continue;
        }
        size_t part = sge[i].length - offset < len ? (size_t)(sge[i].length - offset) : len;
        uint64_t at = sge[i].addr + offset;
        if (ctx->as_soft_roce && !sim_mr_find(ctx, qp->base.pd, sge[i].lkey)) return IBV_WC_LOC_QP_OP_ERR;
        if (!sim_mr_allows(ctx, qp->base.pd, sge[i].lkey, at, part, in ? IBV_ACCESS_LOCAL_WRITE : 0) ||
            !sim_dma(ctx, in ? (void *)(uintptr_t)at : bytes, in ? bytes : (const void *)(uintptr_t)at, part))
            return IBV_WC_LOC_PROT_ERR;
        bytes += part;
        len -= part;
        offset = 0;
    }
    return len ? IBV_WC_LOC_PROT_ERR : IBV_WC_SUCCESS;
}

enum ibv_wc_status sim_gather(struct sim_qp *qp, const struct ibv_sge *sge, int n, uint64_t offset, void *to,
                              size_t len) {
    return pieces(qp, sge, n, offset, to, len, 0);
}

int sim_scatter(struct sim_qp *qp, const struct ibv_sge *sge, int n, uint64_t offset, const void *from, size_t len) {
    return pieces(qp, sge, n, offset, (uint8_t *)(uintptr_t)from, len, 1) == IBV_WC_SUCCESS;
}
