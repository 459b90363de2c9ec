/* program.h - a validated program, and the runs kept for using again. */
#ifndef HR_CORE_PROGRAM_H
#define HR_CORE_PROGRAM_H

#include "core/engine.h"

struct hr_run;

struct hr_program {
    _Atomic int refs; /* its owner's, and of each run that there is, idle or not */
    struct hr_instr *instrs;
    uint32_t *unlocks;
    struct hr_ref *refs_;
    uint32_t *first;  /* instructions that may start at once */
    uint8_t *returns; /* what it moves comes back: a SEND's from its peer, a RECV_REDUCE's or BORROW's from here */
    /* The next four count from 1; 0: none. */
    uint32_t *folds; /* of a RECV: the REDUCE that it alone is for; of a REDUCE: the answer; of a RECV_REDUCE: onward */
    uint32_t *onward; /* the SEND of the whole sum, which waits for nothing else */
    uint32_t *reader; /* of a BORROW: the REDUCE that reads it */
    uint32_t *same;   /* of a SEND: which of those whose payload goes to several peers */
    uint32_t ninstr, nunlock, nref, nfirst, nsame;
    uint64_t in_bytes, out_bytes, tmp_bytes;
    int size, paced, mutual;     /* paced: as HR_REQ_PACED */
    uint32_t aside;              /* HR_ASIDE_* */
    struct hr_run *_Atomic idle; /* one run kept for the next time; HR_NO_RUN: its owner has let it go */
};

#define HR_NO_RUN ((struct hr_run *)1)
void hr_program_get(struct hr_program *program);
void hr_program_drop(struct hr_program *program);

struct instr_state {
    struct hr_request req;
    struct hr_work work;
    struct hr_run *run;
    uint64_t offset; /* bytes of work done: in pieces, or when a REDUCE's last operand came; of a SEND: with its sum */
};

struct hr_run {
    struct hr_link ready; /* engine->ready */
    struct hr_link link;  /* comm->runs */
    struct hr_program *program;
    struct hr_comm *comm;
    struct hr_request *req;
    char *bufs[3]; /* by enum hr_buf */
    hr_dtype dtype;
    hr_redop op;
    uint64_t sig, seq, same; /* same: the engine's count of payloads that go to several, before this run's */
    uint32_t remaining, outstanding, queue_head, queue_tail;
    int failing, priority, tmp_plain; /* tmp_plain: it is no arena's */
    uint64_t tmp_have;
    char *aside, *back; /* copies of the caller's buffers; where the result goes then, until it is there: else NULL */
    uint64_t brought;   /* bytes of it */
    struct hr_work bringing;
    uint32_t *after, *queue;
    struct instr_state *st;
};

/* run.c */
void hr_run_free(struct hr_run *run);
/* The request of an instruction that talks, ready to be started. */
struct hr_request *hr_run_request(struct hr_run *run, uint32_t i);
void hr_run_ended(struct hr_run *run, uint32_t i);
void hr_run_ready(struct hr_run *run);

/* aside.c: copies are not beside what stays, as a peer that was stopped may take the whole arena with it. */
#define HR_ASIDE_ROOM (HR_ARENA_SMALL_PAGES | HR_ARENA_WRITABLE_BY_PEERS | HR_ARENA_PASSING)
void hr_aside_take(struct hr_run *run);
int hr_aside_bring(struct hr_run *run); /* 1: the result is where it belongs; 0: the run will be ready again */
void hr_aside_fail(struct hr_run *run);
void hr_aside_free(struct hr_run *run); /* after nothing of it is lent any more */

/* compute.c */
void hr_run_compute(struct hr_run *run, uint32_t i, const struct hr_instr *in);
#define HR_FUSED 2
/* What a RECV or RECV_REDUCE with HR_RECV_FOLD has asked for, or a piece of it, is shown: not 0, what it is for was
 * done out of it; HR_FUSED, and what was made has gone on in a message; 0, keep it. */
int hr_run_fold(struct hr_request *req, const void *data, size_t len);

#endif
