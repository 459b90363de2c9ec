/* ways.c - what was fastest when it was tried.
 *
 * How a processor gets the most out of far memory differs from one to the next, by a tenth and more: so many pages side
 * by side, as it fetches ahead within a page; or one, and what comes is asked for (1, of what goes to two places).
 * Pieces of work are long and many. So the first ones of a kind go by each way in turn, then all by the one whose
 * median was best, and after some thousand, as other work on the machine changes, it is tried anew. The results are the
 * same whichever is taken. Threads that come together may spoil one another's trial, and nothing else.
 */
#include "ways.h"

#include "hr/clock.h"

enum { COPY, SUM, SUM_IN_PLACE, SUM_BACK, KINDS }; /* and as many of 16-bit floating types */
enum { WAYS = 3, TRIALS = 7, KEPT = 4096 };
#define LEAST (128u << 10) /* bytes of a piece: shorter ones say little */

static const short ways[KINDS][WAYS] = {
    [COPY] = {4, 8}, [SUM] = {4, 8}, [SUM_IN_PLACE] = {4, 8}, [SUM_BACK] = {1, 4, 8}};

static struct {
    uint32_t turn, best;
    uint32_t cost[WAYS][TRIALS]; /* femtoseconds for a byte */
} known[2 * KINDS];

static uint32_t get(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static void set(uint32_t *p, uint32_t value) { __atomic_store_n(p, value, __ATOMIC_RELAXED); }

static uint32_t ways_of(int kind) { return ways[kind % KINDS][WAYS - 1] ? WAYS : WAYS - 1; }

static uint32_t median(int kind, uint32_t way) {
    uint32_t sorted[TRIALS];
    for (int i = 0, k; i < TRIALS; i++) {
        uint32_t cost = get(&known[kind].cost[way][i]);
        for (k = i; k > 0 && sorted[k - 1] > cost; k--) sorted[k] = sorted[k - 1];
        sorted[k] = cost;
    }
    return sorted[TRIALS / 2];
}

struct hr_reduce_trial hr_reduce_way_begin(hr_reduce_job *job, int is_half) {
    int kind = job->nalso ? SUM_BACK : job->nsrc == 1 ? COPY : job->in_place ? SUM_IN_PLACE : SUM;
    struct hr_reduce_trial trial = {.kind = kind + is_half * KINDS, .way = -1};
    uint32_t turn = get(&known[trial.kind].turn), n = ways_of(trial.kind);
    if (turn >= n * TRIALS || job->end < LEAST) {
        job->pages = ways[kind][get(&known[trial.kind].best)];
        if (job->end >= LEAST) set(&known[trial.kind].turn, turn < KEPT ? turn + 1 : 0);
        return trial;
    }
    for (int i = 0; !turn && i < WAYS * TRIALS; i++) set(&known[trial.kind].cost[i / TRIALS][i % TRIALS], UINT32_MAX);
    trial.way = (int)(turn % n);
    job->pages = ways[kind][trial.way];
    trial.since = hr_now();
    return trial;
}

void hr_reduce_way_end(const struct hr_reduce_trial *trial, size_t nbytes) {
    const int kind = trial->kind;
    if (trial->way < 0) return;
    const double cost = 1e6 * (double)(hr_now() - trial->since) / (double)nbytes;
    const uint32_t turn = get(&known[kind].turn), n = ways_of(kind);
    set(&known[kind].cost[trial->way][turn / n % TRIALS], cost < 1e9 ? (uint32_t)cost : (uint32_t)1e9);
    set(&known[kind].turn, turn + 1);
    if (turn + 1 != n * TRIALS) return;
    uint32_t best = 0;
    for (uint32_t way = 1; way < n; way++)
        if (median(kind, way) < median(kind, best)) best = way;
    set(&known[kind].best, best);
}
