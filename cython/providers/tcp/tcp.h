/* tcp.h - the provider's objects: domain, endpoint, region, and who may call what between its files. */
#ifndef HR_TCP_H
#define HR_TCP_H

/*
 * tcp.c     the vtable; options, opening and closing of a domain
 * address.c  the bytes by which peers reach a domain
 * dial.c    the caller's side               accept.c    the acceptor's side of a connection
 * socket.c  settings of a socket            endpoint.c  life of an endpoint; classes, unsent bytes
 * send.c    frames out, cancel              serve.c     answers to a peer's reads and atomics
 * recv.c    frames in                       regions.c   registered memory, keys
 * near.c    whether a network is in between
 * progress.c  polling, fairness, timer, sleeping
 *
 * Callbacks run in progress() alone. What happens elsewhere and must be told (a connection that stands already when
 * ep_connect is called, an error that post_send met) is noted in the endpoint, which is put on the domain's ready list.
 */

#include <stdint.h>

#include "hr/auth.h"
#include "hr/clock.h"
#include "hr/door.h"
#include "hr/provider.h"
#include "providers/tcp/wire.h"

/* Kinds of source. */
enum hr_tcp_kind { HR_TCP_EP, HR_TCP_LISTENER, HR_TCP_CALLER, HR_TCP_TIMER, HR_TCP_WAKE };

struct hr_tcp_options {
    char cc[16];           /* congestion control: "auto", "system", or a kernel name */
    int sndbuf, rcvbuf;    /* bytes; 0: the kernel tunes them */
    unsigned user_timeout; /* seconds without progress after which the kernel gives a connection up */
};

/* Registered memory that peers may reach. A key is index and generation: it never comes back. */
struct hr_tcp_region {
    uint8_t *addr;
    size_t len;
    uint32_t generation;
    uint32_t access;
    uint32_t live;
    uint32_t serving; /* READ_DATA frames in send queues that point into it */
    uint32_t next_free;
};

enum { HR_TCP_SCRATCH = 64 << 10 };

struct hr_tcp_domain {
    struct hr_domain base;
    struct hr_tcp_options opt;
    int crowded;                      /* ranks of this host share processors */
    char cc_local[16], cc_remote[16]; /* congestion control to ask for; "": leave the system's */
    int may_narrow;                   /* receive buffers: one_way.c */
    int slept;                        /* frames from here on that say that we have slept: send.c */
    const struct hr_auth *auth;
    uint64_t self_id;
    uint64_t
        host_id; /* boot and network namespace: the same where a loopback address reaches the same stack; 0 unknown */
    struct hr_iface *ifaces;
    int nifaces;
    struct hr_poll poll;
    struct hr_source timer, wake; /* wake: an eventfd that tells a sleeper of the ready list */
    int in_progress;
    int timer_on;
    struct hr_door door;
    struct hr_link eps, ready;
    int dialing; /* endpoints on their way to being connected */
    unsigned turn, misses;
    struct hr_tcp_region *regions;
    uint32_t nregions, free_region; /* free_region: index + 1, 0 none */
    uint8_t *scratch;               /* HR_TCP_SCRATCH bytes that nobody reads: late payload goes here */
};

/* One frame on its way out. */
enum hr_tcp_op_kind {
    HR_TCP_OP_POSTED,  /* message or write: done is told when the kernel has all of it */
    HR_TCP_OP_REQUEST, /* read or atomic: done is told when the answer is here */
    HR_TCP_OP_ANSWER,  /* to a peer's request, or let go of by its owner: nobody is told */
    HR_TCP_OP_CHUNK    /* READ_DATA that points into a region */
};
struct hr_tcp_op {
    enum hr_tcp_op_kind kind;
    uint32_t head_len;
    const uint8_t *payload;
    size_t len;
    size_t sent; /* of head and payload */
    void *cookie;
    uint64_t id; /* REQUEST: which. CHUNK: key of the region */
    void *copy;  /* the payload, owned, when the memory it was in had to go before it was sent */
    uint8_t head[sizeof(struct hr_tcp_frame) + HR_MAX_HDR];
};

enum {
    HR_TCP_QUEUE = 16,              /* posted operations and requests waiting for the socket */
    HR_TCP_RING = HR_TCP_QUEUE + 8, /* the same and answers */
    HR_TCP_QUEUE_BYTES = 256 << 10, /* with so much waiting no further write is taken, so that messages get between */
    HR_TCP_CHUNKS = 2               /* READ_DATA frames queued at a time, for the same reason */
};

/* A read or atomic of ours without an answer yet; slot id % HR_TCP_READS. */
struct hr_tcp_pending {
    uint64_t id; /* 0: free */
    uint8_t *local;
    size_t len, have;
    int atomic;
    int canceled; /* the answer is still to come and goes to nobody */
    void *cookie;
};

/* A peer's request that is still to be answered. */
struct hr_tcp_serve {
    uint64_t id, key, offset, left;
    int atomic;
    int64_t status; /* atomic */
    uint64_t value;
};

/* Where the payload now arriving goes. WRITE: key/offset. READ_DATA: id. */
struct hr_tcp_body {
    enum hr_tcp_type type; /* 0: none */
    int dropped;           /* some of it had nowhere to go */
    int notify;
    uint64_t left, nbytes;
    uint64_t key, offset, id, value;
};

enum hr_tcp_state { HR_TCP_NEW, HR_TCP_WAITING, HR_TCP_DIALING, HR_TCP_UP, HR_TCP_LOST, HR_TCP_CLOSED };

/* Long transfers between processes of one host: one_way.c. */
struct hr_tcp_one_way {
    int may_send, sending;
    uint64_t went;      /* in writes that are said to go one way, without anything else between them */
    int receiving;      /* the peer says that it sends */
    int window, buffer; /* what might be offered, and the receive buffer, before they were narrowed; 0: they are not */
    uint64_t came, offered; /* read since the peer said so; when all is that had come before less was offered */
};

struct hr_tcp_ep {
    struct hr_ep base;
    struct hr_source source;
    enum hr_tcp_state state;
    struct hr_link link, ready;
    int active;
    int same_machine;   /* as the peer, whatever the network namespace */
    uint32_t stream;    /* which of the endpoints to that peer; see dial.c */
    int dscp, priority; /* -1: as the kernel has it */
    struct hr_tcp_dial *dial;
    union hr_sockaddr peer;

    int told; /* a state is to be told from progress */
    hr_status tell;
    char detail[200];

    uint8_t *rx; /* bytes [rx_off, rx_end) were received and not looked at */
    uint32_t rx_cap, rx_off, rx_end, rx_need;
    struct hr_tcp_body body;
    int lowat; /* bytes that must have come for an event */

    struct hr_tcp_op *ring; /* HR_TCP_RING, allocated when first needed, as are the two below */
    uint32_t tx_head, tx_count, tx_chunks;
    uint64_t tx_bytes; /* in the ring and not in the kernel */
    int tx_long;       /* ranks share cores and segments are long: see send.c */
    int peer_sleeps;   /* it said so last, or nothing yet */
    int tx_errno;      /* sending failed: the rest is received, then the peer is lost */
    struct hr_tcp_one_way one_way;

    struct hr_tcp_pending *pending; /* HR_TCP_READS */
    uint64_t next_id;
    struct hr_tcp_serve *serve; /* HR_TCP_READS */
    uint32_t serve_head, serve_count;
};

static inline struct hr_tcp_domain *hr_tcp_domain_of(struct hr_ep *ep) { return (struct hr_tcp_domain *)ep->domain; }

/* endpoint.c */
hr_status hr_tcp_ep_create(struct hr_domain *domain, uint64_t peer_id, void *ctx, struct hr_ep **ep_p);
void hr_tcp_ep_abort(struct hr_ep *base);
void hr_tcp_ep_destroy(struct hr_ep *base);
hr_status hr_tcp_ep_set_class(struct hr_ep *base, int dscp, int priority);
uint64_t hr_tcp_ep_unsent(struct hr_ep *base);
/* Connected: takes over fd (its own already, for a caller). The engine is told from progress. */
hr_status hr_tcp_ep_up(struct hr_tcp_ep *ep, int fd, const union hr_sockaddr *peer);
/* The endpoint is over; the engine is told from progress. `what` is text, error (an errno) may be 0. */
void hr_tcp_ep_fail(struct hr_tcp_ep *ep, hr_status status, const char *what, int error);
void hr_tcp_ep_tell(struct hr_tcp_ep *ep, hr_status status);
void hr_tcp_ep_ready(struct hr_tcp_ep *ep); /* progress.c */

/* address.c */
#define HR_TCP_ADDRESSES 35 /* as many as fit into HR_MAX_ADDR */
size_t hr_tcp_address_write(const struct hr_tcp_domain *d, void *bytes);
/* Number of addresses, or -1 when these bytes are no address of a tcp domain. */
int hr_tcp_address_read(const void *bytes, size_t len, uint64_t *host_id_p, union hr_sockaddr *list);
uint64_t hr_tcp_host_id(void);
int hr_tcp_same_machine(uint64_t a, uint64_t b);

/* dial.c */
hr_status hr_tcp_ep_connect(struct hr_ep *base, const void *addr, size_t addr_len, int active);
void hr_tcp_dial_event(struct hr_tcp_ep *ep);
void hr_tcp_dial_tick(struct hr_tcp_ep *ep, int64_t now);
void hr_tcp_dial_end(struct hr_tcp_ep *ep);

/* socket.c */
int hr_tcp_socket_prepare(struct hr_tcp_domain *d, int fd, int local);
hr_status hr_tcp_socket_control(int fd, const char *name); /* congestion control; "": as it is */
/* near.c. Connected: no network is between the two; if in different namespaces (same_machine), as far as can be seen.
 */
int hr_tcp_near(struct hr_tcp_ep *ep);
/* Most that the kernel has and may not send yet; 0: as usual. */
int hr_tcp_socket_unsent(int fd, int most);
hr_status hr_tcp_socket_class(int fd, int family, int dscp, int priority);
/* What sockets may have: cc_local and cc_remote (HR_ERR_INVALID with detail when the kernel refuses the option cc),
 * may_narrow. */
hr_status hr_tcp_socket_resolve(struct hr_tcp_domain *d, char detail[256]);

/* accept.c */
hr_status hr_tcp_listen(struct hr_tcp_domain *d, char detail[256]);
/* Hands over a caller that waits for this endpoint: 1, or 0 when there is none. */
int hr_tcp_pair(struct hr_tcp_domain *d, struct hr_tcp_ep *ep);

/* regions.c */
hr_status hr_tcp_mem_register(struct hr_domain *domain, void *addr, size_t len, uint32_t access, struct hr_mem *mem_p);
void hr_tcp_mem_deregister(struct hr_domain *domain, struct hr_mem *mem);
hr_status hr_tcp_mem_quiet(struct hr_ep *ep, const struct hr_mem *mem);
hr_status hr_tcp_mem_export(struct hr_ep *ep, const struct hr_mem *mem, void *addr, size_t len, struct hr_desc *desc_p);
hr_status hr_tcp_mem_import(struct hr_ep *ep, const struct hr_desc *desc, struct hr_rmem *rmem_p);
void hr_tcp_mem_release(struct hr_ep *ep, struct hr_rmem *rmem);
/* The region if the key is good, allows this access and covers the range; NULL otherwise. */
struct hr_tcp_region *hr_tcp_region_at(struct hr_tcp_domain *d, uint64_t key, uint32_t access, uint64_t offset,
                                       uint64_t len);

/* send.c */
hr_status hr_tcp_post_send(struct hr_ep *base, const struct hr_msg *msg);
hr_status hr_tcp_post_write(struct hr_ep *base, const struct hr_rma *rma);
hr_status hr_tcp_post_read(struct hr_ep *base, const struct hr_rma *rma);
hr_status hr_tcp_post_atomic(struct hr_ep *base, const struct hr_atomic *atomic);
hr_status hr_tcp_cancel(struct hr_ep *base, void *cookie);
/* A frame whose header is this; sends at once when it can. HR_OK: the kernel has all of it. */
hr_status hr_tcp_push(struct hr_tcp_ep *ep, enum hr_tcp_op_kind kind, const struct hr_tcp_frame *frame, const void *hdr,
                      const void *payload, void *cookie, uint64_t id);
/* Sends what waits; returns the number of events told. */
int hr_tcp_flush(struct hr_tcp_ep *ep, int budget);
/* Sending is over. What the peer sent before is still received; the loss is told after that. */
void hr_tcp_tx_fail(struct hr_tcp_ep *ep, int error);
void hr_tcp_tx_ready(struct hr_tcp_ep *ep);    /* it is connected */
void hr_tcp_tx_slept(struct hr_tcp_domain *d); /* or is about to sleep */
/* Forgets what waits. */
void hr_tcp_tx_clear(struct hr_tcp_ep *ep);
/* Gives queued chunks of this region a copy of what they point to. */
void hr_tcp_tx_detach(struct hr_tcp_ep *ep, uint64_t key);

/* one_way.c. A frame with a payload of at least HR_TCP_BULK says whether it is of such a transfer. */
enum { HR_TCP_BULK = 4096 };
int hr_tcp_one_way_able(int fd);                                              /* a socket that is for nothing else */
void hr_tcp_one_way_begin(struct hr_tcp_ep *ep);                              /* it is connected */
int hr_tcp_one_way_sends(struct hr_tcp_ep *ep, uint64_t nbytes, int one_way); /* posted; 1: the peer is to be told */
void hr_tcp_one_way_told(struct hr_tcp_ep *ep, int one_way);                  /* by a frame that came */
void hr_tcp_one_way_came(struct hr_tcp_ep *ep, size_t nbytes);                /* a read from the socket */

/* serve.c */
hr_status hr_tcp_serve_read(struct hr_tcp_ep *ep, const struct hr_tcp_read *read);
hr_status hr_tcp_serve_atomic(struct hr_tcp_ep *ep, const struct hr_tcp_atomic *atomic);
/* Queues answers while there is room. */
void hr_tcp_serve_pump(struct hr_tcp_ep *ep);

/* recv.c */
/* Receives and delivers; returns the number of events told. */
int hr_tcp_receive(struct hr_tcp_ep *ep, int budget);

/* progress.c */
int hr_tcp_progress(struct hr_domain *domain, int budget, struct hr_ep *hint);
int hr_tcp_event_fd(struct hr_domain *domain);
hr_status hr_tcp_event_arm(struct hr_domain *domain);
void hr_tcp_event_disarm(struct hr_domain *domain);
/* Forgets it and closes the descriptor; nothing when there is none. */
void hr_tcp_unwatch(struct hr_tcp_domain *d, struct hr_source *source);
/* Turns the timer on when something has a deadline, off when nothing has. */
void hr_tcp_timer_update(struct hr_tcp_domain *d);
#define HR_TCP_MS 1000000LL

#endif
