/* turns.h - on which processor the background thread works, where two ranks share two: turns.c. */
#ifndef HR_CORE_TURNS_H
#define HR_CORE_TURNS_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

struct hr_turns {
    int on;            /* it takes turns; set under the lock. All else is the thread's own */
    _Atomic int bound; /* to `one`, of `all` that it may use; others may ask, as it is set without the lock */
    cpu_set_t all, one;
    int64_t since, next; /* it serves since then, 0: it does not; when the turn is over */
    int64_t slept, last; /* of that time; when it had something to do */
};

/* About to look for something to do; brought: there was, the last time. 1: the turn is over, or it has had nothing to
 * do for a while: hr_turns_take. */
int hr_turns_due(struct hr_turns *turns, int64_t now, int brought);
/* Without the engine's lock: where the thread is bound to another processor it goes on when that has time. */
void hr_turns_take(struct hr_turns *turns, int64_t now);
/* Others drive. */
void hr_turns_stop(struct hr_turns *turns);

#endif
