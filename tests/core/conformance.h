/* conformance.h - the rig of the conformance suite: two domains in this process, and a record of all they report.
 *
 * A check opens a rig, makes pairs of endpoints, posts, and waits with WAIT for what must follow. The same text runs in
 * two modes. With one thread, waiting means calling progress() of both sides in turn. With --threads each side has a
 * thread and a lock of its own, as two engines have: the check holds both locks except while it waits, and the side's
 * thread calls progress(), or sleeps on the event descriptor. Traffic that shall be concurrent is posted by a side's
 * `work`, which runs before each progress() in whichever thread drives the side.
 *
 * The callbacks check what holds always: they come only inside progress(), never for an aborted endpoint, messages
 * intact and in order, done exactly once for an operation that was in progress.
 */
#ifndef HR_TESTS_CONFORMANCE_H
#define HR_TESTS_CONFORMANCE_H

#define CHECK_NO_MAIN
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "check.h"
#include "hr/auth.h"
#include "hr/memory.h"
#include "hr/provider.h"

enum { MAX_ENDS = 16, BUDGET = 32, RIG_PAGE = 4096, IDLE_TURNS = 5000 };

/* From the command line. */
struct settings {
    const struct hr_provider *provider, *inner;
    const char *options, *ifname, *device;
    int threads;
    int64_t limit; /* ns: how long WAIT waits */
};
extern struct settings settings;

/* One operation, whose address is the cookie. buf is the caller's memory that must stay until it has ended. */
struct op {
    enum { OP_FREE, OP_OPEN, OP_ENDED } state;
    hr_status status;
    char *buf;
    size_t cap;
    struct op *next;
};

struct side;
struct end { /* the rig's view of one endpoint */
    struct hr_ep *ep;
    struct side *side;
    int aborted, connected, losses;
    hr_status loss;
    uint64_t next_tx, next_rx; /* sequence numbers of end_send's messages */
    uint64_t bytes_rx;
    int gaps;      /* a canceled message may be missing */
    int any_order; /* another check looks at the sequence */
    uint64_t notifies, notify_value, notify_bytes;
    int ended; /* done callbacks */
    void (*on_recv)(struct end *end, uint64_t seq);
    void (*on_notify)(struct end *end, uint64_t value, size_t nbytes);
    void *arg;
};

struct side {
    struct hr_domain *domain;
    struct hr_auth auth;
    uint64_t id;
    uint8_t addr[HR_MAX_ADDR];
    size_t addr_len;
    struct end ends[MAX_ENDS];
    int nends;
    struct hr_ep *hint;
    int in_progress, callbacks;
    int paused;                     /* is not driven: a peer that does not look */
    int (*work)(struct side *side); /* returns whether it wants to be called again without an event */
    void *arg;
    int lost_wakeups; /* threads: slept through an event */
    uint64_t passes;
    pthread_mutex_t lock;
    atomic_int wanted; /* the lock, by the check */
    pthread_t thread;
    int kick, stop;
};

struct rig {
    struct side side[2];
    int threads;
    int idle_turns; /* in a row; where one thread drives both sides */
};

struct rig_setup { /* zero: two sides that trust each other */
    const char *token[2];
    uint32_t epoch[2];
    int self; /* side 1 is side 0: one domain that talks to itself */
};

/* A domain and both ids; a rig that does not open ends the program: nothing can be checked then. */
void rig_open(struct rig *rig, const struct rig_setup *setup);
void rig_close(struct rig *rig);
#define RIG_WITH(name, ...)                              \
    struct rig name __attribute__((cleanup(rig_close))); \
    rig_open(&name, &(struct rig_setup){__VA_ARGS__})
#define RIG(name) RIG_WITH(name, 0)

hr_status side_open(struct side *side, const char *options, char detail[256]);
void side_kick(struct side *side);
void side_take(struct side *side); /* its lock; its thread waits until it is released */
struct end *end_new(struct side *side, uint64_t peer_id);
hr_status end_connect(struct end *end, const struct side *to, int active);
void end_abort(struct end *end);
void end_destroy(struct end *end);
/* A connected pair; a is on side 0. Returns 0 (and has noted a failure) when it does not come about. */
int rig_pair(struct rig *rig, struct end **a_p, struct end **b_p);
#define PAIR(rig, a, b) \
    struct end *a, *b;  \
    if (!rig_pair(&(rig), &a, &b)) return

/* Lets both sides do something. */
void rig_pump(struct rig *rig);
void rig_pump_for(struct rig *rig, int ms);
int64_t rig_now(void);

/* Until cond holds; leaves the check with a failure when it does not within the limit. cond is evaluated under both
 * locks. */
#define WAIT(rig, cond)                                                                                           \
    do {                                                                                                          \
        int64_t wait_end = rig_now() + settings.limit;                                                            \
        int wait_ok;                                                                                              \
        while (!(wait_ok = (cond)) && rig_now() < wait_end) rig_pump(&(rig));                                     \
        if (!wait_ok) {                                                                                           \
            if (check_note())                                                                                     \
                fprintf(stderr, "%s:%d: %s: waited in vain for: %s\n", __FILE__, __LINE__, check_current, #cond); \
            return;                                                                                               \
        }                                                                                                         \
    } while (0)

/* Test data: every 8-byte word differs from its neighbours and between seeds, so that every wrong offset shows. */
void fill(void *buf, size_t len, uint64_t seed);
/* Notes a failure, with the place, and returns 0 when buf does not hold that. */
int filled(const void *buf, size_t len, uint64_t seed);

/* A message begins with its sequence number and its length, 32 bits each, and has headers of all sizes in turn. */
static inline size_t test_hdr_len(uint64_t seq) { return 8 + 8 * (seq % (HR_MAX_HDR / 8)); }

/* Operations. The buffer of an op is filled with junk as soon as the provider has given it back. */
struct op *op_new(size_t cap);
void op_free(struct op *op);
void op_free_all(void); /* those of a check that failed half-way */
/* The endpoint's next message; takes its sequence number only when the provider took the message. */
hr_status end_send(struct end *end, size_t len, struct op *op);
/* Posts until it is taken and waits until it has ended: the status of the operation. */
enum rma_kind { RMA_READ, RMA_WRITE };
hr_status rma_run(struct rig *rig, struct end *end, enum rma_kind kind, struct hr_rma *rma);
hr_status atomic_run(struct rig *rig, struct end *end, struct hr_atomic *atomic);

/* len bytes of an arena, registered at owner's domain, exported to and imported by the peer. */
struct window {
    char *mem;
    size_t len;
    struct hr_mem reg;
    struct hr_desc desc;
    struct hr_rmem rmem;
    struct end *owner, *peer;
};
/* HR_OK, or what mem_export or mem_import said. */
hr_status window_open(struct rig *rig, struct window *window, struct end *owner, struct end *peer, size_t len,
                      uint32_t access);
void window_close(struct window *window);
#define WINDOW(name) struct window name __attribute__((cleanup(window_close))) = {0}
/* Exports and imports with retries on HR_AGAIN. */
hr_status share(struct rig *rig, struct end *owner, struct end *peer, const struct hr_mem *reg, void *addr, size_t len,
                struct hr_desc *desc_p, struct hr_rmem *rmem_p);

/* Adds up what a fault provider injected; conformance.c. */
void count_faults(struct hr_domain *domain);

static inline uint32_t rig_caps(const struct rig *rig) { return rig->side[0].domain->caps.flags; }
#define NEED_CAP(rig, cap) \
    if (!(rig_caps(&(rig)) & (cap))) SKIP("the provider does not have " #cap)

#endif
