/* hr.h - the core as its users (Cython, C tests) see it: engine, communicator, request. */
#ifndef HR_H
#define HR_H

/*
 * An engine is one process's (or thread's) place in a job: its domains, its connections, its progress. All calls may
 * come from any thread; one lock guards an engine. Progress is a role: whoever waits drives; a background thread serves
 * when nobody does. Blocking happens in hr_wait alone, always with a deadline.
 *
 * A request is one operation. Its memory is the caller's and must stay until the request is done; it is finished
 * exactly once, by completion or by abort, and the engine does not touch it afterwards. Buffers likewise.
 *
 * Times are nanoseconds of CLOCK_MONOTONIC. 0: already passed; HR_FOREVER is for the engine's own threads only.
 */

#include <stddef.h>
#include <stdint.h>

#include "hr/auth.h"
#include "hr/clock.h"
#include "hr/program.h"
#include "hr/provider.h"
#include "hr/reduce.h"
#include "hr/status.h"

#define HR_FOREVER INT64_MAX
#define HR_ANY_SOURCE (-1)
#define HR_PRIORITIES 8 /* 0 is the most urgent; HR_PRIORITY_DEFAULT where nothing is said */
#define HR_PRIORITY_DEFAULT 4
#define HR_MAX_RAILS 8

struct hr_engine;
struct hr_comm;
struct hr_conn;
struct hr_xfer;

/* Where an operation was when it failed. */
enum hr_phase {
    HR_PHASE_NONE,
    HR_PHASE_CONNECT,
    HR_PHASE_POST,
    HR_PHASE_MATCH,
    HR_PHASE_TRANSFER,
    HR_PHASE_FINISH,
    HR_PHASE_CLOSE
};
const char *hr_phase_name(enum hr_phase phase);

struct hr_request;
typedef void (*hr_request_fn)(struct hr_request *req);

struct hr_request {
    volatile int32_t done; /* 1 with release order, last thing the engine writes */
    int32_t status;        /* hr_status */
    int32_t peer;          /* received: rank of the source. failed: the rank to blame, -1 unknown */
    int32_t phase;         /* enum hr_phase, on failure */
    uint64_t nbytes;       /* received */
    const char *provider;  /* static name, on failure */
    uint32_t flags;        /* HR_REQ_* */
    int32_t priority;
    void *user; /* the caller's */
    /* below: the engine's */
    hr_request_fn then; /* continuation in C, instead of waking a waiter */
    struct hr_comm *comm;
    struct hr_conn *conn;             /* NULL: any source */
    struct hr_request *next, *prev;   /* the communicator's pending list, later the done list */
    struct hr_request *mnext, *mprev; /* a matching chain, or a connection's send queue */
    struct hr_xfer *xfer;             /* rendezvous in progress */
    void *state;                      /* run or waiter */
    void *buf;
    uint64_t len, tag, sig;
    uint32_t index; /* instruction of the run */
    uint8_t kind, queued, reduce, dtype;
    uint8_t op, rflags;
};

enum {
    HR_REQ_ASYNC = 1,     /* nobody may be waiting: the background thread serves it, completion goes to the done list */
    HR_REQ_PACED = 2,     /* of a program that sends to one peer at most before something has come */
    HR_REQ_STAGED = 4,    /* as HR_INSTR_STAGED */
    HR_REQ_CHANGED = 8,   /* as HR_INSTR_CHANGED */
    HR_REQ_OPEN = 16,     /* of a SEND: the receiver may put there what it makes of it */
    HR_REQ_RETURNED = 32, /* and it has; on both sides */
    HR_REQ_ALONE = 64,    /* nothing else is on its pages */
    HR_REQ_WOULD = 128,   /* of a run: its caller waits, and it stays set if all say something to all and peers could
                             write to `out`, or to `in` where nothing comes out. They are told */
    HR_REQ_HEARD = 256,   /* all others have said so of their own; when the run has ended well */
    HR_REQ_PLAIN = 512,   /* with HR_REQ_WOULD: which stays set, instead, if peers can not map `in` */
    HR_REQ_SAME = 1024    /* of a SEND of a program: what it sends goes to others, too, as it is now */
};

struct hr_config {
    uint64_t self_id;
    const char *providers; /* "shm,tcp" in order of preference; loop is always there for oneself. "tcp,tcp:1,tcp:2":
                              three domains of a provider, for rails 0 to 2 */
    const char *ifname;    /* interface grammar, of all providers; NULL any */
    const char *rails;     /* "tcp:nic0,nic1": the interfaces of that provider's rails 0 and 1, instead of ifname */
    const char *options;   /* "tcp:cc=cubic,streams=2;shm:ring=1M": handed to the providers; NULL none */
    const char *devices;   /* "verbs:mlx5_0": the device of a provider that has several; NULL: it chooses */
    const char *fault;     /* "tcp:drop=0.01,seed=7": wrap that provider; NULL none */
    int local_peers;
    int spin_us;           /* bound of spinning before sleeping; -1 adaptive */
    uint64_t eager_credit; /* unmatched bytes that a peer may have here; 0: the provider's */
    struct hr_auth auth;
};

hr_status hr_engine_open(const struct hr_config *config, struct hr_engine **engine_p, char detail[256]);
/* Waits until what was sent has left (deadline), says goodbye to peers, stops. Requests still open are aborted. */
void hr_engine_close(struct hr_engine *engine, int64_t deadline);
/* How many ranks of the job share this host, and the cores they share: decides how to wait. turns: it is one of two
 * ranks that have two cores, and its background thread shares one with the other's, by turns. */
void hr_engine_set_locality(struct hr_engine *engine, int local_ranks, int cores, int turns);
/* The i-th domain: name (with ":1" for rail 1), address, text. Returns 0 past the last. */
int hr_engine_domain(struct hr_engine *engine, int i, const char **name_p, void *addr, size_t *addr_len_p,
                     struct hr_caps *caps_p, char text[HR_ABOUT]);

/* What people should read of, in the order in which it happened: the text names a device or a caller, with the reason.
 * The 16 newest are kept. The descriptor is readable while there are any. 0: there is none. */
enum hr_remark_kind {
    HR_REMARK_LEFT,    /* a device that could not be opened: it is done without */
    HR_REMARK_FELL,    /* the connection to a peer goes on over another provider, `by` */
    HR_REMARK_BACK,    /* it is carried by its own again */
    HR_REMARK_STRANGER /* somebody who called and is no peer was turned away; of each kind the first */
};
struct hr_remark {
    enum hr_remark_kind kind;
    uint64_t peer_id;
    const char *provider, *by;
    char text[512]; /* as long as hr_domain.left */
};
int hr_engine_remark_fd(struct hr_engine *engine);
int hr_engine_remark(struct hr_engine *engine, struct hr_remark *remark_p);

/* Begins to connect to peer_id over the named provider; both sides call it, one of them active. Called again for the
 * same peer and provider it adds a stream. The name of a rail's domain ("tcp:1") begins the connection of that rail,
 * after those of the rails before it: messages, and what a program says goes as lane 0, take rail 0; lane j takes rail
 * j modulo their number. Losing one rail is losing the peer. To oneself: provider "loop", once. */
hr_status hr_connect(struct hr_engine *engine, uint64_t peer_id, const char *provider, const void *addr, size_t len,
                     int active);
/* The same for a traffic class of its own, which is on its packets from the first to the last: DSCP 0..63, HR_NO_CLASS
 * for none. Those without were begun before. HR_ERR_UNSUPPORTED on one host's own providers: nothing leaves it. */
enum { HR_NO_CLASS = -1 };
hr_status hr_connect_classed(struct hr_engine *engine, uint64_t peer_id, const char *provider, const void *addr,
                             size_t len, int active, int dscp);
/* Until all begun connections stand. On failure *peer_p and detail name the first that does not. */
hr_status hr_connect_wait(struct hr_engine *engine, int64_t deadline, uint64_t *peer_p, char detail[256]);
/* Until all of a class stand, but for those that were settled. When all ranks have said that they do, they are settled:
 * from then on who loses one has lost the peer. Else they are forgotten, which concerns nobody who did not ask for
 * them, and may be begun again. */
hr_status hr_connect_wait_classed(struct hr_engine *engine, int dscp, int64_t deadline, uint64_t *peer_p,
                                  char detail[256]);
void hr_class_settle(struct hr_engine *engine, int dscp);
void hr_class_forget(struct hr_engine *engine, int dscp);
/* Traffic class of every connection over a provider, those to come included, for what leaves from now on: see
 * ep_set_class. Some have it from their beginning or not at all, so it is said before hr_connect as well. Where there
 * are several streams to a peer the first, which has what answers its bulk, gets the DSCP `answers` when they are
 * there. HR_ERR_UNSUPPORTED where there is none yet, or one of them has not got it; the others have it all the same. */
hr_status hr_set_class(struct hr_engine *engine, const char *provider, int dscp, int answers, int priority);
/* Whether all connections of such a class over a provider have it: HR_ERR_UNSUPPORTED where one has not, or there is
 * none. Of a device it is read back. */
hr_status hr_class_taken(struct hr_engine *engine, const char *provider, int dscp);
/* The control plane knows: this peer is gone. Breaks every communicator that holds it. Idempotent. */
void hr_peer_lost(struct hr_engine *engine, uint64_t peer_id, hr_status why, const char *detail);
/* Descriptor that becomes readable when an ASYNC request was added to the done list; and the list. */
int hr_engine_done_fd(struct hr_engine *engine);
struct hr_request *hr_engine_reap(struct hr_engine *engine); /* linked by next; the caller owns them again */

/* A communicator: peers[i] is the peer id of rank i. id is the same on all members and is never reused in a job. */
hr_status hr_comm_open(struct hr_engine *engine, uint64_t id, const uint64_t *peers, int size, int rank,
                       struct hr_comm **comm_p);
/* The same by the connections of a traffic class, to those peers to which there are some. */
hr_status hr_comm_open_classed(struct hr_engine *engine, uint64_t id, const uint64_t *peers, int size, int rank,
                               int dscp, struct hr_comm **comm_p);
/* Aborts what is pending, forgets what arrived; later frames for this id are dropped. */
void hr_comm_close(struct hr_comm *comm);
/* Pending and later calls fail with this; told to the other members when tell is set. The first break wins. */
void hr_comm_break(struct hr_comm *comm, hr_status status, int peer, enum hr_phase phase, const char *detail, int tell);
struct hr_comm_state {
    int32_t status; /* HR_OK, or why it is broken */
    int32_t peer;   /* rank to blame, -1 unknown */
    int32_t phase;
    int32_t cause;    /* HR_ERR_BROKEN by another rank: what that was to itself, a timeout for one; HR_OK unknown */
    int64_t sequence; /* the collective that was given up, here or there; -1: none */
    const char *provider;
    char detail[160];
};
void hr_comm_state(struct hr_comm *comm, struct hr_comm_state *state_p);

/* Point to point. tag below 2^31. req fields flags, priority and user are set by the caller before. */
hr_status hr_isend(struct hr_comm *comm, const void *buf, size_t len, int dst, uint32_t tag, struct hr_request *req);
hr_status hr_irecv(struct hr_comm *comm, void *buf, size_t len, int src, uint32_t tag, struct hr_request *req);
/* One-sided access between two ranks of a communicator. hr_expose: desc is what the peer needs; HR_AGAIN: again after
 * progress; HR_ERR_UNSUPPORTED: this peer cannot reach such memory; HR_ERR_NOMEM: detail (256 bytes) says which limit
 * was hit, if anybody knows. It is exposed until hr_conceal, or until the communicator is closed; hr_conceal, once, is
 * due in any case. Its engine is NULL where that was closed before. */
struct hr_exposed;
hr_status hr_expose(struct hr_comm *comm, int rank, void *addr, size_t len, uint32_t access, struct hr_desc *desc_p,
                    struct hr_exposed **exposed_p, char detail[256]);
void hr_conceal(struct hr_engine *engine, struct hr_exposed *exposed);
/* The peer's memory; to be released unless the communicator was closed before. */
hr_status hr_import(struct hr_comm *comm, int rank, const struct hr_desc *desc, struct hr_rmem *rmem_p);
void hr_release(struct hr_comm *comm, int rank, struct hr_rmem *rmem);
/* Operations there. HR_ERR_ACCESS: beyond its end. remote is copied and stays imported until they are done. notify: the
 * peer is told this value once the bytes are there. An atomic leaves in *before what it found. */
hr_status hr_iwrite(struct hr_comm *comm, int rank, const void *buf, size_t len, const struct hr_rmem *remote,
                    uint64_t offset, const uint32_t *notify, struct hr_request *req);
hr_status hr_iread(struct hr_comm *comm, int rank, void *buf, size_t len, const struct hr_rmem *remote, uint64_t offset,
                   struct hr_request *req);
hr_status hr_iatomic(struct hr_comm *comm, int rank, enum hr_atomic_op op, uint64_t *before, uint64_t operand,
                     uint64_t compare, const struct hr_rmem *remote, uint64_t offset, struct hr_request *req);
/* The next notification of this rank: req->nbytes is its value. */
hr_status hr_inotified(struct hr_comm *comm, int rank, struct hr_request *req);
/* Runs a program. sig: 64-bit signature of (operation, dtype, count, root, op), the same on all ranks. */
hr_status hr_run(struct hr_comm *comm, struct hr_program *program, const void *in, void *out, hr_dtype dtype,
                 hr_redop op, uint64_t sig, struct hr_request *req);

/* Waits until done: HR_OK (then look at req->status), HR_ERR_TIMEOUT (the request goes on), HR_INTERRUPTED (a signal
 * came). polls > 0: give up with HR_INTERRUPTED after so many polls without sleeping (for callers that hold the GIL).
 */
hr_status hr_wait(struct hr_engine *engine, struct hr_request *req, int64_t deadline, int polls);
/* Ends it now: done on return, with HR_ERR_CANCELED or this status unless it had completed before. A receive in
 * transfer is cut off so that nothing can change its buffer afterwards; a run breaks its communicator. */
void hr_cancel(struct hr_engine *engine, struct hr_request *req, hr_status status);
/* One pass of progress, for tests and for callers with a loop of their own. */
int hr_progress(struct hr_engine *engine);

/* Counters, by name, for Python: fills up to n and returns how many there are. */
struct hr_counter {
    const char *name;
    uint64_t value;
};
int hr_engine_counters(struct hr_engine *engine, struct hr_counter *counters, int n);
/* Per peer, all rails together: provider name, bytes and messages each way, nanoseconds with bulk in flight (of the
 * rail that was busy longest). 0 when unknown. carrier: what stands in for the provider, or NULL; fell: how often. */
struct hr_peer_stats {
    const char *provider, *carrier;
    uint64_t tx_bytes, rx_bytes, tx_msgs, rx_msgs, busy_ns;
    double rate; /* measured, bytes per second; 0 unknown */
    int connected, rails;
    uint32_t fell;
};
int hr_peer_stats(struct hr_engine *engine, uint64_t peer_id, struct hr_peer_stats *stats_p);

#endif
