/* turns.c - on which processor the background thread works, where two ranks share two. */

/*
 * Two ranks of a machine exchange by tcp, and both compute, so no processor is free. What one sends is handled, and the
 * other's background thread woken, on the processor of who sent it: both threads come to be there. That is as it should
 * be: what was sent lies in the cache, and no processor has to interrupt another. But the rank that computes there pays
 * for both, and the other waits for it. So the threads change processors, together, by the clock, without a word to
 * each other. (64 MiB by 4 Gbit/s beside a product of matrices took, of the longer of the two, 1.34 where each thread
 * was bound to a processor of its own, 1.49 where both were bound to one, 1.2 to one by turns, and 1.31 where they were
 * left alone. Four ranks on two processors took 1.60 by turns, 1.46 alone: so it is for two.)
 *
 * Two that share a processor with who computes have two fifths of it each. So one that needs more goes wherever there
 * is room, as does one that has just begun. Only the thread itself touches what is here, but for `on`.
 */

#define _GNU_SOURCE
#include <sched.h>
#include <time.h>

#include "core/engine.h"

#define TURN_NS 32000000

static int64_t worked(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int nth_of(const cpu_set_t *set, int n) {
    int cpu = 0;
    while (!CPU_ISSET(cpu, set) || n--) cpu++;
    return cpu;
}

/* Unless somebody else has bound it meanwhile. */
static void let_go(struct hr_turns *turns) {
    cpu_set_t now;
    if (turns->bound && !sched_getaffinity(0, sizeof now, &now) && CPU_EQUAL(&now, &turns->one))
        (void)sched_setaffinity(0, sizeof turns->all, &turns->all);
    turns->bound = 0;
}

void hr_turns_begin(struct hr_turns *turns, int64_t now) {
    if (!turns->on && !turns->bound) return;
    let_go(turns);
    turns->since = now;
    turns->worked = worked();
    turns->next = now + TURN_NS / 2;
}

void hr_turns_take(struct hr_turns *turns, int64_t now) {
    int64_t turn = now / TURN_NS, had = worked();
    int busy = 5 * (had - turns->worked) > 2 * (now - turns->since);
    let_go(turns);
    turns->since = now;
    turns->worked = had;
    turns->next = (turn + 1) * TURN_NS;
    if (busy || sched_getaffinity(0, sizeof turns->all, &turns->all)) return;
    int n = CPU_COUNT(&turns->all);
    if (n < 2) return;
    CPU_ZERO(&turns->one);
    CPU_SET(nth_of(&turns->all, (int)(turn % n)), &turns->one);
    turns->bound = !sched_setaffinity(0, sizeof turns->one, &turns->one);
}
