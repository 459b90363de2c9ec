/* bond.h - several devices as one domain, several connections as one endpoint: lanes, one for each rail. */
#ifndef HR_VERBS_BOND_H
#define HR_VERBS_BOND_H

/*
 * rails.md says how it works and why.
 *
 *   bond.c       the domain: its rails, memory, progress, sleeping
 *   bond_ep.c    the life of an endpoint; lanes up, lost, handed over, called again
 *   bond_spare.c the spare lane: called, used, left
 *   bond_send.c  messages, notices, what ends tell each other of lanes
 *   bond_rma.c   reads, writes, atomics, in stripes
 *   bond_cut.c   how these are cut
 *   bond_watch.c lanes on which nothing comes back
 *   bond_mem.c   registrations, descriptors
 *
 * A rail is a domain of its own (verbs.h), a lane an endpoint of that, and the bond is the sink of their events. They
 * are ended from hr_bond_progress alone, or from the vtable: never inside a callback. The spare rail, where the user
 * allows it, is of device "tcp" (sim.h): its lane stands by, and is used while no other is up.
 */

#include "providers/verbs/verbs.h"

enum {
    HR_BOND_SPARE = HR_VERBS_RAILS, /* number of the spare rail, behind those of devices */
    HR_BOND_RAILS = HR_BOND_SPARE + 1,
    HR_BOND_LOG = HR_VERBS_RECVS, /* messages that may be on their way: more the peer has no receives for */
    HR_BOND_OPS = 64,
    HR_BOND_ADDRESSES = 3, /* of a rail: those of all rails are one address of HR_MAX_ADDR bytes */
};

/* Before the header of every message. */
enum hr_bond_kind { HR_BOND_MSG = 1, HR_BOND_NOTICE, HR_BOND_WORD };
struct hr_bond_prefix {
    uint32_t kind, zero;
};
struct hr_bond_notice {
    struct hr_bond_prefix prefix;
    uint64_t value, nbytes;
};
/* What an end says of its lanes: all of it, so that one word takes the place of those that were lost. */
struct hr_bond_word {
    struct hr_bond_prefix prefix;
    uint64_t heard; /* messages and notices that came, on whatever lane */
    struct {
        uint32_t life,
            down; /* down: the queue pair that was this life's is broken, and all that it brought is counted */
    } lanes[HR_BOND_RAILS];
    uint32_t asks, zero; /* for such a word in answer */
};

enum hr_bond_stage {
    HR_BOND_CALLING, /* or waiting to be called */
    HR_BOND_UP,
    HR_BOND_LOST, /* told of by the rail, and not broken yet */
    HR_BOND_DOWN, /* broken here; the peer has not said that it is there */
    HR_BOND_REST, /* at both ends; called again in a while */
    HR_BOND_NONE  /* one of the ends has no such rail */
};
struct hr_bond_ep;
struct hr_bond_lane {
    struct hr_bond_ep *bond;
    struct hr_verbs_ep *ep; /* NULL: down, or resting */
    enum hr_bond_stage stage;
    int index;
    uint32_t life;
    int their_down;     /* the peer has broken this life */
    int64_t due, pause; /* when it is called again, or a call is given up; how long it rests next time */
    uint64_t out;       /* bytes that are posted and have not ended */
    uint64_t moved;     /* that have ended since `since` */
    int64_t since, last;
    double rate;    /* bytes per ns while it was busy; 0: not known */
    uint32_t ended; /* work requests, when it was looked at last */
    int waits;      /* for the end of one, then; */
    int silent;     /* looks in a row at which none had come; */
    int missed;     /* of them those at which one had come on another lane */
};

/* A part of an operation, on one lane; the cookie by which that knows it. */
enum hr_bond_part { HR_BOND_WAITS, HR_BOND_POSTED, HR_BOND_STUCK, HR_BOND_ENDED };
struct hr_bond_op;
struct hr_bond_stripe {
    struct hr_bond_op *op;
    enum hr_bond_part part; /* STUCK: its lane was lost, and the peer may still be taking it in */
    int lane;
    uint64_t offset, len;
};
enum hr_bond_work { HR_BOND_WRITE, HR_BOND_READ, HR_BOND_ATOMIC };
struct hr_bond_op {
    struct hr_link link; /* ep.ops, in the order of posting; else ep.free */
    enum hr_bond_work work;
    int notify;
    hr_status status;
    uint8_t *local;
    uint64_t len, value;
    uint64_t told; /* when the peer has heard so many messages, it was told of this write; 0: none is behind it yet */
    const struct hr_bond_reg *reg; /* of the local memory, or NULL */
    struct hr_rmem remote;
    uint64_t offset;
    void *cookie;
    void *copy; /* it was taken back: what its bytes come from, and nobody is told */
    struct hr_bond_stripe stripes[HR_BOND_RAILS];
    int n;
};

struct hr_bond_entry { /* a message, as long as it may have to be sent again */
    uint32_t hdr_len, len;
    uint8_t bytes[HR_VERBS_HDR + HR_VERBS_MESSAGE];
};

enum hr_bond_state { HR_BOND_NEW, HR_BOND_CONNECTING, HR_BOND_OPEN, HR_BOND_OVER, HR_BOND_CLOSED };
struct hr_bond_ep {
    struct hr_ep base;
    struct hr_link link, pending; /* bond.eps; bond.pending while progress has something to do for it */
    enum hr_bond_state state;
    int active, n;
    int plain; /* the peer is no bond: its endpoint and ours, lane `first`, are what they would be without one */
    uint32_t stream;
    uint64_t session; /* the same at both ends, by the choice of who calls; 0: nobody has called yet */
    int dscp, priority;
    uint8_t addr[HR_MAX_ADDR];
    size_t addr_len;
    hr_status why; /* of the lane that was lost last */
    int told;      /* the engine knows that it is over */
    char detail[200];

    struct hr_bond_lane lanes[HR_BOND_RAILS];
    int first;              /* the lane of messages; -1: none is up */
    unsigned owing;         /* lanes that messages went by and that are not handed over: none leaves until they are */
    int word;               /* the peer must hear of our lanes */
    int asked;              /* the peer for a word, behind the last message on the spare lane */
    int64_t leave_by;       /* the spare lane is being left, and is given up then; 0: it is not */
    int64_t open_by;        /* a rail is up: the engine hears of it when the spare lane is, or then; 0: none is yet */
    int fell, last;         /* the engine knows that we are on the spare lane; the lane that was lost last */
    uint64_t logged, sent;  /* messages so far; of them those that were posted on `first` or landed */
    uint64_t landed, heard; /* of ours, as the peer said last; of the peer's */
    struct hr_bond_entry *log; /* by number */
    int refused;
    struct hr_bond_op ops_room[HR_BOND_OPS];
    struct hr_link ops, spare;
    uint32_t revoked[HR_VERBS_REVOCATIONS], nrevoked; /* registrations of the peer's that are not written to any more */
};

/* A registration of the user's: with every rail. */
struct hr_bond_reg {
    struct hr_mem mems[HR_BOND_RAILS];
};

struct hr_bond {
    struct hr_domain base;
    struct hr_verbs_domain *rails[HR_BOND_RAILS]; /* NULL: it did not open */
    int n, nearest;                               /* n: numbers of rails */
    int64_t silence;                              /* after which others count a peer lost; 0: lanes are not watched */
    int on_spare;                                 /* endpoints whose messages go by the spare lane */
    int opened;                                   /* devices */
    uint8_t address[HR_MAX_ADDR];
    size_t address_len;
    uint32_t registrations;
    int epfd, timer;
    int64_t tick;                 /* period of the timer; 0: it rests */
    int in_progress, look, again; /* again: progress has something to do that no descriptor tells */
    unsigned turn;
    struct hr_link eps, pending;
    struct {                 /* since it was opened; for tests and for people */
        uint64_t lost, back; /* lanes that were up; that came up again */
        uint64_t resent;     /* messages */
        uint64_t redone;     /* stripes */
        uint64_t fell;       /* times that no lane but the spare one was left */
    } counts;
};

static inline struct hr_bond *hr_bond_of(struct hr_ep *ep) { return (struct hr_bond *)ep->domain; }

extern const struct hr_provider hr_provider_verbs;

/* bond.c */
/* A domain on n devices, and the spare one where that is asked for; all of them are its own from now on, even if that
 * fails. Those that cannot be opened are left, as are those of which `left` tells. */
hr_status hr_bond_open(const struct hr_domain_params *params, const struct hr_verbs_options *options,
                       const struct hr_verbs_found *found, int n, const char left[HR_LEFT], struct hr_domain **domain_p,
                       char detail[256]);
/* Progress has something to do for this endpoint. */
void hr_bond_pending(struct hr_bond_ep *ep);
/* Lanes are to be called, calls to be given up, what is under way to be looked at, in a while. */
#define HR_BOND_TICK (100 * HR_VERBS_MS)
void hr_bond_tick_start(struct hr_bond *bond);
/* The engine was refused, and may come again. */
void hr_bond_room_again(struct hr_bond_ep *ep);

/* bond_ep.c */
hr_status hr_bond_ep_create(struct hr_domain *domain, uint64_t peer_id, void *ctx, struct hr_ep **ep_p);
hr_status hr_bond_ep_connect(struct hr_ep *base, const void *addr, size_t addr_len, int active);
void hr_bond_ep_abort(struct hr_ep *base);
void hr_bond_ep_destroy(struct hr_ep *base);
hr_status hr_bond_ep_set_class(struct hr_ep *base, int dscp, int priority);
uint64_t hr_bond_ep_unsent(struct hr_ep *base);
/* What a rail tells of a lane. */
void hr_bond_on_state(struct hr_bond_lane *lane, hr_status status, const char *detail);
/* The peer has told of its lanes. */
void hr_bond_on_word(struct hr_bond_ep *ep, const struct hr_bond_word *word);
/* Over, with the reason; the engine is told from progress. */
void hr_bond_fail(struct hr_bond_ep *ep, hr_status status, const char *what);
void hr_bond_choose_first(struct hr_bond_ep *ep);
/* The engine hears that it is. */
void hr_bond_opened(struct hr_bond_ep *ep);
hr_status hr_bond_lane_open(struct hr_bond_lane *lane);
/* Breaks the lane's queue pair. Not inside a callback. */
void hr_bond_break(struct hr_bond_lane *lane);
/* Does what is pending; returns the number of events told. */
int hr_bond_run(struct hr_bond_ep *ep, int budget);
/* Calls again what is due. Returns when there is more to come; INT64_MAX: not before it is told of something. */
int64_t hr_bond_tick(struct hr_bond_ep *ep, int64_t now);
static inline int hr_bond_lane_up(const struct hr_bond_ep *ep, int i) {
    return i >= 0 && ep->lanes[i].stage == HR_BOND_UP;
}
/* HR_OK where operations may be posted. */
hr_status hr_bond_usable(const struct hr_bond_ep *ep);

/* bond_spare.c */
/* The lane of messages is another one from now on; -1: none. */
void hr_bond_set_first(struct hr_bond_ep *ep, int first);
/* A rail's lane is up. */
int hr_bond_rail_up(const struct hr_bond_ep *ep);
/* Calls the spare lane, which was not called so far. 0: there is none to be called. */
int hr_bond_call_spare(struct hr_bond_ep *ep);
/* The spare lane is about to stand by: without it the endpoint is not open yet. */
int hr_bond_awaits_spare(struct hr_bond_ep *ep);
/* Asked while it is not, from time to time; 1: it is to be asked again. */
int hr_bond_spare_is_late(struct hr_bond_ep *ep, int64_t now);
/* Messages go by the spare lane, and a rail is up: nothing is posted until they go by that. */
int hr_bond_leaving(const struct hr_bond_ep *ep);
/* Sees to it. */
void hr_bond_leave_spare(struct hr_bond_ep *ep);
/* Looked at from time to time while it is being left; 1: it has taken so long that the lane is to be given up. */
int hr_bond_leave_is_late(struct hr_bond_ep *ep, int64_t now);
/* Something that was posted on the lane has ended: if it is being left, that makes headway. */
void hr_bond_leave_goes_on(struct hr_bond_lane *lane);
/* The engine hears what carries the endpoint now, where that has changed. */
void hr_bond_tell_carrier(struct hr_bond_ep *ep);

/* bond_send.c */
hr_status hr_bond_post_send(struct hr_ep *base, const struct hr_msg *msg);
int hr_bond_send_notice(struct hr_bond_ep *ep, uint64_t value, uint64_t nbytes);
/* Sends what of the log has to be sent again, as far as there is room. */
void hr_bond_resend(struct hr_bond_ep *ep);
/* 0: it did not leave. */
int hr_bond_send_word(struct hr_bond_ep *ep);
/* By the lane of messages, behind them all: asks for one in answer. */
int hr_bond_ask_for_word(struct hr_bond_ep *ep);
void hr_bond_on_recv(struct hr_bond_lane *lane, const uint8_t *hdr, size_t hdr_len, const void *payload, size_t len);

/* bond_rma.c */
hr_status hr_bond_post_write(struct hr_ep *base, const struct hr_rma *rma);
hr_status hr_bond_post_read(struct hr_ep *base, const struct hr_rma *rma);
hr_status hr_bond_post_atomic(struct hr_ep *base, const struct hr_atomic *atomic);
hr_status hr_bond_cancel(struct hr_ep *base, void *cookie);
void hr_bond_ops_init(struct hr_bond_ep *ep);
void hr_bond_ops_drop(struct hr_bond_ep *ep);
void hr_bond_on_done(struct hr_bond_lane *lane, struct hr_bond_stripe *stripe, hr_status status);
void hr_bond_on_revoke(struct hr_bond_ep *ep, uint32_t serial);
/* 1: all that was written is there before what is posted on the lane of messages from now on. */
int hr_bond_written(const struct hr_bond_ep *ep);
/* The same, and all notices of it are gone: sends those that may go. */
int hr_bond_in_order(struct hr_bond_ep *ep);
/* A message has left behind all operations. */
void hr_bond_told(struct hr_bond_ep *ep);
/* The lane is broken here: what was on it is stuck. */
void hr_bond_ops_stick(struct hr_bond_ep *ep, int lane);
/* And at the peer: what was stuck there waits to be posted. */
void hr_bond_ops_free(struct hr_bond_ep *ep, int lane);
/* Posts what waits, and tells ends; returns the number of events. */
int hr_bond_ops_run(struct hr_bond_ep *ep, int budget);
/* Nothing of it waits, or can be told. */
int hr_bond_ops_idle(const struct hr_bond_ep *ep);
/* Bytes that wait to be posted, and notices. */
uint64_t hr_bond_ops_waiting(const struct hr_bond_ep *ep);

/* bond_cut.c */
/* Into stripes, for the lanes that are up; that of messages is. */
void hr_bond_cut(const struct hr_bond_ep *ep, struct hr_bond_op *op);
/* So many bytes were posted on the lane; have ended. */
void hr_bond_lane_busy(struct hr_bond_lane *lane, uint64_t len);
void hr_bond_lane_moved(struct hr_bond_lane *lane, uint64_t len);

/* bond_watch.c */
/* From now on it is looked at as long as anything is under way. */
void hr_bond_posted(struct hr_bond_ep *ep);
/* The lane is up. */
void hr_bond_watch_start(struct hr_bond_lane *lane);
/* How long the lane's work requests may be. */
void hr_bond_watch_rate(struct hr_bond_lane *lane);
/* Looks at all lanes, at every tick; breaks those that are dead. Returns whether anything is under way. */
int hr_bond_watch(struct hr_bond_ep *ep);

/* bond_mem.c */
hr_status hr_bond_mem_register(struct hr_domain *domain, void *addr, size_t len, uint32_t access, struct hr_mem *mem_p);
void hr_bond_mem_deregister(struct hr_domain *domain, struct hr_mem *mem);
hr_status hr_bond_mem_quiet(struct hr_ep *base, const struct hr_mem *mem);
hr_status hr_bond_mem_export(struct hr_ep *base, const struct hr_mem *mem, void *addr, size_t len,
                             struct hr_desc *desc_p);
hr_status hr_bond_mem_import(struct hr_ep *base, const struct hr_desc *desc, struct hr_rmem *rmem_p);
void hr_bond_mem_release(struct hr_ep *base, struct hr_rmem *rmem);
/* The peer's memory, as its rail of that number has it. */
struct hr_rmem hr_bond_rmem(const struct hr_rmem *remote, int rail);
uint32_t hr_bond_access(const struct hr_rmem *remote);

#endif
