/* limit.h - what the programs that measure the machine's limits share: time, ranks, repetitions, what is printed.
 *
 *     limit_* CASE BYTES RANKS SECONDS REPETITIONS [OPTION]
 *
 * prints {"seconds": [...], "wrong": N}: seconds of one operation in each repetition, the slowest rank's, and how many
 * elements of the result of one more operation were not what was expected.
 */

#ifndef LIMIT_H
#define LIMIT_H

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RANKS = 64, MOST_REPETITIONS = 100, SPINS = 2000 };
#define MOST_CALLS 10000000ul
#define HUGE_PAGE ((size_t)2 << 20)

struct limit_shared {
    _Alignas(128) _Atomic uint32_t arrived;
    _Alignas(128) _Atomic uint32_t phase;
    double elapsed[MOST_RANKS][MOST_REPETITIONS];
    double probe[MOST_RANKS];
    uint64_t wrong[MOST_RANKS];
};

static struct limit_shared *limit;
static int me, ranks, repetitions, cores;
static cpu_set_t own; /* the cores that this process may use */
static size_t nbytes;
static double wanted; /* seconds of all repetitions */
static const char *what, *option = "";

static inline void limit_need(int ok, const char *name) {
    if (ok) return;
    fprintf(stderr, "%s: %s\n", name, strerror(errno));
    exit(1);
}

static inline double limit_now(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static inline void limit_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* One turn of a wait: spins, and gives way where there are more ranks than cores. */
static inline void limit_turn(unsigned *spins) {
    if (ranks > cores)
        sched_yield();
    else if (++*spins % SPINS)
        limit_pause();
    else
        sched_yield();
}

static inline void limit_barrier(void) {
    uint32_t phase = atomic_load_explicit(&limit->phase, memory_order_acquire);
    unsigned spins = 0;
    if (atomic_fetch_add_explicit(&limit->arrived, 1, memory_order_acq_rel) + 1 == (uint32_t)ranks) {
        atomic_store_explicit(&limit->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&limit->phase, phase + 1, memory_order_release);
        return;
    }
    while (atomic_load_explicit(&limit->phase, memory_order_acquire) == phase) limit_turn(&spins);
}

/* Memory that all ranks see, in huge pages where the kernel gives them, touched. */
static inline void *limit_memory(size_t len) {
    size_t size = (len + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    char *area = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    limit_need(area != MAP_FAILED, "mmap");
    area += -(uintptr_t)area % HUGE_PAGE;
    (void)madvise(area, size, MADV_HUGEPAGE);
    memset(area, 0, size);
    return area;
}

static inline double limit_run(void (*call)(void), unsigned long calls) {
    limit_barrier();
    double begin = limit_now();
    for (unsigned long i = 0; i < calls; i++) call();
    return limit_now() - begin;
}

static inline double limit_most(double value) {
    limit->probe[me] = value;
    limit_barrier();
    for (int r = 0; r < ranks; r++)
        if (limit->probe[r] > value) value = limit->probe[r];
    limit_barrier();
    return value;
}

/* All ranks: tries how many calls fill the time, then runs them; a call makes `operations`. */
static inline void limit_measure(void (*call)(void), unsigned long operations) {
    double target = wanted / repetitions, once;
    unsigned long calls = 1;
    limit_run(call, 1);
    for (;;) {
        once = limit_most(limit_run(call, calls)) / (double)calls;
        if (once * (double)calls >= target / 2 || calls >= MOST_CALLS) break;
        calls *= 2;
    }
    calls = (unsigned long)(target / once);
    if (calls < 1) calls = 1;
    if (calls > MOST_CALLS) calls = MOST_CALLS;
    for (int i = 0; i < repetitions; i++)
        limit->elapsed[me][i] = limit_run(call, calls) / (double)calls / (double)operations;
    limit_barrier();
}

/* Reads the command line and starts the ranks; returns in each of them, rank 0 is the first process. */
static inline void limit_begin(int argc, char **argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: %s CASE BYTES RANKS SECONDS REPETITIONS [OPTION]\n", argv[0]);
        exit(2);
    }
    what = argv[1];
    nbytes = strtoul(argv[2], NULL, 10);
    ranks = atoi(argv[3]);
    wanted = atof(argv[4]);
    repetitions = atoi(argv[5]);
    if (argc > 6) option = argv[6];
    if (ranks < 1 || ranks > MOST_RANKS || repetitions < 1 || repetitions > MOST_REPETITIONS || wanted <= 0) {
        fprintf(stderr, "%s: a number is out of its range\n", argv[0]);
        exit(2);
    }
    limit_need(sched_getaffinity(0, sizeof own, &own) == 0, "sched_getaffinity");
    cores = CPU_COUNT(&own);
    limit = limit_memory(sizeof *limit);
}

static inline void limit_fork(void) {
    for (int r = 1; r < ranks && me == 0; r++) {
        pid_t child = fork();
        limit_need(child >= 0, "fork");
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            me = r;
        }
    }
    if (ranks <= cores) {
        cpu_set_t cpus;
        int cpu = -1;
        for (int i = 0; i <= me; i++) /* the one of this rank's number among them */
            do cpu++;
            while (!CPU_ISSET(cpu, &own));
        CPU_ZERO(&cpus);
        CPU_SET(cpu, &cpus);
        sched_setaffinity(0, sizeof cpus, &cpus); /* where it is not allowed, the kernel places them */
    }
}

/* All ranks, each with its count of wrong elements; rank 0 prints. */
static inline int limit_end(uint64_t wrong) {
    limit->wrong[me] = wrong;
    limit_barrier();
    if (me != 0) _exit(0);
    printf("{\"seconds\": [");
    for (int i = 0; i < repetitions; i++) {
        double most = 0;
        for (int r = 0; r < ranks; r++)
            if (limit->elapsed[r][i] > most) most = limit->elapsed[r][i];
        printf("%s%.9g", i ? ", " : "", most);
    }
    wrong = 0;
    for (int r = 0; r < ranks; r++) wrong += limit->wrong[r];
    printf("], \"wrong\": %llu}\n", (unsigned long long)wrong);
    while (wait(NULL) > 0 || errno == EINTR) continue;
    return 0;
}

#endif
