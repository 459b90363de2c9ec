/* shm.h - the shared-memory provider's own types. The map of its files is in README.md. */
#ifndef HR_SHM_H
#define HR_SHM_H

#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "hr/auth.h"
#include "hr/clock.h"
#include "hr/provider.h"
#include "providers/shm/ring.h"

enum {
    SHM_MIN_RING = 128 << 10, /* of which a largest message, its zero word and the reserve take less than 3/4 */
    SHM_MAX_RING = 16 << 20,
    SHM_OPS = 32,                     /* atomics of one endpoint that wait for their answer */
    SHM_RESERVE = SHM_OPS * SHM_LINE, /* room that only answers may take, so that they always find some */
    SHM_WRITE_PIECE = 32 << 10,
    SHM_LONG = 256 << 10, /* the longest message, of long rings */
    SHM_SHORT = 64 << 10, /* of short ones */
    SHM_BOARD = 512 << 10,
    SHM_SHOWN = 2 << 10, /* payloads from this length on go by the board, if they go to several */
    SHM_TEXT = 160,
};

/* Whom an epoll event is for. */
enum shm_source { SHM_ON_WAKE, SHM_ON_LISTEN, SHM_ON_CALL, SHM_ON_SOCKET, SHM_ON_PIDFD };
struct shm_watch {
    enum shm_source source;
    void *owner;
};

/* An accepted socket that no endpoint has taken yet. */
struct shm_call {
    struct shm_call *next;
    struct shm_watch watch;
    struct hr_handshake handshake;
    int fd, proven;
    pid_t pid;
    int64_t deadline; /* for the proof; later the caller's engine decides how long to wait */
};

/* Local memory that peers may write. */
struct shm_region {
    uint8_t *addr;
    size_t len;
    uint32_t access;     /* 0: the slot is free */
    uint32_t generation; /* counts the uses of the slot: an old key fits nothing */
};

/* Payloads that go to several peers: board.c. Positions count up for ever, as a ring's do. */
enum shm_board_state {
    SHM_BOARD_UNUSED,
    SHM_BOARD_OPEN,
    SHM_BOARD_LEFT /* as it is */,
    SHM_BOARD_NONE /* no memory */
};
struct shm_board {
    enum shm_board_state state;
    int fd;
    uint8_t *base;
    uint64_t tail, limit;   /* where the next goes; up to where there is room, as last seen */
    uint64_t same, at, len; /* the last, and where it is */
    uint64_t refused;       /* the last that found no room */
};
struct shm_domain {
    struct hr_domain base;
    struct shm_board board;
    struct shm_ep **live; /* connected endpoints; progress goes round */
    uint32_t nlive, live_cap, cursor;
    uint32_t turn; /* calls of progress */
    int attend;    /* the slow part has something to do: do not wait for its time */
    int scan;      /* after a wake-up: the whole round at once */
    int armed;
    int idle;               /* the last pass found all rings empty */
    int connecting;         /* endpoints between ep_connect and their first state() */
    int64_t attended_at;    /* when the slow part ran, monotonic ns */
    int64_t swept_at;       /* when arenas were last looked at */
    struct shm_ep *eps;     /* all, in order of creation */
    struct shm_call *calls; /* in order of arrival */
    int ncalls;
    int epfd, wakefd, listenfd;
    struct shm_watch on_wake, on_listen;
    struct shm_region *regions;
    uint32_t nregions, regions_cap;
    const struct hr_auth *auth;
    uint64_t self_id;
    uint8_t name[16], host[16];
    uint64_t ring_size;
    int cma_allowed;          /* option cma */
    uint32_t cma_yes, cma_no; /* endpoints whose memory could be, could not be read by process_vm_readv */
};

enum shm_state {
    SHM_IDLE,     /* created */
    SHM_WAITING,  /* passive: not called yet */
    SHM_DIALING,  /* active: the peer's backlog is full, connect() again */
    SHM_PROVING,  /* active: handshake */
    SHM_OFFERED,  /* active: the rings were offered, no answer yet */
    SHM_TAKEN,    /* passive: proven, the offer is to come */
    SHM_ANSWERED, /* passive: the answer was sent, the last word is to come */
    SHM_UP,
    SHM_LOST, /* said so */
    SHM_ABORTED,
};

/* A peer's arena, mapped here. */
struct shm_map {
    uint64_t id, peer_base;
    uint8_t *base;
    size_t size;
    uint32_t refs; /* imports not yet released */
    int writable;  /* it lets us */
    int gone;      /* the peer has given it back: unmapped with the last reference */
    uint8_t *warm; /* a byte for each piece whose page table entries exist */
};

/* Where one side's kernel is to write next in the other's memory, mapped by both: put.c. */
struct shm_target {
    _Alignas(128) _Atomic uint64_t turn; /* a number, and in the low half the thread that writes; 0 there: none does */
    _Alignas(16) _Atomic uint64_t base;  /* as struct iovec */
    _Atomic uint64_t len;
};

/* An atomic that waits for its answer. */
struct shm_op {
    void *cookie;
    uint64_t *result;
    int busy, forgotten;
};

/* The write whose pieces did not all find room at once; PUSHED: it has yet to be called done. */
enum shm_pushing { SHM_NO_PUSH, SHM_PUSHING, SHM_PUSHED };
struct shm_push {
    const uint8_t *local;
    uint8_t *copy; /* what is left was copied here when the caller let go of it */
    uint64_t key, addr, left, total, value;
    int with_notify, forgotten;
    void *cookie;
};

struct shm_ep {
    struct hr_ep base;
    enum shm_state state;
    int special; /* not only the ring is to be looked at: lost, or pushing */
    struct ring_tx tx;
    struct ring_rx rx;
    int peer_wakefd;
    uint64_t blocked;  /* bytes for which post_* found no room; 0: none since */
    int far;           /* long payloads in a row that took so long to write as if the consumer's cache were far away */
    int64_t far_until; /* they are written past the cache */
    double made[2];    /* ns per byte of payloads that are made: in the ring, or elsewhere and then copied */
    unsigned nmade;
    enum shm_pushing pushing;
    struct shm_push push;
    struct shm_op ops[SHM_OPS];
    uint32_t live_index;
    uint64_t shown, taken; /* of the own board: up to where the peer was shown it, and has said that it has read */
    uint64_t from;         /* it was shown nothing before that it has not read */
    uint64_t read, said;   /* of the peer's */
    const uint8_t *board;  /* the peer's, once it has sent it */
    int board_sent;

    struct shm_ep *next;
    int sock, pidfd;
    pid_t pid;
    struct shm_watch on_socket, on_pidfd;
    struct hr_handshake *handshake;
    uint8_t peer_name[16];
    int ringfd; /* between offer and answer */
    uint8_t *segment;
    uint64_t ring_size;
    uint32_t longest; /* message that may come */
    int counted;      /* among domain->connecting */
    hr_status lost;
    char text[SHM_TEXT];

    int can_read, peer_can_read; /* by process_vm_readv */
    int can_write;               /* by process_vm_writev; and this side would see the end of what the peer writes */
    struct shm_target *target, *inlet; /* of what is written there, of what the peer writes here */
    uint8_t frame[64];                 /* control frame being received */
    uint32_t frame_have;
    int frame_fds[2], frame_nfds;
    uint64_t *sent; /* ids of arenas that the peer was given */
    uint32_t nsent, sent_cap;
    struct shm_map **maps;
    uint32_t nmaps, maps_cap;
};

static inline struct shm_ep *shm_ep(struct hr_ep *ep) { return (struct shm_ep *)ep; }
static inline struct shm_domain *shm_domain(struct hr_domain *domain) { return (struct shm_domain *)domain; }
static inline struct shm_domain *shm_ep_domain(struct shm_ep *e) { return (struct shm_domain *)e->base.domain; }

/* domain.c */
/* Room for one more element: 0 when there is no memory. */
int hr_shm_grow(void *array_p, uint32_t n, uint32_t *cap_p, size_t element);
int hr_shm_watch(struct shm_domain *dom, int fd, struct shm_watch *watch, enum shm_source source, void *owner);

/* message.c */
hr_status hr_shm_post_send(struct hr_ep *ep, const struct hr_msg *msg);
/* So long did it take to write a long payload into the ring: sets far_until where that was too long, again. */
void hr_shm_wrote(struct shm_ep *e, size_t len, int64_t start, int64_t end);
int hr_shm_ep_poll(struct shm_ep *e, int budget);
/* Asks for room when ring_tx_fits said no: HR_OK, HR_AGAIN (noted: whoever sleeps is woken by room), or why the
 * endpoint is lost. */
hr_status hr_shm_room(struct shm_ep *e, uint64_t n);
/* After ring_tx_publish and ring_rx_consume said so. */
void hr_shm_wake(struct shm_ep *e);
/* Notes that the endpoint is lost; progress tells the sink. The first reason stays. */
__attribute__((format(printf, 3, 4))) void hr_shm_lose(struct shm_ep *e, hr_status status, const char *format, ...);
/* Whether the peer's process has. */
static inline int hr_shm_ended(const struct shm_ep *e) {
    struct pollfd ended = {.fd = e->pidfd, .events = POLLIN};
    return e->pidfd >= 0 && poll(&ended, 1, 0) == 1;
}
/* Tells the sink; from progress only. */
void hr_shm_report(struct shm_ep *e);

/* progress.c */
/* For what happens outside of progress: the next pass looks, and whoever sleeps wakes up for it. */
void hr_shm_attend(struct shm_domain *dom);
void hr_shm_kick(struct shm_domain *dom);
int hr_shm_progress(struct hr_domain *domain, int budget, struct hr_ep *hint);
int hr_shm_event_fd(struct hr_domain *domain);
hr_status hr_shm_event_arm(struct hr_domain *domain);
void hr_shm_event_disarm(struct hr_domain *domain);

/* connect.c */
hr_status hr_shm_ep_create(struct hr_domain *domain, uint64_t peer_id, void *ctx, struct hr_ep **ep_p);
hr_status hr_shm_ep_connect(struct hr_ep *ep, const void *addr, size_t addr_len, int active);
void hr_shm_ep_abort(struct hr_ep *ep);
void hr_shm_ep_destroy(struct hr_ep *ep);
void hr_shm_dial(struct shm_ep *e);
void hr_shm_on_socket(struct shm_ep *e);

/* accept.c */
hr_status hr_shm_listen(struct shm_domain *dom, char detail[256]);
void hr_shm_accept(struct shm_domain *dom);
void hr_shm_calls_step(struct shm_domain *dom);
void hr_shm_call_drop(struct shm_domain *dom, struct shm_call *call);
/* Who is at the other end, and may it be: same user, or root. */
int hr_shm_peer_allowed(int fd, pid_t *pid_p);
/* The endpoint has a proven socket from here on. */
void hr_shm_attach(struct shm_ep *e, int fd, pid_t pid);

/* control.c */
enum shm_frame_kind { SHM_OFFER = 1, SHM_ANSWER, SHM_READY, SHM_ARENA, SHM_GONE, SHM_BOARD_IS };
struct shm_frame {        /* 64 bytes, whole, over the Unix socket */
    uint32_t kind, flags; /* flags: SHM_CAN_* */
    uint64_t id;          /* ARENA, GONE */
    uint64_t addr,        /* ARENA: where it lies at the sender. OFFER, ANSWER: of the probe */
        size;             /* ARENA, BOARD_IS. OFFER: of a ring */
    uint64_t word;        /* OFFER, ANSWER: what lies at the probe */
    uint64_t spare[3];
};
enum { SHM_CAN_READ = 1, SHM_CAN_WRITE = 2 };
/* HR_AGAIN: the socket is full, nothing was sent. */
hr_status hr_shm_frame_send(struct shm_ep *e, const struct shm_frame *frame, const int *fds, int nfds);
/* Takes in what has arrived; may lose the endpoint. */
void hr_shm_frames_drain(struct shm_ep *e);

/* board.c */
/* 1: the payload is on the board, and where, for this peer as well. 0: it has to go by the ring. */
int hr_shm_board_put(struct shm_ep *e, const struct hr_msg *msg, uint64_t *at_p);
void hr_shm_board_leave(struct shm_ep *e);
void hr_shm_board_close(struct shm_board *b);
void hr_shm_on_board(struct shm_ep *e, const struct shm_frame *frame, int fd);
/* So much there of the peer's board; NULL: that cannot be. */
const uint8_t *hr_shm_board_at(struct shm_ep *e, uint64_t at, size_t len);
void hr_shm_board_say(struct shm_ep *e); /* how far this side has read */
void hr_shm_board_unmap(struct shm_ep *e);

/* setup.c: the three frames that make a proven socket into a connection */
int hr_shm_probe_made(void); /* 0 with errno */
void hr_shm_offer(struct shm_ep *e);
void hr_shm_on_setup_frame(struct shm_ep *e, const struct shm_frame *frame, int *fds, int nfds);
/* The rings; with all set, the targets too. */
void hr_shm_unmap(struct shm_ep *e, int all);

/* memory.c */
hr_status hr_shm_mem_register(struct hr_domain *domain, void *addr, size_t len, uint32_t access, struct hr_mem *mem_p);
void hr_shm_mem_deregister(struct hr_domain *domain, struct hr_mem *mem);
hr_status hr_shm_mem_quiet(struct hr_ep *ep, const struct hr_mem *mem);
hr_status hr_shm_mem_export(struct hr_ep *ep, const struct hr_mem *mem, void *addr, size_t len, struct hr_desc *desc_p);
hr_status hr_shm_mem_import(struct hr_ep *ep, const struct hr_desc *desc, struct hr_rmem *rmem_p);
void hr_shm_mem_release(struct hr_ep *ep, struct hr_rmem *rmem);
hr_status hr_shm_post_read(struct hr_ep *ep, const struct hr_rma *rma);
struct shm_region *hr_shm_region_find(struct shm_domain *dom, uint64_t key, uint32_t access, uint64_t addr,
                                      uint64_t len);
/* A key, as hr_mem.rkey and hr_rmem.rkey carry it: access, in an rmem the route for reads, slot and generation of the
 * region. */
enum shm_route { SHM_ROUTE_NONE, SHM_ROUTE_ARENA, SHM_ROUTE_PROCESS };
#define SHM_ACCESS 31 /* the bits of HR_ACCESS_* */
#define SHM_ROUTE 5
static inline uint32_t shm_key_access(uint64_t key) { return key & SHM_ACCESS; }
static inline enum shm_route shm_key_route(uint64_t key) { return (enum shm_route)(key >> SHM_ROUTE & 3); }
static inline uint32_t shm_key_slot(uint64_t key) { return key >> 8 & 0xffffff; }
static inline uint32_t shm_key_generation(uint64_t key) { return (uint32_t)(key >> 32); }

/* put.c: process_vm_writev */
hr_status hr_shm_post_put(struct hr_ep *ep, const struct hr_rma *rma, int (*may)(void *arg), void *arg);
/* When it returns HR_OK nothing is written here that was begun before, and that is refused now. */
hr_status hr_shm_put_stop(struct shm_ep *e);
/* Whether a thread of the peer can be seen to be stopped. */
int hr_shm_put_seen(const struct shm_ep *e);

/* arena.c: peers' arenas mapped here, and what peers were given of ours */
/* HR_OK: the peer has, or is being sent, the arena of this id. HR_AGAIN: its socket is full. HR_ERR_UNSUPPORTED: no
 * arena. */
hr_status hr_shm_arena_give(struct shm_ep *e, const void *addr, size_t len, uint64_t *id_p);
/* NULL: the peer has not sent it, or has given it back. */
struct shm_map *hr_shm_map_find(struct shm_ep *e, uint64_t id);
/* Makes the page table entries for a range, so that reading it does not fault page by page. */
void hr_shm_map_warm(struct shm_map *map, uint64_t offset, uint64_t len);
void hr_shm_map_put(struct shm_ep *e, struct shm_map *map);
void hr_shm_on_arena_frame(struct shm_ep *e, const struct shm_frame *frame, int fd);
/* Unmaps what nobody refers to; with all set, all. */
void hr_shm_maps_drop(struct shm_ep *e, int all);
/* Tells peers which of our arenas are gone. */
void hr_shm_arenas_sweep(struct shm_domain *dom);

/* remote.c */
hr_status hr_shm_post_write(struct hr_ep *ep, const struct hr_rma *rma);
hr_status hr_shm_post_atomic(struct hr_ep *ep, const struct hr_atomic *atomic);
hr_status hr_shm_cancel(struct hr_ep *ep, void *cookie);
/* Goes on with the write that is in pieces. HR_OK: all of it is in the ring. */
hr_status hr_shm_push(struct shm_ep *e);
/* The same from progress: returns how many events it delivered. */
int hr_shm_poll_push(struct shm_ep *e);
/* A record that is no message has arrived. 0: it makes no sense. */
int hr_shm_on_remote(struct shm_ep *e, unsigned kind, const uint8_t *hdr, size_t hdr_len, const uint8_t *payload,
                     size_t len);

#endif
