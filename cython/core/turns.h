/* turns.h - on which processor the background thread works, where two ranks share two: turns.c. */
#ifndef HR_CORE_TURNS_H
#define HR_CORE_TURNS_H

#include <sched.h>
#include <stdint.h>

struct hr_turns {
    int on;    /* it takes turns; set under the lock. All else is the thread's own */
    int bound; /* to `one`, of `all` that it may use */
    cpu_set_t all, one;
    int64_t since, worked, next; /* what it had worked at that time; when it looks again */
};

/* The thread begins to serve, or stops: it goes where there is room. */
void hr_turns_begin(struct hr_turns *turns, int64_t now);
/* It is about to sleep, and the turn is over: turns->next. */
void hr_turns_take(struct hr_turns *turns, int64_t now);

#endif
