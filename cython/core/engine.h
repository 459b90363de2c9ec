/* engine.h - the engine's own structures, shared by the files of core/. */
#ifndef HR_CORE_ENGINE_H
#define HR_CORE_ENGINE_H

/*
 * Who does what
 *   engine.c    open and close, domains, counters
 *   progress.c  the progress role: one pass, waiting, the background thread;  turns.c  on which processor that works
 *   conn.c      connections: what is queued, in which order it leaves, credit
 *   window.c    the bound on bulk in flight
 *   sink.c      what providers tell: messages, completions, the end of connections
 *   match.c     order of arrival, posted receives, unexpected messages
 *   transfer.c  rendezvous: pull, push, segments
 *   xfer.c      the table of transfers and their ids
 *   share.c     long messages that both ends copy
 *   onesided.c  memory that users expose, their reads and writes there, notifications
 *   ledger.c    what a pulled message was read from had not been taken back
 *   request.c   isend, irecv, finish, abort
 *   comm.c      communicators: open, close, break
 *   program.c   validation of programs;  run.c  the interpreter;  compute.c  what it computes;  aside.c  on copies
 *
 * One lock (engine->mutex) guards everything here. It is held for one pass of progress at most, and a pass does at most
 * one piece of heavy work (a segment copied or reduced), so that other threads and urgent messages wait microseconds.
 *
 * Messages between engines are a struct hr_hdr, a few with more header behind it, and a payload for EAGER, SEG and
 * RTS alone.
 *
 *   EAGER  the message itself
 *   RTS    a message too large for that: size, a descriptor where the receiver may pull, and the beginning of what it
 *          is expected to call for in segments
 *   CTS    the receiver's answer: write into this descriptor (push), or send segments, of the rest if it took that
 *   SEG    one segment
 *   FIN    the receiver has all of it (pull), or does not want it: the sender's buffer is free
 *   CANCEL the sender withdraws
 *   SKIP   the sender withdrew an EAGER message of which it cannot know whether it left: if it has not come by now,
 *          its place in the order stays empty and its cost comes back
 *   CREDIT carries only what all headers of the first stream carry: eager credit and acknowledged bulk
 *   PROBE  asks how much of the bulk that was sent so far has arrived, after something was cut off
 *   ECHO   the answer: how much never did, and never will
 *   HELP   the receiver asks the sender to copy some pieces itself (share.c); HELPED: so many, and the
 *          one that it could not write
 *   LEDGER where the receiver of an offer can see that it still stands (ledger.c)
 *   BREAK  this communicator is broken
 *   BYE    nothing more will come, by this stream
 *
 * A rail is a connection of its own: order, credit, window and rate are those of one path, and nothing that waits for
 * one NIC holds back what goes by another. All rails to a peer have its index, so that a message's rank does not depend
 * on the way it came; they are lost together. Messages of users take the first rail, so that they stay in order; those
 * of programs have tags of their own and go where their lane says, at both ends.
 *
 * A traffic class of a communicator is a connection of its own, too, a channel: a queue pair has one class for life,
 * and a switch may carry what is urgent past what is not. All channels to a peer have its index and are lost together;
 * whatever a communicator says goes by the channel of its class, at both ends.
 */

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "core/ledger.h"
#include "core/relay.h"
#include "core/turns.h"
#include "core/xfer.h"
#include "hr/hr.h"
#include "hr/list.h"

enum hr_msg_kind {
    HR_MSG_EAGER = 1,
    HR_MSG_RTS,
    HR_MSG_CTS,
    HR_MSG_SEG,
    HR_MSG_FIN,
    HR_MSG_CANCEL,
    HR_MSG_SKIP,
    HR_MSG_CREDIT,
    HR_MSG_BREAK,
    HR_MSG_BYE,
    HR_MSG_PROBE,
    HR_MSG_ECHO,
    HR_MSG_LEDGER,
    HR_MSG_HELP,
    HR_MSG_HELPED,
    HR_MSG_KINDS
};

struct hr_hdr {
    uint8_t kind;
    uint8_t flags;  /* RTS, CTS: HR_HDR_*. BREAK: phase */
    uint8_t bucket; /* EAGER, RTS, SKIP: of the order. BREAK: what it was to the rank to blame, a status. FIN: 0, or
                       1 + what sum was made of it (relay.h), while both sent */
    int8_t status;  /* FIN, CANCEL, BREAK */
    uint32_t order; /* EAGER, RTS, SKIP: place in its bucket */
    uint64_t comm;
    uint64_t tag; /* BREAK: rank to blame */
    uint64_t aux; /* EAGER, RTS: signature. SEG: offset. CTS: the length of the beginning that was taken. SKIP: length.
                     PROBE, ECHO: bytes of bulk. BREAK: sequence. FIN, with bucket: ns of work */
    uint32_t sreq;
    uint32_t rreq; /* EAGER, RTS, CREDIT: how much bulk is to be acknowledged at a time; 0: as before */
    /* Totals modulo 2^32, so that a header which is withdrawn with its message takes nothing with it. They count where
     * the header came by the first stream. */
    uint32_t credit; /* eager bytes that the peer got back */
    uint32_t ack;    /* bulk bytes that have arrived */
};
enum {
    HR_HDR_DESC = 1,  /* it has a descriptor */
    HR_HDR_SURE = 2,  /* the provider confirms writes (HR_CAP_CONFIRMS); CTS: both do, so only the last is told of */
    HR_HDR_READ = 4,  /* RTS: if you send as well, read it; the same, shifted by one: if you reduce it */
    HR_HDR_PUT = 16,  /* RTS, EAGER, with SAYS: results of such a length are to be put back */
    HR_HDR_OPEN = 32, /* RTS: what you make of it may be put there. FIN: and was */
    HR_HDR_SAYS = 64,
    HR_HDR_WOULD = 128 /* RTS, EAGER of a collective: HR_REQ_WOULD */
};

struct hr_hdr_long { /* RTS (size, desc, key), CTS (desc), HELP (size, desc) */
    struct hr_hdr h;
    uint64_t size;
    struct hr_desc desc;
    uint64_t key; /* of the offer, in the ledger; 48 bits */
};
_Static_assert(sizeof(struct hr_hdr_long) <= HR_MAX_HDR, "a header has to fit");

#define HR_REMARKS 16
#define HR_BUCKETS 64 /* of the order of messages on a connection */
#define HR_MATCH_CHAINS 512
#define HR_CHANNEL(dscp) ((uint32_t)((dscp) + 1)) /* HR_NO_CLASS: 0, that of all who have no class of their own */
#define HR_BULK_MIN 4096                          /* both ends count what is larger as bulk */
#define HR_EAGER_COST 64                          /* credit that a message costs beside its bytes */
#define HR_MAX_LANES 4                            /* streams of a rail */
#define HR_MAX_DOMAINS (HR_MAX_PROVIDERS + HR_MAX_RAILS - 1) /* one provider may have rails */
#define HR_COLL_TAG (1ull << 63)
#define HR_COLL_SEQ(tag) (((tag) & ~HR_COLL_TAG) >> 24)
#define HR_SEGMENT_MIN (16u << 10)
#define HR_WINDOW_MIN (64u << 10)
#define HR_WINDOW_LONG (128u << 10) /* what is shorter may end behind the window, if it begins before */
#define HR_INLINE_WORK (32u << 10)  /* copying or reducing less than this is done at once */

enum hr_conn_state { HR_CONN_CONNECTING, HR_CONN_UP, HR_CONN_CLOSED /* said BYE */, HR_CONN_LOST };

struct hr_lane {
    struct hr_conn *conn;
    struct hr_ep *ep;
    int up;
    int bye; /* the peer has said that nothing more will come by this stream; when it has on all, it is gone */
};

/* What became of posting on a stream. Of one that has said goodbye the end is no loss: the other goodbyes are on their
 * way, and say what becomes of the rest. */
static inline hr_status hr_lane_posted(const struct hr_lane *lane, hr_status status) {
    return lane->bye && hr_is_error(status) ? HR_AGAIN : status;
}

struct hr_ctl { /* a control message that found no room */
    struct hr_link link;
    uint32_t len;
    struct hr_hdr_long hdr;
};

struct hr_conn {
    struct hr_engine *engine;
    struct hr_link link;   /* engine->conns */
    struct hr_link owing;  /* engine->owing when bulk that came has not been acknowledged */
    struct hr_link active; /* engine->active when something is queued, engine->dead when lost */
    uint64_t peer_id;
    uint32_t channel;                            /* 0; or of a traffic class of its own, by its DSCP + 1 */
    struct hr_conn *first, *rails[HR_MAX_RAILS]; /* the channel's first rail; on that one: all of them */
    int nrails, settled; /* settled: of a class: all ranks have it, and who loses it has lost the peer */
    const struct hr_provider *provider;
    const char *carrier; /* the provider that stands in for it; NULL: none does */
    uint32_t fell;       /* times that one did */
    const struct hr_caps *caps;
    struct hr_lane lanes[HR_MAX_LANES + 1]; /* one more: the passive end of the connection to oneself */
    uint32_t next_lane, index;
    int nlanes, state, said_bye, was_closed, cut;
    hr_status why;
    char detail[160];
    /* sending */
    struct hr_link ctl; /* struct hr_ctl */
    uint32_t nctl;
    struct hr_request *sendq[HR_PRIORITIES]; /* headers that wait, circular lists */
    struct hr_link bulk[HR_PRIORITIES];      /* struct hr_xfer that have segments to send */
    uint32_t nqueued, nbulk, bucket_queued[HR_BUCKETS];
    int64_t credit; /* eager bytes that we may send */
    uint64_t inflight, window;
    uint64_t tx_bulk, tx_bulk_acked, tx_bulk_lost; /* posted so far; what of it has, and what never will be heard of */
    uint64_t tx_writes;                            /* on their way; the provider says when they have arrived */
    uint32_t order_tx[HR_BUCKETS];
    /* receiving */
    uint32_t order_rx[HR_BUCKETS];
    struct hr_link early[HR_BUCKETS]; /* struct hr_umsg before their turn, in order */
    uint64_t held, rx_bulk;           /* credit that the peer has used and not got back; bulk that came */
    uint32_t owed_credit, owed_ack;   /* not told yet */
    uint32_t ack_every, asked_every;  /* bulk that is acknowledged at a time: what the peer, what we have asked for */
    uint32_t told_credit, told_ack, heard_credit, heard_ack, nbreaks;
    struct hr_reading reading;
    /* offers to pull */
    struct hr_mem ledger_mem;
    struct hr_rmem peer_ledger;
    int has_ledger, ledger_shown;
    int stopped;  /* the peer did not let go of an entry in time */
    int helpless; /* the peer could not write where it was asked to help: it is not asked for that again */
    /* measuring */
    uint64_t round_rx, round_rx_all; /* bulk that had come by its beginning: from there, from all */
    int64_t round_since, busy_since, alone_since, rtt;
    int priority; /* of the last message; when it was another one than that of those before */
    int64_t mixed_at;
    uint64_t round_bytes, round_mark;
    double rate;
    int rate_is_of_burst; /* and not of a path that was kept full */
    uint64_t tx_bytes, rx_bytes, tx_msgs, rx_msgs, busy_ns;
};

#define HR_SPARES 8 /* lengths of room for payload, each twice the one before: powers of two and a little more */
#define HR_SPARE_MIN 4096
#define HR_SPARE_ROOM ((size_t)4128)
#define HR_SPARE_MOST (HR_SPARE_ROOM << (HR_SPARES + 1)) /* bytes of all of them: four of the longest */

struct hr_umsg { /* a message that came before its receive, or before its turn */
    struct hr_link link;
    struct hr_link stray; /* of a collective: comm->strays */
    struct hr_conn *conn;
    uint32_t len, kept; /* kept: which engine->spare it came from, 1 to HR_SPARES; 0: none */
    struct hr_hdr_long hdr;
    char payload[];
};

struct hr_notes { /* notifications of one rank that nobody has taken */
    struct hr_link kept;
    uint32_t n;
};

struct hr_comm {
    struct hr_engine *engine;
    struct hr_link link;
    uint64_t id;
    int size, rank;
    int nclosed; /* members that have said BYE */
    struct hr_conn **conns;
    int *ranks; /* by conn->index, -1 for others */
    uint32_t nranks;
    struct hr_request *pending; /* circular; runs are not here, what they started is */
    struct hr_link runs;
    struct hr_link strays;  /* struct hr_umsg of collectives that nobody here has asked for yet */
    struct hr_link exposed; /* struct hr_exposed */
    struct hr_notes *notes; /* by rank */
    uint64_t run_seq;
    struct hr_comm_state state;
};

struct hr_waiter {
    struct hr_link link;
    pthread_cond_t cond;
    int signalled;
};

/* The traffic class of a domain's endpoints; of those that have one from the start. */
struct hr_class {
    uint8_t set, dscp, priority;
};

struct hr_engine {
    struct hr_config config;
    char *names[HR_MAX_DOMAINS]; /* of the domains: the wrapped provider's own name, and ":1" for rail 1 */
    struct hr_auth auth;
    pthread_mutex_t mutex;
    _Atomic uint32_t let_in;    /* how many got it after waiting */
    _Atomic int contenders;     /* threads that want the lock */
    _Atomic int driving;        /* somebody has the progress role: 1 a caller, 2 the background thread */
    _Atomic int want_role;      /* a user thread waits for the background thread to give it up */
    int sleeping;               /* the driver is in epoll_wait */
    int armed;                  /* peers must wake this process */
    int bg_forever;             /* the background thread sleeps without a limit */
    _Atomic uint64_t drive_seq; /* counts ends of driving */
    _Atomic uint32_t nasync;    /* requests that nobody may be waiting for */
    _Atomic int bg_lazy;        /* the background thread looks less often: hr_bg_rouse */
    struct hr_domain *domains[HR_MAX_DOMAINS];
    uint32_t domain_conns[HR_MAX_DOMAINS];
    struct hr_class classes[HR_MAX_DOMAINS]; /* of what is connected from now on */
    int ndomains;
    uint32_t pass;
    int epfd, kickfd, bgfd, donefd, remarkfd;
    int spin_ns, spin_now, yield;
    uint64_t rx_bulk; /* that came, on all connections */
    uint64_t same;    /* payloads so far that go to several peers: hr_msg.same */
    struct hr_link conns, active, owing, dead, comms, waiters;
    struct hr_link work[HR_PRIORITIES];
    uint32_t nwork;
    struct hr_request *posted[HR_MATCH_CHAINS];
    struct hr_link unexpected[HR_MATCH_CHAINS];
    struct hr_link spare[HR_SPARES]; /* struct hr_umsg that have been free before, by room for payload */
    size_t spare_bytes;
    struct hr_link ready; /* runs with instructions to start */
    uint32_t nconns, nposted;

    _Atomic uint64_t *ledger;
    struct hr_xfer **xfers;
    uint32_t nxfers, xfer_free; /* free list by index, threaded through remote */
    uint64_t *retired;
    uint32_t nretired, retired_cap;
    struct hr_request *done_head, *done_tail;
    int done_armed;
    struct hr_remark remarks[HR_REMARKS]; /* by number: those that nobody has taken are lost to newer ones */
    uint32_t remark_head, remark_tail;
    pthread_t bg;
    struct hr_turns turns;
    int bg_running, stop;
    int bg_deep;                   /* the background thread looks no more: hr_watch_driven, hr_watch_left */
    int deep_calls, deep_long;     /* that ended since bgfd was set; they last longer than a millisecond */
    int64_t deep_left, deep_until; /* when one has ended last; what bgfd is set to, 0: nothing */
    _Atomic uint64_t count_eager, count_pull, count_push, count_seg, count_lent, count_unexpected, count_sleeps,
        count_stale, count_returned, count_shared, count_fused, count_aside;
};

static inline void hr_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The lock is mostly held for less than a microsecond, but a driver takes it again at once: so those who wait for it
 * are counted, and a driver that sees any steps back until one was let in (progress.c: breathe). */
static inline void hr_let_in(struct hr_engine *engine) {
    atomic_fetch_sub(&engine->contenders, 1);
    atomic_fetch_add(&engine->let_in, 1);
}
static inline void hr_lock(struct hr_engine *engine) {
    if (pthread_mutex_trylock(&engine->mutex) == 0) return;
    atomic_fetch_add(&engine->contenders, 1);
    for (int i = 0; i < 200; i++) {
        hr_relax();
        if (pthread_mutex_trylock(&engine->mutex) == 0) {
            hr_let_in(engine);
            return;
        }
    }
    pthread_mutex_lock(&engine->mutex);
    hr_let_in(engine);
}
static inline int hr_contended(struct hr_engine *engine) {
    return atomic_load_explicit(&engine->contenders, memory_order_relaxed) != 0;
}
static inline void hr_unlock(struct hr_engine *engine) { pthread_mutex_unlock(&engine->mutex); }

/* Written under the lock alone: no locked instruction, which would wait for all stores before it. */
#define HR_ADD(word, n) \
    atomic_store_explicit(&(word), atomic_load_explicit(&(word), memory_order_relaxed) + (n), memory_order_relaxed)
#define HR_COUNT(engine, what) HR_ADD((engine)->count_##what, 1)

/* progress.c */
void hr_waiter_signal(struct hr_engine *engine, struct hr_waiter *waiter);
int hr_pass(struct hr_engine *engine, struct hr_conn *hint);
void hr_work_add(struct hr_engine *engine, struct hr_work *work, int priority);
void hr_work_remove(struct hr_engine *engine, struct hr_work *work);
void hr_work_turn(struct hr_engine *engine, struct hr_work *work);
void hr_kick(struct hr_engine *engine);         /* after posting: whoever sleeps must look at new work */
int hr_in_background(struct hr_engine *engine); /* of the thread that asks */
hr_status hr_bg_start(struct hr_engine *engine);
void hr_bg_stop(struct hr_engine *engine);
/* watch.c; the lock is held on entry and return. */
#define HR_TICK_MS 2 /* without anybody who drives, before the background thread does */
void hr_watch(struct hr_engine *engine, uint64_t *seen); /* until nobody has driven for a tick; seen: drive_seq */
void hr_watch_deep(struct hr_engine *engine, uint64_t *seen);
void hr_watch_driven(struct hr_engine *engine); /* where bg_deep: a caller takes the role; */
void hr_watch_left(struct hr_engine *engine);   /* leaves it, to nobody */
void hr_watch_rest(struct hr_engine *engine, int timeout_ms);
void hr_watch_end(struct hr_engine *engine);
void hr_bg_rouse(struct hr_engine *engine); /* it looks every tick again, beginning now */

/* progress.c */
/* Drives until cond says 1 or the deadline passes. Lock held. */
hr_status hr_drive_until(struct hr_engine *engine, int (*cond)(struct hr_engine *, void *), void *arg,
                         int64_t deadline);

/* conn.c */
/* The first rail of a channel, and any, which is made where it is the next. NULL. */
struct hr_conn *hr_conn_find(struct hr_engine *engine, uint64_t peer_id, uint32_t channel);
struct hr_conn *hr_conn_get(struct hr_engine *engine, uint64_t peer_id, uint32_t channel, int rail);
static inline struct hr_conn *hr_conn_rail(struct hr_conn *first, unsigned lane) {
    return first->nrails == 1 ? first : first->rails[lane % (unsigned)first->nrails];
}
int hr_conn_pump(struct hr_conn *conn); /* 1: more would have gone */
void hr_conn_send_ctl(struct hr_conn *conn, struct hr_hdr *hdr, size_t len);
hr_status hr_conn_post(struct hr_conn *conn, struct hr_hdr *h, size_t hdr_len, const void *payload, size_t len,
                       void *cookie);
hr_status hr_conn_post_segment(struct hr_conn *conn, struct hr_hdr *h, uint32_t id, const void *payload, size_t len,
                               void *cookie);
void hr_conn_owe(struct hr_conn *conn, uint32_t credit, uint32_t ack);
void hr_conn_ask_sooner(struct hr_conn *conn); /* where the window has become too small for what was asked */
void hr_conn_asked(struct hr_conn *conn, uint32_t every);
void hr_conns_acknowledge(struct hr_engine *engine);
int hr_conn_may_hold(const struct hr_conn *conn, uint64_t len); /* the peer, of what it has not asked for */
int hr_conn_charge(struct hr_conn *conn, uint64_t cost);        /* 0: over the peer's credit, the connection is lost */
void hr_conn_activate(struct hr_conn *conn);
hr_status hr_conn_send(struct hr_conn *conn, struct hr_request *req);
/* A message that is made where it is sent from and in the message, by hr_msg.fill. 0: it cannot go at once, nor does
 * it. */
int hr_conn_send_made(struct hr_conn *conn, struct hr_request *req, void (*fill)(void *, void *), void *cookie);
void hr_conn_unqueue_send(struct hr_conn *conn, struct hr_request *req);
int hr_conn_idle(struct hr_conn *conn, int delivered);
void hr_conn_free(struct hr_conn *conn);

uint64_t hr_credit_max(const struct hr_conn *conn);

/* window.c */
void hr_window_sent(struct hr_conn *conn, uint64_t nbytes);
void hr_window_acked(struct hr_conn *conn, uint64_t nbytes);
void hr_window_writes(struct hr_conn *conn, uint64_t nbytes);  /* the same for writes that the provider confirms, */
void hr_window_wrote(struct hr_conn *conn, uint64_t nbytes);   /* when it does, */
void hr_window_forgets(struct hr_conn *conn, uint64_t nbytes); /* and when it never will */
void hr_window_mixed(struct hr_conn *conn, int priority);      /* a message of another priority than the one before */
int hr_window_one_way(const struct hr_conn *conn,
                      int priority);        /* whether bulk may count on more of it: hr_rma.one_way */
void hr_window_probe(struct hr_conn *conn); /* bulk was cut off on its way: what of it is never acknowledged? */
void hr_window_probed(struct hr_conn *conn, const struct hr_hdr *probe);
void hr_window_echoed(struct hr_conn *conn, const struct hr_hdr *echo);
static inline int hr_window_open(struct hr_conn *conn) { return !conn->caps->window || conn->inflight < conn->window; }
/* Whether so much may leave in one piece: no more than may be on its way; of what is long, beside what is. */
static inline int hr_window_fits(const struct hr_conn *conn, uint64_t len) {
    uint64_t before = len > HR_WINDOW_LONG ? conn->inflight : 0;
    return !conn->caps->window || before + len <= conn->window;
}

/* sink.c */
extern const struct hr_sink hr_engine_sink;
void hr_conn_lost(struct hr_conn *conn, hr_status why, const char *detail);
void hr_conn_no_import(struct hr_conn *conn, hr_status why, const char *what);
void hr_conn_cut(struct hr_conn *conn);       /* from now on no byte of ours is read or written for this peer */
void hr_conns_bury(struct hr_engine *engine); /* after progress, and before an API call returns */
void hr_remark_add(struct hr_engine *engine, enum hr_remark_kind kind, struct hr_conn *conn, const char *text);

/* match.c */
void hr_match_arrived(struct hr_conn *conn, const struct hr_hdr *h, const void *payload, size_t len);
void hr_match_skip(struct hr_conn *conn, const struct hr_hdr *h);
int hr_match_post(struct hr_engine *engine, struct hr_request *req);   /* 1: it waits for its message */
void hr_match_again(struct hr_engine *engine, struct hr_request *req); /* its message was withdrawn */
void hr_match_unpost(struct hr_engine *engine, struct hr_request *req);
void hr_match_keep_break(struct hr_conn *conn, const struct hr_hdr *h); /* of a communicator not open here, yet */
void hr_match_take_break(struct hr_comm *comm);
void hr_match_purge_comm(struct hr_engine *engine, uint64_t comm_id);
void hr_match_purge_conn(struct hr_engine *engine, struct hr_conn *conn);
void hr_match_close(struct hr_engine *engine);
void hr_match_forget(struct hr_conn *conn); /* what came before its turn */
void hr_match_cancel(struct hr_conn *conn, uint32_t sreq, uint64_t comm, uint64_t tag);
void hr_match_strayed(struct hr_comm *comm, struct hr_conn *conn);
struct hr_conn *hr_match_stray(struct hr_comm *comm, uint64_t seq); /* of a run that has all it wanted */
uint8_t hr_match_bucket(uint64_t comm, uint64_t tag);

/* onesided.c */
#define HR_IS_NOTE(value) ((value) >> 63)
hr_status hr_rma_segment(struct hr_conn *conn, struct hr_xfer *x); /* as hr_xfer_send_segment */
void hr_note_arrived(struct hr_conn *conn, uint64_t value);
int hr_exposes(struct hr_engine *engine, const void *addr, size_t len); /* any of it, to anybody */
hr_status hr_onesided_open(struct hr_comm *comm);
void hr_onesided_close(struct hr_comm *comm);

/* request.c */
enum hr_req_kind { HR_REQ_SEND = 1, HR_REQ_RECV, HR_REQ_RUN, HR_REQ_RMA, HR_REQ_NOTE };
enum { HR_RECV_REDUCE = 1, HR_RECV_SWAP = 2, HR_RECV_BORROW = 4, HR_RECV_SCALE = 8, HR_RECV_NT = 16 };
enum { HR_RECV_ANY = 32 /* from anybody */, HR_RECV_FOLD = 64 /* hr_run_fold */, HR_RECV_RETURN = 128 };
enum { HR_QUEUED_NO, HR_QUEUED_POSTED /* receive in a chain */, HR_QUEUED_SEND, HR_QUEUED_PROVIDER };
/* buf, len, tag, sig and the caller's fields are set; flags of a receive in rflags */
void hr_send_start(struct hr_comm *comm, struct hr_request *req, int dst, unsigned lane);
void hr_recv_start(struct hr_comm *comm, struct hr_request *req, int src, unsigned lane);
void hr_request_init(struct hr_comm *comm, struct hr_request *req, int kind);
/* The same, and pending from now on; 0: the communicator is broken, and it has ended. */
int hr_request_begin(struct hr_comm *comm, struct hr_request *req, int kind);
void hr_finish(struct hr_engine *engine, struct hr_request *req, hr_status status);
void hr_fail(struct hr_engine *engine, struct hr_request *req, hr_status status, int peer, int phase,
             struct hr_conn *conn);
/* Ends it wherever it is. */
void hr_abort_request(struct hr_engine *engine, struct hr_request *req, hr_status status, int peer, int phase,
                      struct hr_conn *conn);

void hr_settle(struct hr_engine *engine); /* before an API call unlocks */

/* comm.c */
struct hr_comm *hr_comm_find(struct hr_engine *engine, uint64_t id);
int hr_comm_retired(struct hr_engine *engine, uint64_t id);
void hr_comm_on_break(struct hr_comm *comm, struct hr_conn *conn, const struct hr_hdr *h);
int hr_comm_rank_of(struct hr_comm *comm, struct hr_conn *conn);
void hr_comm_break_locked(struct hr_comm *comm, hr_status status, int peer, int phase, const char *provider,
                          const char *detail, int tell);
/* A collective is given up here: the others hear which, and why. */
void hr_comm_give_up(struct hr_comm *comm, hr_status status, uint64_t sequence);
void hr_comm_free(struct hr_comm *comm);

/* run.c */
void hr_runs_drain(struct hr_engine *engine); /* starts every instruction that may start */
void hr_runs_fail(struct hr_comm *comm);      /* the communicator is broken: start nothing more */
void hr_runs_end(struct hr_comm *comm);       /* what they had started is aborted: finish them */
double hr_run_scale(struct hr_request *req);
uint64_t hr_run_same(const struct hr_request *req); /* of a SEND with HR_REQ_SAME: hr_msg.same */
int hr_run_active(struct hr_comm *comm, uint64_t seq);
uint64_t hr_run_sequence(const struct hr_request *req); /* of a run */
void hr_run_unheard(struct hr_request *req);            /* not HR_REQ_HEARD, after all; of a RECV */
uint64_t hr_run_bytes(const struct hr_request *req);    /* of the whole result; of a RECV */
int hr_run_waits(const struct hr_request *req);         /* whether the caller does; of a RECV */

#endif
