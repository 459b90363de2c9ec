/* sim.h - a simulated RDMA device: queue pairs, completion queues and memory regions that behave as the verbs say. */
#ifndef HR_VERBS_SIM_H
#define HR_VERBS_SIM_H

/*
 * Three devices on every machine: for tests, and to try a job against failing queue pairs without RDMA. "sim" has one
 * port with one GID; "sim2" has two ports, each with a link-local, an IPv4 and an IPv6 GID; "sim_rxe" is "sim", but
 * departs from the specification where soft-RoCE does. Every opened context is a node of its own, whose GIDs name a
 * Unix socket in the abstract name space; packets of at most 4096 bytes go between the nodes of one host, within a
 * process and across, and are gone with the process. A fourth one, "tcp", is in no list of devices: its packets go over
 * sockets that its queue pairs are given. It is the spare rail of rails.md.
 *
 *   sim.c       contexts, completion queues: what has no protocol
 *   sim_mem.c   memory regions, copies
 *   sim_qp.c    states of a queue pair, posting, completing, flushing
 *   sim_srq.c   shared receive queues
 *   sim_req.c   the requester: packets out, acknowledgements in
 *   sim_resp.c  the responder: requests in, order, access, answers out
 *   sim_wire.c  sockets, the device's thread
 *   sim_stream.c  device "tcp"
 *
 * Reliable connections as InfiniBand has them: a packet sequence number (PSN) per packet, per response packet for
 * reads; the responder executes in order and answers out-of-order packets once with a sequence NAK; without a posted
 * receive it answers with an RNR NAK and the requester comes again; a fault of access breaks both queue pairs. A queue
 * pair talks over two sockets: requests go out on the one that it opened, answers come back on it; `in` is the peer's.
 *
 * The thread stands for the hardware: it acknowledges while the process that owns the queue pair is busy. While
 * somebody polls, the polls do the work and the thread keeps away. One lock per context guards all of it.
 *
 * How soft-RoCE departs (Linux 6.1, rdma-core 44), where `as_soft_roce` is asked:
 *
 *   sim_resp.c  one error for all that goes wrong where a message is put: its length, the key, the rights, the range
 *   sim_resp.c  a write with immediate data takes its receive before its key is looked at, and the refusal ends that
 *               receive, too, with a status that is for requesters
 *   sim_mem.c   data from a key that is not there is no protection error, but one of the operation
 *   sim_qp.c    receives are put into memory that the kernel reads when a packet comes: it does not hear of those that
 *               are posted after the failure, and flushes none of them
 *   sim_qp.c    requests are put there before the kernel is told, which refuses them where the queue pair may not send
 *               yet: they stay, and go out with the next that is posted, or are flushed
 */

#include <pthread.h>

#include "hr/clock.h"
#include "providers/verbs/backend.h"

enum {
    SIM_MTU = 4096,
    SIM_SGE = 4,
    SIM_INLINE = 256,
    SIM_MAX_WR = 4096,
    SIM_MAX_QP = 4096,
    SIM_MAX_MR = 1 << 14,
    SIM_MAX_CQE = 1 << 20,
    SIM_RD_ATOMIC = 16,
    SIM_MAX_MSG = 1 << 30,
    SIM_PSN = 0xffffff,
    SIM_SOFT_ROCE = 0xffffff, /* the vendor that its driver reports */
    SIM_PORTS = 2,
    SIM_GIDS = 3
};

enum sim_op { SIM_CONNECT = 1, SIM_SEND, SIM_WRITE, SIM_READ, SIM_CAS, SIM_ADD, SIM_ACK, SIM_NAK, SIM_DATA, SIM_OLD };
enum { SIM_FIRST = 1, SIM_LAST = 2, SIM_IMM = 4 };
enum sim_nak { SIM_NAK_SEQUENCE = 1, SIM_NAK_RNR, SIM_NAK_INVALID, SIM_NAK_ACCESS, SIM_NAK_OPERATION };

struct sim_packet { /* payload follows */
    uint8_t op, flags, nak, pad;
    uint32_t psn;
    uint32_t imm;
    uint32_t rkey; /* CONNECT: queue pair of the caller */
    uint64_t addr; /* CONNECT: queue pair that is called. OLD: the value before */
    uint64_t len;  /* of the message. CONNECT: nanoseconds that the caller waits for an answer */
    uint64_t operand, compare;
    union ibv_gid gid;    /* CONNECT: of the caller */
    uint32_t bytes, zero; /* on a stream: of the payload */
};

struct sim_mr {
    struct ibv_mr base;
    int access;
};

struct sim_cq {
    struct ibv_cq base;
    struct ibv_wc *ring;
    int head, count, cap;
    int armed, overrun;
    unsigned events; /* told through the channel and not fetched yet */
    struct sim_cq *next;
};

struct sim_channel {
    struct ibv_comp_channel base;
    struct sim_cq *cqs;
};

struct sim_wqe {
    struct ibv_send_wr wr;
    struct ibv_sge sge[SIM_SGE];
    uint8_t data[SIM_INLINE];
    uint32_t len, first, last; /* PSN of its first and last packet */
    uint32_t have;             /* read: bytes that came */
    int answered;              /* read, atomic: all is here */
};

struct sim_rwqe {
    uint64_t wr_id;
    int num_sge;
    struct ibv_sge sge[SIM_SGE];
};

struct sim_srq { /* receives of many queue pairs */
    struct ibv_srq base;
    struct sim_rwqe *ring;
    uint32_t head, tail, cap;
    struct sim_srq *next;
};

struct sim_answer {
    uint8_t op, nak;
    uint32_t psn, rkey;
    uint64_t addr, len, sent; /* DATA; OLD: addr is the value */
};
enum { SIM_ANSWERS = 64, SIM_ASYNC = 16 };

struct sim_stream;
struct sim_qp {
    struct ibv_qp base;
    struct ibv_qp_attr attr;
    struct ibv_qp_cap cap;
    int sig_all;
    int last;                  /* 1: that it has taken its last shared receive is to be told */
    struct sim_stream *stream; /* of device "tcp": `out` and `in` are its socket */

    /* requester */
    int out, out_waits; /* socket; waits for room in it */
    int gone;           /* nobody answers any more */
    struct sim_wqe *sq;
    uint32_t sq_head, sq_tail, sq_at; /* counters: oldest, next free, next to be sent */
    uint32_t untold;                  /* requests at sq_tail that the device does not know of */
    uint32_t at_off;                  /* bytes of sq_at that were sent */
    uint32_t psn;                     /* of the next new packet */
    int reads, rnr_left, retry_left;
    int64_t resume; /* after an RNR NAK; 0: no pause */
    int64_t silent; /* since when there is something to send and no connection; 0: not so */

    /* responder */
    int in, in_waits;
    struct sim_rwqe *rq; /* with a shared queue: the one receive that was taken from it */
    uint32_t rq_head, rq_tail;
    uint32_t expect;  /* PSN */
    int nak_sent;     /* until the expected packet comes */
    uint64_t offset;  /* into the message that is arriving */
    uint64_t address; /* write: where its next byte goes */
    uint32_t rkey;
    uint64_t total; /* its length, from its first packet */
    struct sim_answer answers[SIM_ANSWERS];
    uint32_t answer_head, answer_tail;
};

struct sim_caller { /* a connection whose queue pair is not ready to receive yet */
    struct sim_caller *next;
    int fd;
    int named;
    uint32_t id, from, to;
    union ibv_gid gid;
    int64_t patience, since; /* how long what it sends may wait; since when it does, or 0 */
};

struct sim_context {
    struct ibv_context base;
    pthread_mutex_t lock;
    pthread_t thread;
    int stop;
    int tcp, as_soft_roce;
    int ports, ngids;
    union ibv_gid gids[SIM_PORTS][SIM_GIDS]; /* of port + 1 */
    unsigned down;                           /* ports, as bits */
    int mute;                                /* nothing gets in or out, and nobody is told */
    struct ibv_async_event async[SIM_ASYNC];
    unsigned async_head, async_tail;
    int epfd, listener, kick;
    int64_t polled; /* when somebody last did */
    int armed;      /* completion queues whose owner may be asleep */
    struct sim_mr **mrs;
    uint8_t *mr_generation;
    uint32_t nmrs, mrs_cap, next_key; /* these two: of device "tcp" */
    struct sim_qp *qps[SIM_MAX_QP];
    uint16_t generation[SIM_MAX_QP];
    int nqps, waiting; /* waiting: queue pairs that pause or could not connect, callers that could not be taken */
    int deaf;          /* the listener is not looked at until the next tick */
    struct sim_srq *srqs;
    int keeps; /* a queue pair that breaks keeps the receive that it took; and its completions go with it: sim_srq.c */
    struct sim_caller *callers;
    uint32_t next_caller;
    _Alignas(8) uint8_t packet[sizeof(struct sim_packet) + SIM_MTU];
};

static inline struct sim_context *sim_of(void *ctx) { return (struct sim_context *)ctx; }
static inline uint32_t sim_psn_sub(uint32_t a, uint32_t b) { return (a - b) & SIM_PSN; }
static inline int sim_psn_before(uint32_t a, uint32_t b) { return sim_psn_sub(a, b) >> 23 & 1; }
static inline uint32_t sim_packets(uint64_t len) { return len ? (uint32_t)((len + SIM_MTU - 1) / SIM_MTU) : 1; }

/* sim.c */
void sim_cq_push(struct sim_cq *cq, const struct ibv_wc *wc);

/* Device "tcp", opened; NULL: errno. */
struct ibv_context *hr_verbs_sim_tcp(void);
/* The connection that this queue pair's packets go over from now on; it is RTS, and so is its peer, or will be. The
 * descriptor stays the caller's. Returns an errno. */
int hr_verbs_sim_attach(struct ibv_qp *qp, int fd);

/* A cable that is pulled, or plugged in: an event, and what is under way on the port comes to nothing. */
void hr_verbs_sim_port(struct ibv_context *ctx, int port, int up);
/* Nothing gets through any more, either way, and nobody is told; or it goes on, with what has waited. */
void hr_verbs_sim_mute(struct ibv_context *ctx, int mute);
/* A card that is taken out: the event that says so. What is under way goes on, until the context is closed. */
void hr_verbs_sim_remove(struct ibv_context *ctx);

/* sim_mem.c */
struct ibv_mr *sim_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access);
int sim_dereg_mr(struct ibv_mr *mr);
/* The region of this protection domain with that key, or NULL. */
struct sim_mr *sim_mr_find(struct sim_context *ctx, struct ibv_pd *pd, uint32_t key);
/* Whether there is one that covers the range and allows that access. */
int sim_mr_allows(struct sim_context *ctx, struct ibv_pd *pd, uint32_t key, uint64_t addr, uint64_t len, int access);
/* As hardware copies: while the owner of the memory may be looking. That is the nature of one-sided access and no race
 * of the program's, so the thread sanitizer is not shown it. 0: there is no such memory. */
int sim_dma(struct sim_context *ctx, void *to, const void *from, size_t len);
/* Copies n bytes at offset of a list of segments. */
enum ibv_wc_status sim_gather(struct sim_qp *qp, const struct ibv_sge *sge, int n, uint64_t offset, void *to,
                              size_t len);
/* The other way; 0 when a key or a length is wrong. */
int sim_scatter(struct sim_qp *qp, const struct ibv_sge *sge, int n, uint64_t offset, const void *from, size_t len);

/* sim_qp.c */
struct ibv_qp *sim_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
int sim_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
int sim_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init);
int sim_destroy_qp(struct ibv_qp *qp);
int sim_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
int sim_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
struct sim_qp *sim_qp_find(struct sim_context *ctx, uint32_t qpn);
/* Tells the end of the oldest request. */
void sim_complete(struct sim_qp *qp, enum ibv_wc_status status);
void sim_complete_recv(struct sim_qp *qp, enum ibv_wc_status status, enum ibv_wc_opcode opcode, uint64_t len,
                       const struct sim_packet *packet);
/* To the error state: everything that is posted is flushed. */
void sim_qp_error(struct sim_qp *qp);

/* What is wrong with posting this receive to a queue in which so many wait; 0: it was put at the place. */
int sim_rwqe_fill(struct sim_rwqe *rwqe, const struct ibv_recv_wr *wr, uint32_t waiting, uint32_t cap);

/* sim_srq.c */
struct ibv_srq *sim_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr);
int sim_destroy_srq(struct ibv_srq *srq);
int sim_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
/* The oldest receive becomes that of this queue pair, if there is one. */
void sim_srq_take(struct sim_qp *qp);
/* The queue pair has broken, and takes no more of them: an event. */
void sim_srq_last(struct sim_qp *qp);
/* The queue pair is destroyed: what a device that keeps receives does with its completions. */
void sim_srq_clean(struct sim_qp *qp);

/* sim_req.c */
void sim_transmit(struct sim_qp *qp);
void sim_on_answer(struct sim_qp *qp, const struct sim_packet *packet, const void *payload, size_t len);
/* The socket has ended: whoever is still waiting waits in vain. */
void sim_on_gone(struct sim_qp *qp);

/* sim_resp.c */
void sim_on_request(struct sim_qp *qp, const struct sim_packet *packet, const void *payload, size_t len);
void sim_answer_pump(struct sim_qp *qp);

/* sim_wire.c */
int sim_port_open(struct sim_context *ctx);
void sim_port_close(struct sim_context *ctx);
/* Does what is there to do, without waiting. */
void sim_run(struct sim_context *ctx);
void sim_dial(struct sim_qp *qp);
/* The caller that waits for this queue pair becomes its `in`. */
void sim_pair(struct sim_qp *qp);
void sim_hang_up(struct sim_qp *qp);
/* In a while, although nothing may arrive until then. */
void sim_look_again(struct sim_context *ctx);
/* 1 sent, 0 no room (will be called again), -1 the socket has ended. */
int sim_wire_send(struct sim_qp *qp, int out, const struct sim_packet *packet, const void *payload, size_t len);
/* Nothing goes out any more. Why may be in the socket: it is read before its end is found. */
void sim_wire_end(struct sim_qp *qp);
/* The socket of a stream is listened to; and asked for room. -1: errno. */
int sim_watch_stream(struct sim_qp *qp, int for_room);

/* sim_stream.c */
int sim_stream_send(struct sim_qp *qp, const struct sim_packet *packet, const void *payload, size_t len);
void sim_stream_writable(struct sim_qp *qp);
void sim_stream_receive(struct sim_qp *qp);
void sim_stream_free(struct sim_qp *qp);
/* Copies within this process; 0: some of it is not there. */
int sim_touch(void *to, const void *from, size_t len);

#endif
