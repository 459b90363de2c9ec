/* watch.c - the background thread while callers drive: when it looks whether they still do. */

/*
 * Each look takes a processor from somebody, in a virtual machine for 20 to 40 us. So it looks every tick at first;
 * every 8 ms where many calls have ended in each, and left neither a request behind nor the engine something to do.
 * Where calls follow each other (somebody was driving at each of 16 looks, or one call at all of 8) it looks no more,
 * but sleeps deep, until a timer says that nobody has left the role for a tick: who leaves it sets the timer back, each
 * millisecond; where calls last longer than that, who takes the role stops it. Calls that are too short for that (the
 * clock is read at each end) end the deep sleep.
 */

#include <poll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "core/engine.h"

#define LAZY_MS 8
#define LAZY_CALLS 4  /* that end in each millisecond: between them no peer waits for long */
#define LAZY_TICKS 16 /* of that, before it looks less often */
#define BUSY 16       /* looks at which somebody drove, before it sleeps deep */
#define ONE_CALL 8    /* looks at the same call, before it does */
#define DEEP_CALLS 50 /* that end in each millisecond: with more it does not */
#define MS 1000000

/* From now; 1: at once, 0: not at all. */
static void wake_in(struct hr_engine *engine, long ns) {
    struct itimerspec at = {.it_value = {.tv_nsec = ns}};
    timerfd_settime(engine->bgfd, 0, &at, NULL);
}

/* Lock not held. 1: woken. */
static int sleep_for(struct hr_engine *engine, int timeout_ms) {
    struct pollfd p = {.fd = engine->bgfd, .events = POLLIN};
    uint64_t count;
    if (poll(&p, 1, timeout_ms) <= 0) return 0;
    (void)!read(engine->bgfd, &count, sizeof count);
    return 1;
}

void hr_watch_rest(struct hr_engine *engine, int timeout_ms) {
    hr_unlock(engine);
    sleep_for(engine, timeout_ms);
    hr_lock(engine);
}

void hr_watch_end(struct hr_engine *engine) { wake_in(engine, 1); }

void hr_bg_rouse(struct hr_engine *engine) {
    if (!atomic_load(&engine->bg_lazy)) return;
    atomic_store(&engine->bg_lazy, 0);
    wake_in(engine, 1);
}

void hr_watch_driven(struct hr_engine *engine) {
    if (!engine->deep_long || engine->stop) return;
    engine->deep_until = 0;
    wake_in(engine, 0);
}

void hr_watch_left(struct hr_engine *engine) {
    int64_t now = hr_now(), since = now - engine->deep_left;
    engine->deep_left = now;
    engine->deep_long = since > MS;
    if (engine->deep_until < now + HR_TICK_MS * MS) {
        engine->deep_calls = 0;
        engine->deep_until = now + (HR_TICK_MS + 1) * MS;
        wake_in(engine, (HR_TICK_MS + 1) * MS);
    } else if (++engine->deep_calls > DEEP_CALLS) {
        engine->bg_deep = 0;
        wake_in(engine, 1);
    }
}

void hr_watch_deep(struct hr_engine *engine, uint64_t *seen) {
    engine->deep_left = engine->deep_until = 0;
    engine->deep_long = engine->deep_calls = 0;
    engine->bg_deep = 1;
    if (!engine->driving) hr_watch_left(engine);
    do hr_watch_rest(engine, -1); /* a call may have ended since the timer did */
    while (engine->bg_deep && !engine->stop && (engine->driving || hr_now() < engine->deep_until));
    if (engine->bg_deep) *seen = engine->drive_seq; /* nobody has driven for a tick */
    engine->bg_deep = 0;
    wake_in(engine, 0); /* nothing of it is left */
}

/* Who drives holds the lock nearly always, and need not step back for a look. */
void hr_watch(struct hr_engine *engine, uint64_t *seen) {
    uint64_t now;
    int ticks = 0, busy = 0, same = 0, slept = HR_TICK_MS;
    hr_unlock(engine);
    for (;;) {
        now = atomic_load_explicit(&engine->drive_seq, memory_order_relaxed);
        int driven = atomic_load_explicit(&engine->driving, memory_order_relaxed) == 1;
        int calls = (int)((now - *seen) / (uint64_t)slept), lazy; /* in a millisecond */
        busy = driven && calls < DEEP_CALLS ? busy + 1 : busy / 2;
        same = now == *seen ? same + 1 : 0;
        if ((same && !driven) || same == ONE_CALL || busy == BUSY) break;
        ticks = calls < LAZY_CALLS ? 0 : ticks + 1;
        *seen = now;
        lazy = ticks > LAZY_TICKS;
        atomic_store(&engine->bg_lazy, lazy);
        if (atomic_load(&engine->nasync)) { /* in this order: else who posts one sees that it must be roused */
            lazy = ticks = 0;
            atomic_store(&engine->bg_lazy, 0);
        }
        slept = lazy ? LAZY_MS : HR_TICK_MS;
        if (sleep_for(engine, slept)) break;
    }
    atomic_store_explicit(&engine->bg_lazy, 0, memory_order_relaxed);
    hr_lock(engine);
    if (busy == BUSY && !engine->stop) hr_watch_deep(engine, seen);
}
