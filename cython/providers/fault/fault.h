/* fault.h - the objects of the fault provider, shared by its source files. */
#ifndef HR_FAULT_PRIVATE_H
#define HR_FAULT_PRIVATE_H

#include "hr/clock.h"
#include "hr/fault.h"

extern const struct hr_provider hr_provider_fault;

enum fault_kind { FAULT_DROP, FAULT_DELAY, FAULT_REORDER, FAULT_TRUNCATE, FAULT_ERROR, FAULT_KILL, FAULT_STOP };
enum { FAULT_RATES = FAULT_ERROR + 1 }; /* those drawn for each operation; the others come at a count */

enum fault_op { FAULT_SEND = 1, FAULT_WRITE = 2, FAULT_READ = 4, FAULT_ATOMIC = 8, FAULT_QUIET = 16, FAULT_PUT = 32 };

extern const char *const hr_fault_names[HR_FAULT_KINDS];

struct fault_plan {
    uint64_t seed;
    double rate[FAULT_RATES];
    int64_t delay_ns;
    uint64_t budget;     /* faults in all, kill and stop not counted */
    uint64_t kill_after; /* 0: never */
    uint64_t stop_after;
    int kill_process;
    unsigned ops; /* the operations that may be hit: enum fault_op */
};

/* plan.c: "seed=7,drop=0.01,delay=0.05:2ms,ops=send+write". HR_ERR_INVALID with detail naming what is wrong. */
hr_status hr_fault_parse(const char *options, struct fault_plan *plan_p, char detail[256]);

struct fault_random {
    uint64_t s[4];
};
void hr_fault_seed(struct fault_random *random, uint64_t seed);
uint64_t hr_fault_next(struct fault_random *random);

/* An operation that is being held back. */
struct fault_held {
    struct fault_held *next;
    enum fault_op op;
    enum fault_fate { HELD_ISSUE, HELD_REPORT, HELD_NEVER } fate; /* post it when due; report it; lost for good */
    hr_status status;                                             /* REPORT */
    int overtaken;                                                /* the next operation goes first */
    int64_t due;
    union {
        struct hr_msg msg;
        struct hr_rma rma;
        struct hr_atomic atomic;
    };
    uint64_t hdr[HR_MAX_HDR / 8];
    struct hr_mem mem; /* copies: the caller's may be gone by then */
    struct hr_rmem remote;
};

struct fault_ep {
    struct hr_ep base;
    struct hr_ep *inner;
    struct fault_held *held, **tail;
    int nheld;
    struct fault_random random; /* per endpoint: its faults depend on its own operations alone */
    int drawn;                  /* the last post was refused with HR_AGAIN: its draw goes to the next one */
    uint64_t draw;
    int connected;
    int lost;              /* the sink was told, or the engine has aborted */
    int killed;            /* the fault has struck; progress() carries it out */
    int stalled;           /* what is due found no room in the inner provider, whose affair the wake-up then is */
    int (*may)(void *arg); /* of the put that is under way */
    void *arg;
    struct fault_ep *next, *prev;
};

struct fault_domain {
    struct hr_domain base;
    struct hr_domain *inner;
    struct hr_sink sink; /* the inner's */
    struct fault_plan plan;
    uint64_t operations, injected, nth_ep;
    uint64_t counts[HR_FAULT_KINDS];
    struct fault_ep *eps;
    int pending; /* held operations and killed endpoints: 0 makes progress() the inner's own */
    int epoll, timer, armed;
};

/* hold.c: what was taken and waits */
hr_status hr_fault_post(struct fault_ep *ep, enum fault_op op, const void *args); /* to the inner provider */
/* HR_INPROGRESS; HR_AGAIN when the endpoint holds all it may. What is to be reported is reported as HR_ERR_IO. */
hr_status hr_fault_hold(struct fault_ep *ep, enum fault_op op, const void *args, enum fault_fate fate, int64_t due,
                        int overtaken);
void hr_fault_overtaken(struct fault_ep *ep, struct fault_held *held); /* something went past it: now it leaves */
struct fault_held *hr_fault_first(struct fault_ep *ep);                /* the oldest that waits to be posted, or NULL */
int hr_fault_run(struct fault_domain *domain, int budget);             /* posts and reports what is due */
int hr_fault_withdraw(struct fault_ep *ep, void *cookie);              /* 1: it was held here and is forgotten */
void hr_fault_forget(struct fault_ep *ep);                             /* all of them */
int64_t hr_fault_due(const struct fault_domain *domain);               /* the earliest, INT64_MAX: none */
void hr_fault_set_timer(struct fault_domain *domain);
uint64_t hr_fault_bytes(const struct fault_ep *ep);

#endif
