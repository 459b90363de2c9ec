/* turns.c - on which processor the background thread works, where two ranks share two. */

/*
 * Two ranks that have two processors, and both compute while they exchange, so none is free. What one sends by tcp is
 * handled, and the other's background thread woken, on the processor of who sent it: both threads come to be there.
 * That is as it should be: what was sent lies in the cache, and no processor has to interrupt another. But the rank
 * that computes there pays for both, and the other waits for it. So the threads change processors, together, by the
 * clock, without a word to each other. (64 MiB by 4 Gbit/s beside a product of matrices took, of the longer of the two,
 * 1.34 where each thread was bound to a processor of its own, 1.49 where both were bound to one, 1.2 to one by turns,
 * and 1.31 where they were left alone. Four ranks on two processors took 1.60 by turns, 1.46 alone: so it is for two.)
 *
 * One that hardly sleeps needs more than a part of a processor, and goes wherever there is room, as do one that has
 * just begun and one that has nothing to do.
 */

#define _GNU_SOURCE
#include <sched.h>

#include "core/engine.h"

#define TURN_NS 32000000
#define QUIET_NS 8000000
#define SLEEPS 4 /* at least one part in so many of its time */

static int nth_of(const cpu_set_t *set, int n) {
    int cpu = 0;
    while (!CPU_ISSET(cpu, set) || n--) cpu++;
    return cpu;
}

/* Unless somebody has bound it to another one meanwhile. */
static void let_go(struct hr_turns *turns) {
    cpu_set_t now;
    if (turns->bound && !sched_getaffinity(0, sizeof now, &now) && CPU_EQUAL(&now, &turns->one))
        (void)sched_setaffinity(0, sizeof turns->all, &turns->all);
    turns->bound = 0;
}

int hr_turns_due(struct hr_turns *turns, int64_t now, int brought) {
    if (!turns->on && !turns->bound) return 0;
    if (brought) turns->last = now;
    if (!turns->since) {
        if (!brought) return 0;
        turns->since = now;
        turns->slept = 0;
        turns->next = now + TURN_NS / 2;
    }
    return now >= turns->next || now - turns->last > QUIET_NS;
}

void hr_turns_take(struct hr_turns *turns, int64_t now) {
    int64_t turn = now / TURN_NS;
    int quiet = now - turns->last > QUIET_NS || !turns->on, busy = SLEEPS * turns->slept < now - turns->since;
    let_go(turns);
    turns->since = quiet ? 0 : now;
    turns->slept = 0;
    turns->next = (turn + 1) * TURN_NS;
    if (quiet || busy || sched_getaffinity(0, sizeof turns->all, &turns->all)) return;
    int n = CPU_COUNT(&turns->all);
    if (n < 2) return;
    CPU_ZERO(&turns->one);
    CPU_SET(nth_of(&turns->all, (int)(turn % n)), &turns->one);
    turns->bound = !sched_setaffinity(0, sizeof turns->one, &turns->one);
}

void hr_turns_stop(struct hr_turns *turns) {
    let_go(turns);
    turns->since = 0;
}
