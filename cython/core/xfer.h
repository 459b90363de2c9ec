/* xfer.h - transfers: messages too large to be copied along, and what both ends do about them. */
#ifndef HR_CORE_XFER_H
#define HR_CORE_XFER_H

#include "hr/hr.h"
#include "hr/list.h"

struct hr_conn;
struct hr_engine;
struct hr_hdr;
struct hr_hdr_long;

#define HR_WRITES 8 /* of a transfer, that the provider has and will confirm */

struct hr_work { /* something heavy, done one piece at a time between polls */
    struct hr_link link;
    int (*step)(struct hr_engine *engine, struct hr_work *work); /* 1: more to do */
    int priority;
};

enum hr_xfer_mode {
    HR_XFER_FREE,
    HR_XFER_SEND,
    HR_XFER_SEND_PUSH,
    HR_XFER_SEND_SEG,
    HR_XFER_RMA, /* a user's read, write or atomic: onesided.c */
    HR_XFER_PULL,
    HR_XFER_PUSH,
    HR_XFER_SEG,
    HR_XFER_LENT
};

struct hr_xfer {         /* one rendezvous, on one side */
    struct hr_work work; /* PULL: pieces to copy; SEND_*: link in the connection's bulk queue */
    struct hr_request *req;
    struct hr_conn *conn;
    uint32_t id, remote;
    uint8_t mode, has_mem, has_rmem, sure, relay; /* sure: writes are confirmed; relay: 1 + which of the reading */
    uint8_t open, both;   /* who receives it writes back what it makes of it; this side sends as well, where that counts
                             (HR_CAP_RELAYS): 1 + what is made of it (relay.h) */
    uint8_t beside;       /* share.c: the program copies the same memory meanwhile */
    uint32_t head, begun; /* bytes of the beginning that went with the RTS; that came with it and were taken */
    uint32_t outstanding; /* reads or writes in the provider */
    char *buf, *scratch;  /* scratch: pieces that are read to be reduced */
    uint64_t len, posted, completed, key; /* key: in the ledger of who sends; 0: it is not there */
    uint64_t from, shared, read;       /* share.c: the part that both ends copy, 0: none; bytes of it that were read */
    int64_t busy;                      /* ns of work with what comes, where both send */
    uint64_t reached;                  /* where the last piece ends that the sender took */
    uint32_t helped, back;             /* pieces that the sender has copied; 1 + the one it could not */
    uint32_t writes[HR_WRITES], first; /* SEND_PUSH: bytes of those in the provider, where it confirms them; a ring */
    struct hr_mem mem;
    struct hr_rmem rmem;
};

/* transfer.c */
#define HR_XFER_COOKIE(x) ((void *)((uintptr_t)(x) | 1))
struct hr_xfer *hr_xfer_find(struct hr_conn *conn, uint32_t id); /* NULL: it is over */
struct hr_xfer *hr_xfer_new(struct hr_engine *engine, struct hr_request *req, struct hr_conn *conn, int mode);
void hr_xfer_free(struct hr_engine *engine, struct hr_xfer *x);
int hr_xfer_confirms(const struct hr_conn *conn);
void hr_xfer_send_fin(struct hr_conn *conn, uint64_t comm, uint32_t sreq, hr_status status);
void hr_xfer_accept(struct hr_request *req, struct hr_conn *conn, const struct hr_hdr_long *rts, const void *head,
                    size_t len);
void hr_xfer_on_cts(struct hr_conn *conn, const struct hr_hdr_long *cts);
void hr_xfer_on_seg(struct hr_conn *conn, const struct hr_hdr *h, const void *payload, size_t len);
void hr_xfer_on_fin(struct hr_conn *conn, const struct hr_hdr *h);
void hr_xfer_on_cancel(struct hr_conn *conn, const struct hr_hdr *h);
void hr_xfer_on_notify(struct hr_conn *conn, uint64_t value, size_t nbytes);
void hr_xfer_on_done(struct hr_xfer *x, hr_status status);
/* HR_AGAIN: no room. *nbytes_p: what left. The transfer may be finished and gone on return. */
hr_status hr_xfer_send_segment(struct hr_conn *conn, struct hr_xfer *x, uint64_t *nbytes_p);
void hr_xfer_pulled(struct hr_xfer *x); /* all of it, if it stands */
void hr_xfer_pull_failed(struct hr_engine *engine, struct hr_xfer *x, hr_status status);
void hr_xfer_return(struct hr_engine *engine, struct hr_xfer *x); /* LENT: the borrower is through */
void hr_xfer_abort(struct hr_engine *engine, struct hr_xfer *x, int tell);
hr_store hr_store_into(const void *dst, uint64_t len, int unread);
/* 1: the result has gone on in a message, too. */
int hr_consume(struct hr_request *req, const void *data, uint64_t offset, size_t len);
/* Of a RECV_REDUCE: reduces into its place and, unless it is NULL, to another: back where the operand came from, or on,
 * to where a peer reads it. */
void hr_consume_to(struct hr_request *req, const void *data, uint64_t offset, size_t len, void *back, void *on);

/* offer.c: the access by which the receiver may write there what it makes of it, 0: it may not; the sender's RTS */
uint32_t hr_xfer_opens(const struct hr_conn *conn, const struct hr_request *req);
hr_status hr_xfer_offer(struct hr_conn *conn, struct hr_request *req, struct hr_hdr_long *rts);
uint32_t hr_xfer_head(const struct hr_xfer *x); /* bytes of its beginning that are to go with the RTS */
/* The peer has called for segments of it, or has not. */
void hr_xfer_called(const struct hr_xfer *x, int called);

/* share.c */
int hr_share_ask(struct hr_xfer *x); /* 1: both ends copy it; the receive goes on by itself */
void hr_share_piece_read(struct hr_xfer *x);
void hr_share_on_help(struct hr_conn *conn, const struct hr_hdr_long *help);
void hr_share_on_helped(struct hr_conn *conn, const struct hr_hdr *h);
uint64_t hr_share_bytes(const struct hr_xfer *x); /* of one that is shared: all of them are there, or 0 */
/* Before the program copies a piece. If this side copies the same to a peer, they take turns, so that it is fetched
 * once; 1: not now, the copy is ahead. */
int hr_share_turn(struct hr_engine *engine, struct hr_work *copy, const char *src, uint64_t len);
int hr_share_revoke(struct hr_xfer *x); /* 0: the sender may have been stopped as it wrote */

#endif
