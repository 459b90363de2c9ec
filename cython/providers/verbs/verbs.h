/* verbs.h - the provider's objects: domain, endpoint, what is under way on a queue pair; who may call what. */
#ifndef HR_VERBS_H
#define HR_VERBS_H

/*
 * verbs.c     the vtable; options, opening and closing of a domain
 * device.c    which device                                  address.c   the bytes by which peers reach a domain
 * paths.c     GIDs and ports, which pairs to try            endpoint.c  life of an endpoint
 * call.c      the TCP exchange that makes a connection      try.c       queue pairs tried until they carry packets
 * qp.c        queue pairs: made, brought up, broken         memory.c    registrations, descriptors, arenas
 * post.c      work requests out, and their ends             send.c      messages and credits
 * rma.c       reads, writes, atomics                        recv.c      what arrives
 * pool.c      receives, shared or not; promises             progress.c  polling, timers, sleeping
 * inject.c    faults, between here and the device           lib.c       libibverbs
 * removed.c   the device is taken away
 * sim*.c      the simulated device, and the spare one
 * bond*.c     several devices as one domain: bond.h
 *
 * Callbacks run in progress() alone. What happens elsewhere and must be told is noted in the endpoint, which is put on
 * the domain's ready list.
 */

#include <stdint.h>

#include "hr/auth.h"
#include "hr/clock.h"
#include "hr/door.h"
#include "hr/provider.h"
#include "providers/verbs/inject.h"
#include "providers/verbs/paths.h"
#include "providers/verbs/pool.h"

enum {
    HR_VERBS_ADDRESSES = 8,
    HR_VERBS_EPS = 4096,   /* endpoints of a domain */
    HR_VERBS_RECVS = 64,   /* messages that a peer may send at most before it hears of room */
    HR_VERBS_ALONE = 2,    /* endpoints that share no receives: so few pin no more so, and are faster on soft-RoCE */
    HR_VERBS_TOGETHER = 8, /* receives are posted again so many at once; and told of */
    HR_VERBS_SPARE =
        5, /* receives for control messages: two that tell of room (send.c), two of quiet.c, one to spare */
    HR_VERBS_SENDS = 64,    /* work requests of an endpoint that may be under way */
    HR_VERBS_SLOTS = 32,    /* buffers to send from, and to read into on behalf of memory that is not registered */
    HR_VERBS_ENTRIES = 256, /* work requests that are remembered: those that have ended and were not looked at, too */
    HR_VERBS_CTL = 6,       /* work requests beyond SENDS: control messages, a flush */
    HR_VERBS_OPS = 32,      /* reads and writes of an endpoint that are not posted in full */
    HR_VERBS_PREFIX = 8,
    HR_VERBS_HDR = HR_MAX_HDR + 8,                            /* of a message; what a bond adds included */
    HR_VERBS_MESSAGE = 8192 - HR_VERBS_HDR - HR_VERBS_PREFIX, /* with all before it, whole packets: two of 4 KiB */
    HR_VERBS_INLINE = 192,
    HR_VERBS_CTL_BYTES = 64,
    HR_VERBS_REVOCATIONS = 64, /* that an endpoint remembers: those before were told to the engine long ago */
    HR_VERBS_STRIDE = (HR_VERBS_MESSAGE + HR_VERBS_HDR + HR_VERBS_PREFIX + 63) / 64 * 64,
    HR_VERBS_BATCH = 16,
    HR_VERBS_NUMBERS = 256 /* lists of endpoints by the number of their queue pairs */
};
#define HR_VERBS_MS 1000000LL
#define HR_VERBS_NOBODY UINT64_MAX /* wr_id of a completion that was seen to; others have bit 31 for a receive */

/* Before every message. Then the header, then the payload. */
enum hr_verbs_kind {
    HR_VERBS_MSG = 1,
    HR_VERBS_NOTIFY,
    HR_VERBS_CREDIT,
    HR_VERBS_REVOKE,
    HR_VERBS_REVOKED,
    HR_VERBS_HELLO
};
struct hr_verbs_prefix {
    uint8_t kind, hdr_len;
    uint8_t credit, hungry; /* messages more that it may be sent; the sender has run out of those that it may send */
    uint32_t len;           /* of the payload. REVOKE, REVOKED: which registration */
};
struct hr_verbs_notice { /* header of NOTIFY */
    uint64_t value, nbytes;
};

/* Kinds of source. */
enum hr_verbs_source_kind {
    HR_VERBS_LISTENER,
    HR_VERBS_CALLER,
    HR_VERBS_CALL,
    HR_VERBS_EP,
    HR_VERBS_TIMER,
    HR_VERBS_WAKE,
    HR_VERBS_CHANNEL,
    HR_VERBS_ASYNC,
    HR_VERBS_REMOVED
};
/* The exchange of one connection: from the first for who calls, from the last for who was called. */
enum hr_verbs_step { HR_VERBS_CONNECTING, HR_VERBS_PROVING, HR_VERBS_OPENING, HR_VERBS_TRYING };
struct hr_verbs_ep;
struct hr_verbs_call {
    struct hr_source source;
    struct hr_link link; /* domain.calls */
    struct hr_verbs_ep *ep;
    enum hr_verbs_step step;
    int active;
    struct hr_handshake hs;
    struct hr_verbs_open open, own; /* the peer's, ours */
    struct hr_verbs_word word;
    uint32_t have;    /* bytes of open, or of word */
    int64_t deadline; /* 0: none */
    union hr_sockaddr list[HR_VERBS_ADDRESSES];
    int n, current;
    hr_status worst;
    char why[200];

    struct hr_verbs_paths paths; /* ours as they were when the peer was told of them */
    struct hr_verbs_pair pairs[HR_VERBS_PAIRS];
    int npairs, turn;
    int ready, greeted; /* of this turn: 1 here, 2 at both ends; greetings that were sent */
    int acked, heard;   /* of them those that the peer's device has; those that came from it */
    int good, their_good;
};

/* A registration of the device's: an arena's is shared by all that lies in it. */
struct hr_verbs_mr {
    struct hr_verbs_mr *next;
    struct ibv_mr *mr;
    uint64_t memory; /* id of the arena, or of kept memory; 0: of one hr_mem alone */
    int kept;        /* outside arenas */
    uint32_t users;  /* not counted: local buffers in arenas */
};

/* One work request that the device has. */
enum hr_verbs_work {
    HR_VERBS_W_COPY, /* from a buffer or inline: nobody is told */
    HR_VERBS_W_RMA,
    HR_VERBS_W_ATOMIC
};
struct hr_verbs_op;
struct hr_verbs_wqe {
    enum hr_verbs_work work;
    uint8_t slots; /* buffers that become free with it, 0 or 1 */
    uint8_t ctl;   /* not counted among SENDS */
    uint32_t bytes;
    void *cookie;           /* ATOMIC */
    struct hr_verbs_op *op; /* RMA; NULL: it was taken back */
    void *to;               /* where what came into the buffer goes; NULL: nothing did */
    const uint8_t *from;
};

/* A read or write that returned HR_INPROGRESS. */
struct hr_verbs_op {
    struct hr_link link; /* ep.queue until it is posted in full */
    int is_read, notify, in_use, posted_all;
    uint8_t *local;
    uint64_t len, posted, open; /* open: work requests without an end */
    uint32_t lkey;              /* 0: through the buffers */
    struct hr_verbs_mr *held;   /* kept memory that it goes from or to */
    uint64_t addr;
    uint32_t rkey, serial;
    uint64_t value;
    void *cookie;
    void *copy; /* it was taken back: what is left of it, and nobody is told */
};

enum hr_verbs_state {
    HR_VERBS_NEW,
    HR_VERBS_WAITING, /* passive, no caller yet */
    HR_VERBS_CALLING,
    HR_VERBS_UP,
    HR_VERBS_ENDING, /* over; what the peer sent before is still delivered */
    HR_VERBS_LOST,
    HR_VERBS_CLOSED
};

struct hr_verbs_ep {
    struct hr_ep base;
    struct hr_source source; /* the socket of the exchange: its end is the peer's end */
    enum hr_verbs_state state;
    struct hr_link link, ready;
    uint32_t serial; /* in work request ids: index and generation */
    int active;
    uint32_t stream;
    struct hr_bond_ep *bond; /* whose lane it is, or NULL */
    uint64_t session, life;  /* of the bond; session 0: whichever calls */
    int dscp, priority;      /* -1: the device's default */
    int classless;           /* the device did not take them */
    struct hr_verbs_call *call;
    int64_t ended;
    const char *end_why;

    struct hr_link end; /* domain.ending */
    int told;
    hr_status tell;
    char detail[200];

    struct ibv_qp *qp;
    uint32_t psn, inline_max, longest; /* longest: bytes of a read or write in one work request; 0: any */
    uint64_t nonce, peer_nonce;
    struct hr_verbs_ep *next; /* in a list of domain.numbers */
    uint8_t *slab;            /* slots, and room for control messages; pinned */
    size_t slab_len;
    struct ibv_mr *slab_mr;
    struct hr_verbs_pool *pool;
    uint32_t promised, turn; /* see pool.h */
    int doubted;             /* its queue pair has taken receives, and may keep one */
    struct hr_verbs_inject_ep inject;

    struct hr_verbs_wqe wqes[HR_VERBS_ENTRIES];
    uint32_t head, tail;           /* of wqes, counters */
    uint32_t ctl, ctl_turn;        /* of them beyond SENDS; whose buffer is next */
    uint32_t slot_head, slot_tail; /* counters */
    uint32_t signaled;             /* tail behind the last work request whose end the device will tell */
    uint64_t unsent;
    uint32_t room;                                    /* messages that the peer has receives for */
    uint32_t upper_out, upper_in;                     /* halves of the last notice's value */
    uint32_t revoked[HR_VERBS_REVOCATIONS], nrevoked; /* registrations of the peer's that are not written to any more */
    uint32_t answer, answered;                        /* REVOKED that could not leave yet; the last that came */
    int refused;                                      /* something, for lack of room of any kind */
    int hungry;                                       /* it was for lack of `room`, and the peer does not know yet */
    uint32_t owed;                                    /* of `promised`, what the peer does not know of */

    struct hr_verbs_op ops[HR_VERBS_OPS];
    struct hr_link queue;
};

struct hr_verbs_counts { /* since the domain was opened; for tests and for people */
    uint64_t registered; /* calls of reg_mr for the user's memory */
    uint64_t direct;     /* bytes that the device moved from or to the user's memory */
    uint64_t staged;     /* bytes of reads and writes that were copied */
    uint64_t rnr;        /* receives that were missing: must stay 0 */
    uint64_t receives;   /* bytes of memory for them, now */
    uint64_t held, most; /* bytes outside arenas that the device has pinned, buffers of ours among them: now, ever */
};

struct hr_verbs_domain {
    struct hr_domain base;
    const struct hr_verbs_backend *verbs;
    const struct hr_auth *auth;
    uint64_t self_id;
    struct ibv_context *ctx; /* NULL, as are the next three: the device is gone, and was closed */
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    uint32_t cq_used, cq_stale; /* completions that may come; of them for queue pairs that are gone */
    int shares;                 /* the device has shared receive queues, and the user wants them */
    uint32_t alone, alone_most; /* endpoints that have their receives for themselves all the same; so many may */
    struct hr_link pools;       /* those that are shared */
    struct hr_verbs_ep *numbers[HR_VERBS_NUMBERS];
    struct ibv_device_attr attr;
    struct hr_verbs_wish wish;
    char *ifname;                 /* of the wish */
    struct hr_verbs_paths paths;  /* as the device had them last */
    struct hr_verbs_path used;    /* by the connection that was made last; port 0: none was */
    char name[64];                /* of the device */
    char reason[HR_VERBS_REASON]; /* why this device */
    char fallback[200];           /* the last pair that did not do, and why; "": all did */
    int is_sim, is_tcp, software;
    char behind[HR_VERBS_BEHIND][IF_NAMESIZE]; /* is_tcp: interfaces to be called at when no other is left */
    int addresses;                             /* at most so many to be called at */
    uint32_t registrations;                    /* so far: names them to peers */
    uint64_t pin, pinned;                      /* bytes outside arenas: option, now */

    struct hr_iface *ifaces; /* addresses of this host */
    int nifaces;
    struct hr_poll poll;
    struct hr_source timer, wake, comp, async, removed;
    int64_t tick; /* of the timer; 0: off */
    int in_progress, look;
    int room; /* came back to an endpoint that had refused for lack of it: somebody may want to try again */
    struct hr_link eps, ready, calls, ending;
    struct hr_door door;
    int calling; /* calls, in either direction */
    struct hr_verbs_ep *table[HR_VERBS_EPS];
    uint32_t generation[HR_VERBS_EPS];
    struct hr_verbs_mr *mrs; /* the one that was used last first */
    int64_t silence;         /* as the options have it, and the next */
    int ack_timeout;
    int keeps;            /* registrations of kept memory */
    uint64_t forgotten;   /* of kept memory, when it was looked at last */
    struct ibv_wc *stash; /* completions that were fetched and not looked at yet */
    int stashed, stash_at, stash_cap;
    unsigned turn;
    struct hr_verbs_inject inject;
    struct hr_verbs_counts counts;
    int gone; /* the device, under us */
};

/* What HRDMA_VERBS says. */
struct hr_verbs_options {
    struct hr_verbs_wish wish;
    uint64_t pin;
    struct hr_verbs_inject inject;
    int64_t silence; /* ns for which a peer may be silent before others count it lost; 0: nobody counts */
    int ack_timeout; /* an exponent; 0: as silence asks */
    int fallback;    /* to tcp, when no device is left */
    int own;         /* each endpoint has its receives for itself */
    int share;       /* none has */
};

static inline struct hr_verbs_domain *hr_verbs_domain_of(struct hr_ep *ep) {
    return (struct hr_verbs_domain *)ep->domain;
}

/* verbs.c */
/* A domain on one device, which is its own from now on, even if that fails. */
hr_status hr_verbs_domain_open(const struct hr_provider *self, const struct hr_domain_params *params,
                               const struct hr_verbs_options *options, const struct hr_verbs_found *found,
                               int addresses, struct hr_verbs_domain **d_p, char detail[256]);

/* device.c */
/* What a domain needs of its device. */
hr_status hr_verbs_device_open(struct hr_verbs_domain *d, char detail[256]);
/* With all that was registered; the domain stays. Nothing when it is closed. */
void hr_verbs_device_close(struct hr_verbs_domain *d);
/* No endpoint has anything of it. */
int hr_verbs_device_idle(const struct hr_verbs_domain *d);

/* removed.c */
/* The kernel tells of devices that are taken away: listens, where it may. */
void hr_verbs_removed_watch(struct hr_verbs_domain *d);
/* 1: it was this one. */
int hr_verbs_removed_event(struct hr_verbs_domain *d);

/* address.c */
/* Where this domain is called: addresses of the device's network, at most n. */
int hr_verbs_call_addresses(struct hr_verbs_domain *d, union hr_sockaddr *list, int n);
size_t hr_verbs_address_write(const struct hr_verbs_domain *d, void *bytes);
/* Of the first rail, where there are several. NULL among rails: no such number. */
int hr_verbs_address_read(const void *bytes, size_t len, union hr_sockaddr *list);
size_t hr_verbs_addresses_write(struct hr_verbs_domain *const *rails, int n, void *bytes);
/* How many numbers of rails it has; 0: it is that of one device. */
int hr_verbs_address_rails(const void *bytes, size_t len);
/* That of one rail, or NULL: there is none of that number. */
const void *hr_verbs_address_rail(const void *bytes, size_t len, int rail, size_t *len_p);

/* call.c */
hr_status hr_verbs_listen(struct hr_verbs_domain *d, char detail[256]);
hr_status hr_verbs_ep_connect(struct hr_ep *base, const void *addr, size_t addr_len, int active);
/* The same for a stream that was agreed on. */
hr_status hr_verbs_ep_call(struct hr_verbs_ep *ep, const void *addr, size_t addr_len, int active, uint32_t stream);
void hr_verbs_call_event(struct hr_verbs_domain *d, struct hr_verbs_call *call);
void hr_verbs_calls_tick(struct hr_verbs_domain *d, int64_t now);
void hr_verbs_call_free(struct hr_verbs_domain *d, struct hr_verbs_call *call);
/* Those that wait for an endpoint will wait in vain. */
void hr_verbs_calls_refuse(struct hr_verbs_domain *d);

/* try.c */
/* Both ends have told of themselves: the first pair is tried. */
void hr_verbs_try(struct hr_verbs_call *call);
void hr_verbs_try_event(struct hr_verbs_call *call);
/* Sends what of the greetings could not leave yet. */
void hr_verbs_try_greet(struct hr_verbs_call *call);
void hr_verbs_try_late(struct hr_verbs_call *call);
/* A completion of an endpoint that is being connected. 1: it was part of that. 0: it is for the connection, which is
 * open on both sides. */
int hr_verbs_try_completion(struct hr_verbs_ep *ep, const struct ibv_wc *wc);

/* endpoint.c */
hr_status hr_verbs_ep_create(struct hr_domain *domain, uint64_t peer_id, void *ctx, struct hr_ep **ep_p);
void hr_verbs_ep_abort(struct hr_ep *base);
void hr_verbs_ep_destroy(struct hr_ep *base);
hr_status hr_verbs_ep_set_class(struct hr_ep *base, int dscp, int priority);
uint64_t hr_verbs_ep_unsent(struct hr_ep *base);
void hr_verbs_ep_tell(struct hr_verbs_ep *ep, hr_status status);
/* The endpoint is over; the engine is told from progress. error: an errno, or 0. */
void hr_verbs_ep_fail(struct hr_verbs_ep *ep, hr_status status, const char *what, int error);
/* It is over, for that reason, when what has arrived by now is delivered. */
void hr_verbs_ep_end(struct hr_verbs_ep *ep, const char *why);
/* Connected: the socket goes from its call to it. The engine is told from progress. */
void hr_verbs_ep_up(struct hr_verbs_ep *ep);
/* Completions that are on their way to it are nobody's from now on. */
void hr_verbs_ep_renew(struct hr_verbs_ep *ep);
/* HR_OK where operations may be posted. */
hr_status hr_verbs_usable(const struct hr_verbs_ep *ep);
/* Whose completion it is, or NULL: nobody's any more. */
struct hr_verbs_ep *hr_verbs_ep_find(struct hr_verbs_domain *d, const struct ibv_wc *wc);
static inline int hr_verbs_is_recv(const struct ibv_wc *wc) { return wc->wr_id >> 31 & 1; }
static inline uint32_t hr_verbs_buffer_of(const struct ibv_wc *wc) { return (uint32_t)wc->wr_id & 0x7fffffff; }

/* qp.c */
/* A new one, for that path; the endpoint is as if nothing had ever been sent on it. */
hr_status hr_verbs_qp_open(struct hr_verbs_ep *ep, const struct hr_verbs_path *path, char why[160]);
/* To the state in which it may send. word: the peer's TRY. */
hr_status hr_verbs_qp_up(struct hr_verbs_ep *ep, const struct hr_verbs_path *path, const struct hr_verbs_open *peer,
                         const struct hr_verbs_end *end, const struct hr_verbs_word *word, char why[160]);
int hr_verbs_rd_atomic(const struct hr_verbs_domain *d);
/* Room in the completion queue for so many more; 0: errno. */
int hr_verbs_completions_reserve(struct hr_verbs_domain *d, uint32_t n);
/* The memlock limit in words, where an errno may come of it: "" or "; ...". */
const char *hr_verbs_memlock_text(int error, char text[120]);
/* On return the device touches none of this endpoint's memory any more. */
void hr_verbs_qp_break(struct hr_verbs_ep *ep);
/* Its end, with all that came from it; the slab stays for another one. */
void hr_verbs_qp_drop(struct hr_verbs_ep *ep);
void hr_verbs_qp_close(struct hr_verbs_ep *ep);

/* memory.c */
hr_status hr_verbs_mem_register(struct hr_domain *domain, void *addr, size_t len, uint32_t access,
                                struct hr_mem *mem_p);
void hr_verbs_mem_deregister(struct hr_domain *domain, struct hr_mem *mem);
hr_status hr_verbs_mem_export(struct hr_ep *ep, const struct hr_mem *mem, void *addr, size_t len,
                              struct hr_desc *desc_p);
hr_status hr_verbs_mem_import(struct hr_ep *ep, const struct hr_desc *desc, struct hr_rmem *rmem_p);
void hr_verbs_mem_release(struct hr_ep *ep, struct hr_rmem *rmem);
void hr_verbs_mem_close(struct hr_verbs_domain *d);
/* So many bytes outside arenas were registered; negative: are no longer. */
void hr_verbs_mem_held(struct hr_verbs_domain *d, int64_t bytes);
/* The key by which the device may read or write local memory, or 0: it must go through a buffer. */
uint32_t hr_verbs_local_key(struct hr_verbs_domain *d, const void *addr, size_t len, const struct hr_mem *mem,
                            struct hr_verbs_mr **held_p);
/* Drops registrations of memory that has gone. */
void hr_verbs_mem_tidy(struct hr_verbs_domain *d);
/* As reg_mr; where the device has no room, gives up what is kept for nobody. */
struct ibv_mr *hr_verbs_pin(struct hr_verbs_domain *d, void *addr, size_t len, int access);
void *hr_verbs_pages(size_t len);

/* post.c */
/* HR_AGAIN, and room that comes back is told before the next sleep. */
hr_status hr_verbs_refuse(struct hr_verbs_ep *ep);
void hr_verbs_room_again(struct hr_verbs_ep *ep);
static inline uint32_t hr_verbs_under_way(const struct hr_verbs_ep *ep) { return ep->tail - ep->head; }
/* How many more work requests fit, and buffers. */
uint32_t hr_verbs_sends_left(const struct hr_verbs_ep *ep);
uint32_t hr_verbs_slots_left(const struct hr_verbs_ep *ep);
uint8_t *hr_verbs_slot(struct hr_verbs_ep *ep, uint32_t i);
/* Posts n work requests at once; what each stands for is in wqes. Returns how many the device took; when that is not n
 * for another reason than room, the endpoint has failed. */
int hr_verbs_post(struct hr_verbs_ep *ep, struct ibv_send_wr *wrs, const struct hr_verbs_wqe *wqes, int n);
/* A work request has ended, and with it those before it. Returns the number of events told. */
int hr_verbs_sent(struct hr_verbs_ep *ep, const struct ibv_wc *wc);
/* The device has ended it and those before: their control messages leave place for others, before progress looks at
 * them. */
void hr_verbs_ended_early(struct hr_verbs_ep *ep, const struct ibv_wc *wc);
/* A signaled work request that moves nothing. Flush: behind unsignaled ones, if any, so that their end is told. */
void hr_verbs_probe(struct hr_verbs_ep *ep);
void hr_verbs_flush(struct hr_verbs_ep *ep);

/* send.c */
hr_status hr_verbs_post_send(struct hr_ep *base, const struct hr_msg *msg);
/* The same with a header of up to HR_VERBS_HDR bytes. */
hr_status hr_verbs_send(struct hr_verbs_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len);
int hr_verbs_send_notice(struct hr_verbs_ep *ep, uint64_t value, uint64_t nbytes);
/* Tells the peer of room when enough has gathered. */
void hr_verbs_give_room(struct hr_verbs_ep *ep);

/* A message without payload that uses none of the room. 0: it did not leave. */
int hr_verbs_send_control(struct hr_verbs_ep *ep, enum hr_verbs_kind kind, uint32_t word);

/* So many bytes that mean nothing, at most a message: 0: they did not leave. */
int hr_verbs_send_hello(struct hr_verbs_ep *ep, uint32_t len);

/* quiet.c */
hr_status hr_verbs_mem_quiet(struct hr_ep *base, const struct hr_mem *mem);
/* Answers who asks, and hears the answers, among what has arrived. */
void hr_verbs_quiet_look(struct hr_verbs_domain *d);
void hr_verbs_quiet_rest(int64_t start); /* between two looks */
/* The socket of an endpoint that is up has ended, as it does with the peer. */
int hr_verbs_hung_up(const struct hr_verbs_ep *ep);
void hr_verbs_on_revoke(struct hr_verbs_ep *ep, uint32_t serial);
int hr_verbs_is_revoked(const struct hr_verbs_ep *ep, uint32_t serial);
/* Sends the answer that is owed. */
void hr_verbs_answer(struct hr_verbs_ep *ep);

/* rma.c */
hr_status hr_verbs_post_write(struct hr_ep *base, const struct hr_rma *rma);
hr_status hr_verbs_post_read(struct hr_ep *base, const struct hr_rma *rma);
hr_status hr_verbs_post_atomic(struct hr_ep *base, const struct hr_atomic *atomic);
hr_status hr_verbs_cancel(struct hr_ep *base, void *cookie);
/* A write in progress goes on from a copy, and its end is told as ever. HR_ERR_UNSUPPORTED: the device has not let go
 * of its memory. */
hr_status hr_verbs_move(struct hr_verbs_ep *ep, void *cookie, void *copy);
/* Posts more of what is queued; returns the number of events told. */
int hr_verbs_pump(struct hr_verbs_ep *ep, int budget);
/* Ends an operation when its last work request has; returns the number of events told. */
int hr_verbs_op_done(struct hr_verbs_ep *ep, struct hr_verbs_op *op);
void hr_verbs_op_free(struct hr_verbs_ep *ep, struct hr_verbs_op *op);
/* Forgets all. */
void hr_verbs_ops_drop(struct hr_verbs_ep *ep);

/* recv.c */
int hr_verbs_received(struct hr_verbs_ep *ep, const struct ibv_wc *wc);
/* A control message in the completion: takes it, whoever is in the middle of what. 0: it is none. */
int hr_verbs_control(struct hr_verbs_ep *ep, const struct ibv_wc *wc);
/* Posts receives that are free again, and promises the peer what it may hold at least. */
void hr_verbs_repost(struct hr_verbs_ep *ep);
/* The receive is free again; counted: the peer paid for it with room. */
void hr_verbs_give_back(struct hr_verbs_ep *ep, const struct ibv_wc *wc, int counted);
/* What a completion brought, or NULL: it brought no message. */
const uint8_t *hr_verbs_message(const struct hr_verbs_ep *ep, const struct ibv_wc *wc);
/* All that comes from this endpoint's queue pair, which is gone, is nobody's. */
void hr_verbs_disown(struct hr_verbs_ep *ep, uint32_t number);

/* progress.c */
extern const char *const hr_verbs_gone; /* why a connection has ended: what the device said last */
/* Fetches completions behind those at hand; returns how many, or -1. All: until none are left. */
int hr_verbs_fetch(struct hr_verbs_domain *d);
void hr_verbs_fetch_all(struct hr_verbs_domain *d);
int hr_verbs_progress(struct hr_domain *domain, int budget, struct hr_ep *hint);
int hr_verbs_event_fd(struct hr_domain *domain);
hr_status hr_verbs_event_arm(struct hr_domain *domain);
void hr_verbs_event_disarm(struct hr_domain *domain);
void hr_verbs_ep_ready(struct hr_verbs_ep *ep);
/* Out of the epoll, and closed; nothing when there is no descriptor. */
void hr_verbs_unwatch(struct hr_verbs_domain *d, struct hr_source *source);
void hr_verbs_timer_update(struct hr_verbs_domain *d);

#endif
