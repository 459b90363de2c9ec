/* provider.h - what a transport must do: one vtable, one sink of events. Read this first. */
#ifndef HR_PROVIDER_H
#define HR_PROVIDER_H

/*
 * A provider moves bytes between two endpoints. It knows nothing of ranks, tags, matching, priorities or collectives;
 * the engine (core/) builds those on top, once, for all providers. A provider is one folder in providers/ and one line
 * in providers/providers.def. It includes hr/ headers and its own folder, nothing else.
 *
 * Objects
 *   domain   an opened device: sockets, shared segments, completion queues. One engine opens one per provider, or one
 *            for each rail, each with an interface of its own.
 *   ep       an ordered, reliable, connected message channel between two domains; both ends create one.
 *   mem      local memory made known to a domain. desc: 32 bytes that tell a peer how to reach it.
 *   rmem     a peer's memory, imported from a desc.
 *
 * Threads. Every call on one domain is made under the engine's lock: a provider needs no lock of its own against the
 * engine. event_fd's descriptor alone is polled without the lock. Providers start no threads; a device that is
 * simulated may have one in place of its hardware, and guards what they share itself.
 *
 * Callbacks. The sink's functions are called only from inside progress(), never from post_*, ep_connect or ep_abort. A
 * callback may post on any endpoint of the domain; it never aborts or destroys one.
 *
 * Completion. post_* returns
 *   HR_OK          done; the buffer may be reused; no callback follows
 *   HR_INPROGRESS  taken; exactly one sink->done with the cookie follows, unless the endpoint is aborted first
 *   HR_AGAIN       nothing was taken; the engine keeps the operation and tries again after progress
 *   error          nothing was taken; request errors concern this operation, peer errors the endpoint
 * A send or write on an endpoint that has ended, but whose end was not told to sink->state yet, is HR_AGAIN: what the
 * peer sent before it ended, a farewell perhaps, is told first, and decides whether the end is a failure.
 *
 * Order. Messages arrive in the order in which they were posted. A write is visible at the peer before any message or
 * notification posted after it on the same endpoint, and before an atomic posted after it is done there. Reads and
 * writes are not ordered among each other.
 *
 * Receive memory is the provider's own: a message is shown in place to sink->recv and is gone when that returns. (The
 * engine never posts receive buffers; bulk data moves by read, write or a run of messages into memory that the engine
 * names. A verbs provider posts the receives of its queue pairs itself and keeps the credits that make RNR impossible.)
 */

#include <stddef.h>
#include <stdint.h>

#include "hr/status.h"

#define HR_MAX_HDR 96    /* largest message header */
#define HR_DESC_BYTES 32 /* largest memory descriptor */
#define HR_MAX_ADDR 256  /* largest domain address */
#define HR_MAX_PROVIDERS 8

struct hr_provider;
struct hr_auth;

/* What a domain can do; constant after domain_open. */
enum {
    HR_CAP_READ = 1 << 0,   /* post_read */
    HR_CAP_WRITE = 1 << 1,  /* post_write, with notification */
    HR_CAP_ATOMIC = 1 << 2, /* post_atomic */
    HR_CAP_MAP = 1 << 3,    /* mem_import may give a CPU address (rmem.ptr): the peer's memory, read-only */
    HR_CAP_ANYMEM = 1 << 4, /* local side of reads and writes may be memory that was never registered */
    HR_CAP_REVOKE = 1 << 5, /* mem_deregister of an exported region takes effect at once: late remote access fails; the
                               engine does not count on it, but asks mem_quiet */
    HR_CAP_LOCAL = 1 << 6,  /* peers are on this host */
    HR_CAP_CONFIRMS = 1 << 7, /* writes arrive in the order of posting, and the end of one says that it has; one from
                                 memory that was not registered may be in buffers of the provider's own by then */
    HR_CAP_PINS = 1 << 8,     /* mem_register pins pages: registrations of kept memory (hr/memory.h) are kept, too */
    HR_CAP_RELAYS = 1 << 9,   /* messages, which both sides copy at once, are faster than reads of what is not mapped */
    HR_CAP_MAP_WRITE = 1 << 10, /* mem_import of what was exported with HR_ACCESS_REMOTE_MAP may give where to write */
    HR_CAP_PUT = 1 << 11,       /* post_put may reach what was exported with HR_ACCESS_REMOTE_PUT, where hr_ep.puts */
    HR_CAP_FILLS = 1 << 12,     /* hr_msg.fill */
    HR_CAP_HINTS = 1 << 13      /* progress with a hint makes fewer system calls than without */
};

struct hr_caps {
    uint32_t flags;
    uint32_t max_send;     /* largest payload of one post_send, header not counted; at least 4096 */
    uint32_t eager_max;    /* up to this size copying through a message beats a rendezvous */
    uint32_t eager_mapped; /* HR_CAP_MAP: the same for memory in arenas; no more than eager_max */
    uint32_t eager_same;   /* HR_CAP_MAP: the same for what goes to several peers (hr_msg.same) */
    uint32_t eager_loose;  /* the same where ranks share cores and nothing paces the sender; 0: eager_max */
    uint32_t segment;      /* a good size for one read or write of a long transfer */
    uint32_t piece;        /* the same for one message of it; 0: segment */
    uint64_t credit; /* bytes that may be with the peer before it has asked for them, the same at both ends; 0: 1 MiB */
    uint64_t window; /* bulk bytes that may be in flight before a rate was measured; 0: no need of a bound */
};

/* Local memory known to a domain. Filled by mem_register. */
struct hr_mem {
    void *addr;
    size_t len;
    uint64_t key;  /* what the local side of post_* needs (verbs: lkey) */
    uint64_t rkey; /* what a peer needs; never mixed with key */
    void *priv;    /* the provider's */
    uint32_t access;
};

/* REMOTE_MAP: in arenas with HR_ARENA_WRITABLE_BY_PEERS. What the peer's processor does there only mem_quiet ends; so
 * it is with REMOTE_PUT, of other memory, and what its kernel does: there HR_ERR_UNSUPPORTED means that it is not over.
 */
enum {
    HR_ACCESS_LOCAL = 0,
    HR_ACCESS_REMOTE_READ = 1,
    HR_ACCESS_REMOTE_WRITE = 2,
    HR_ACCESS_REMOTE_ATOMIC = 4,
    HR_ACCESS_REMOTE_MAP = 8,
    HR_ACCESS_REMOTE_PUT = 16
};

struct hr_desc {
    uint8_t bytes[HR_DESC_BYTES];
};

/* A peer's memory. Filled by mem_import. */
struct hr_rmem {
    const void *ptr; /* HR_CAP_MAP: where it lies in this process, else NULL */
    void *out;       /* HR_CAP_MAP_WRITE: the same, to write to, else NULL */
    uint64_t addr;   /* the provider's */
    uint64_t rkey;
    uint64_t len;
    void *priv;
    int puts; /* post_put may write there */
};

/* Bytes of text: what is done without; of a domain with all its rails, whole. */
enum { HR_LEFT = 512, HR_ABOUT = 2048 };

/* A domain and an endpoint begin with these; providers extend them. */
struct hr_sink;
struct hr_domain {
    const struct hr_provider *ops;
    const struct hr_sink *sink;
    void *owner; /* the engine's: handed back in accept-side events */
    struct hr_caps caps;
    char left[HR_LEFT]; /* what could not be opened, and is done without, with the reason; "": nothing */
    char refused[256];  /* why mem_register last said HR_ERR_NOMEM: the limit that was hit; "": no more is known */
};
struct hr_ep {
    struct hr_domain *domain;
    void *ctx;        /* the engine's connection lane */
    uint64_t peer_id; /* whom it reaches */
    uint32_t channel; /* the engine's, before ep_connect: endpoints of one number meet; 0 with HR_CAP_LOCAL */
    int puts;         /* HR_CAP_PUT: the provider's, once connected: both sides may post_put */
    int one_way;      /* the provider's: writes that go one way (hr_rma) are to be long, more of them may wait */
};

/* Where events go. All are called from inside progress() with the engine's lock held. */
struct hr_sink {
    /* One message, valid until return. hdr is 8-aligned; hdr_len is what the sender gave. */
    void (*recv)(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t payload_len);
    /* An operation that returned HR_INPROGRESS has ended. Its buffers may be reused. */
    void (*done)(struct hr_ep *ep, void *cookie, hr_status status);
    /* A peer's write with notification has landed: nbytes, and the value it carried. */
    void (*notify)(struct hr_ep *ep, uint64_t value, size_t nbytes);
    /* HR_OK: connected. A peer error: the endpoint is lost, every operation on it that was in progress will never
     * complete (no done follows); the engine calls ep_abort afterwards. detail is text for the user, may be NULL. */
    void (*state)(struct hr_ep *ep, hr_status status, const char *detail);
    /* Another provider carries this connected endpoint now, as its own devices are lost; NULL: its own do again. detail
     * names the device, and why it was lost. May be NULL where nobody wants to know. */
    void (*carrier)(struct hr_ep *ep, const char *by, const char *detail);
    /* Somebody who called and is no peer was turned away: where from, and why. A domain tells of the first of each
     * kind. May be NULL where nobody wants to know. */
    void (*stranger)(struct hr_domain *domain, const char *detail);
};

struct hr_domain_params {
    uint64_t self_id;           /* this process among the job's peers */
    const char *ifname;         /* interface grammar: name, glob, ^exclude, CIDR, comma separated; NULL: any. A single
                                   interface is where calls leave from, too: that makes a rail of it */
    const char *device;         /* provider-specific choice, NULL: automatic */
    const struct hr_auth *auth; /* job key for handshakes, outlives the domain */
    const struct hr_sink *sink;
    void *owner;
    int local_peers;                 /* how many peers will share this host, for sizing */
    const char *options;             /* "key=value,..." from configuration; unknown keys are refused */
    const struct hr_provider *inner; /* only for wrapping providers (fault) */
};

/* One message to send. hdr is copied by the provider before post_send returns. payload is not, unless HR_OK. */
struct hr_msg {
    const void *hdr;
    size_t hdr_len; /* 8 .. HR_MAX_HDR, a multiple of 8 */
    const void *payload;
    size_t len;
    const struct hr_mem *mem; /* registration that covers payload, or NULL: messages go from any memory */
    void *cookie;
    /* HR_CAP_FILLS, and len is not 0. Not NULL: the payload is not there yet. If the message is taken, which is at once
     * (HR_OK) or not at all, this is called once: it makes the payload, and, unless to is NULL, lays a copy there. */
    void (*fill)(void *cookie, void *to);
    /* Not 0, and no fill: messages of this number, of this domain's, have the same payload, and there are several. */
    uint64_t same;
};

struct hr_rma { /* one read or write */
    void *local;
    size_t len;
    const struct hr_mem *mem; /* registration that covers local, or NULL where HR_CAP_ANYMEM */
    const struct hr_rmem *remote;
    uint64_t offset; /* into remote */
    int with_notify; /* write only: tell the peer's engine, with value, once the bytes are there */
    uint64_t value;
    void *cookie;
    int one_way; /* write only, a hint: more like it comes as soon as there is room, and nothing that it would delay */
};

enum hr_atomic_op { HR_ATOMIC_FETCH_ADD, HR_ATOMIC_CMP_SWAP };
struct hr_atomic { /* on one 8-aligned uint64 */
    enum hr_atomic_op op;
    uint64_t *result; /* the value before */
    const struct hr_mem *mem;
    const struct hr_rmem *remote;
    uint64_t offset;
    uint64_t operand; /* FETCH_ADD: addend. CMP_SWAP: new value */
    uint64_t compare;
    void *cookie;
};

struct hr_provider {
    const char *name;

    /* Devices that exist now; 0 with a reason (static text) in why_p. Never blocks for long, opens nothing that stays.
     */
    int (*device_count)(const char **why_p);

    /* Opens a domain. Called once per engine and rail, from user threads; may take milliseconds. On error detail (256
     * bytes) says why, with the value that was wrong. The domain owns all it opens; nothing may be left on the host
     * when the process is killed. */
    hr_status (*domain_open)(const struct hr_provider *self, const struct hr_domain_params *params,
                             struct hr_domain **domain_p, char detail[256]);
    /* All endpoints were destroyed before. */
    void (*domain_close)(struct hr_domain *domain);
    /* The bytes by which peers reach this domain; at most HR_MAX_ADDR. */
    size_t (*domain_address)(struct hr_domain *domain, void *addr);
    /* Text about the domain for people ("eth0 10.0.0.1:4242, 1 stream"). */
    void (*domain_describe)(struct hr_domain *domain, char *text, size_t size);

    /* Makes memory known. Cost: none on shm and tcp, pinning on verbs. The caller keeps addr alive until deregister.
     * HR_ERR_NOMEM may leave words in domain->refused. */
    hr_status (*mem_register)(struct hr_domain *domain, void *addr, size_t len, uint32_t access, struct hr_mem *mem_p);
    /* With HR_CAP_REVOKE: on return no remote access to this registration can touch the memory any more. */
    void (*mem_deregister)(struct hr_domain *domain, struct hr_mem *mem);
    /* Asked before mem_deregister where the peer may be writing to exported memory still. HR_OK: once it is
     * deregistered, nothing that the peer has posted on this endpoint or will post touches it, and the endpoint goes
     * on. HR_ERR_UNSUPPORTED: only ep_abort makes sure. May wait for the peer's provider, a fraction of a second at
     * most. */
    hr_status (*mem_quiet)(struct hr_ep *ep, const struct hr_mem *mem);
    /* A desc for [addr, addr+len) inside mem, good on this endpoint. May send what the peer needs to import it (a file
     * descriptor over a socket). HR_ERR_UNSUPPORTED where such memory cannot be reached by this peer. */
    hr_status (*mem_export)(struct hr_ep *ep, const struct hr_mem *mem, void *addr, size_t len, struct hr_desc *desc_p);
    /* Cheap when repeated: mappings are cached by the provider and end with the endpoint. HR_AGAIN or
     * HR_ERR_PEER_LOST: the peer has ended the connection, which sink->state says or is about to. */
    hr_status (*mem_import)(struct hr_ep *ep, const struct hr_desc *desc, struct hr_rmem *rmem_p);
    void (*mem_release)(struct hr_ep *ep, struct hr_rmem *rmem);

    /* An unconnected endpoint for peer_id; ctx is handed back in events. */
    hr_status (*ep_create)(struct hr_domain *domain, uint64_t peer_id, void *ctx, struct hr_ep **ep_p);
    /* Starts to connect; never blocks. active: this side calls; the other waits to be called. addr is the peer
     * domain's address (both sides get it). Ends in sink->state. The engine bounds the time and aborts. Both sides
     * prove the job key before any other byte is believed. */
    hr_status (*ep_connect)(struct hr_ep *ep, const void *addr, size_t addr_len, int active);
    /* Now, in any state. On return: no callback will come for this endpoint, no byte of local memory will be changed
     * by its peer, and the peer learns of it (its side sees HR_ERR_PEER_LOST). Operations in progress are forgotten. */
    void (*ep_abort)(struct hr_ep *ep);
    /* Frees it; aborts first if need be. */
    void (*ep_destroy)(struct hr_ep *ep);
    /* Traffic class: DSCP 0..63 and priority 0..7 (0 most urgent) for what leaves from now on; HR_ERR_UNSUPPORTED where
     * it has no meaning, and where it had to be said before ep_connect, or was and the device did not take it. */
    hr_status (*ep_set_class)(struct hr_ep *ep, int dscp, int priority);
    /* Bytes accepted by post_* of which the peer's host has not confirmed yet that it has them: what ep_destroy might
     * still lose. */
    uint64_t (*ep_unsent)(struct hr_ep *ep);

    /* Never block. See Completion above. */
    hr_status (*post_send)(struct hr_ep *ep, const struct hr_msg *msg);
    hr_status (*post_write)(struct hr_ep *ep, const struct hr_rma *rma);
    hr_status (*post_read)(struct hr_ep *ep, const struct hr_rma *rma);
    hr_status (*post_atomic)(struct hr_ep *ep, const struct hr_atomic *atomic);
    /* HR_CAP_PUT: writes to memory that is not mapped, and is through on return. may(arg) is asked before anything is
     * written, perhaps several times: no, and HR_ERR_CANCELED is the answer. A mem_quiet that the peer begins after may
     * would have said no returns when nothing is written any more. After an error some of it may be written. */
    hr_status (*post_put)(struct hr_ep *ep, const struct hr_rma *rma, int (*may)(void *arg), void *arg);
    /* Lets go of an operation in progress: HR_OK, its local buffers will not be touched again and no done follows (what
     * is half on its way goes on from a private copy); HR_ERR_UNSUPPORTED, only ep_abort can. */
    hr_status (*cancel)(struct hr_ep *ep, void *cookie);

    /* Polls: delivers at most budget events and returns how many. hint: look at this endpoint first, and at the others
     * in turn, so that the cost of one call does not grow with the number of endpoints. Finds a dead peer within
     * 100 ms of being polled. Retries what it could not finish before. */
    int (*progress)(struct hr_domain *domain, int budget, struct hr_ep *hint);

    /* A descriptor that becomes readable when progress() has something to do, once armed; -1: the domain must be
     * polled. Constant for the life of the domain. */
    int (*event_fd)(struct hr_domain *domain);
    /* Before sleeping: HR_OK, armed, and anything from now on makes event_fd readable; HR_AGAIN, something is there
     * already: do not sleep. Arming twice is harmless. */
    hr_status (*event_arm)(struct hr_domain *domain);
    /* No wake-ups needed any more: peers may skip the cost of waking. */
    void (*event_disarm)(struct hr_domain *domain);
};

/* post_put of who cannot. */
static inline hr_status hr_cannot_put(struct hr_ep *ep, const struct hr_rma *rma, int (*may)(void *arg), void *arg) {
    (void)ep, (void)rma, (void)may, (void)arg;
    return HR_ERR_UNSUPPORTED;
}

/* The table, best first: providers/providers.def. */
extern const struct hr_provider *const hr_providers[];
const struct hr_provider *hr_provider_find(const char *name);

#endif
