/* program.h - a schedule bound to one rank: the instructions that the core runs without asking Python. */
#ifndef HR_PROGRAM_H
#define HR_PROGRAM_H

/*
 * A program is a list of instructions with a partial order: an instruction may start when `after` others have ended;
 * when it ends it counts down those in its unlock list. There is no other control flow and nothing left to decide.
 * Programs are immutable and shared; a run keeps its own counters. Every rank of a communicator runs its own program of
 * the same schedule; the SENDs of one and the receives of the other pair by (peer, tag), tag unique per ordered pair of
 * ranks.
 *
 * Memory is named by (buffer, offset): HR_BUF_IN and HR_BUF_OUT are the caller's (the same memory for an in-place
 * call; or copies of it: hr_program_set_aside), HR_BUF_TMP is scratch of tmp_bytes that the run owns (registered,
 * prefaulted, from a pool). Offsets and lengths are bytes, lengths of reductions a multiple of the element size.
 *
 * BORROW makes a peer's chunk readable for REDUCE: in place, without a copy, where the provider maps the peer's memory;
 * piece by piece where a provider reads what is not mapped, and that is faster; otherwise it receives into dst (a
 * scratch range the program provides). The lender's SEND may end only when the borrower's REDUCE that names it has. So
 * a REDUCE over borrowed chunks reads every contribution once and writes the result once.
 *
 * A chunk that is sent to be reduced, and to be received again with the result, may be written back by who reduces it:
 * where a provider maps the peer's memory for that, or writes to what is not mapped (HR_CAP_PUT) and that is faster
 * than messages, the result is put where the chunk lies, and the two instructions of the answer, with HR_INSTR_RETURNS,
 * end without a message. The SEND of the answer names the RECV_REDUCE or BORROW whose result it sends, the RECV the
 * SEND whose memory it overwrites, by `ref`. So from the beginning of that SEND to the end of that RECV nothing else
 * may touch the memory; `hrdma.topo.verify` proves it, and that both ends pair up.
 *
 * What a RECV brings into scratch for one REDUCE alone, which waits for it, is reduced out of the message, and not put
 * there, where it comes whole and the REDUCE waits for nothing else by then. What a REDUCE makes in scratch for one
 * answer alone is not put there where it is put back. So that this can be seen, whoever else reads it waits for the
 * RECV or the REDUCE by an edge of its own.
 *
 * A SEND of a whole sum that waits for that alone may leave with it, written into the message as it is made
 * (HR_CAP_FILLS), when the operand comes whole: before its turn, and before that of a REDUCE that is done out of the
 * message.
 */

#include <stdint.h>

#include "hr/reduce.h"

enum hr_buf {
    HR_BUF_IN,
    HR_BUF_OUT,
    HR_BUF_TMP,
    HR_BUF_BORROWED /* only in REDUCE sources: offset is an instruction index */
};

enum hr_opcode {
    HR_OP_SEND,        /* src -> peer. Ends when src may be overwritten. */
    HR_OP_RECV,        /* peer -> dst */
    HR_OP_RECV_REDUCE, /* dst = dst op (from peer), segment by segment as it arrives. Left operand: dst. */
    HR_OP_BORROW,      /* see above; dst is the fallback range */
    HR_OP_REDUCE,      /* dst = op over sources, left to right; the run of refs [ref, ref + nref) */
    HR_OP_COPY,        /* dst = src */
    HR_OP_NOP,         /* joins dependencies */
    HR_OPCODES
};

enum {
    HR_INSTR_SCALE = 1,    /* avg: multiply by 1/size of the communicator; set on each element's last reduction */
    HR_INSTR_NT = 2,       /* the result is not read again soon: bypass the cache */
    HR_INSTR_SWAP = 4,     /* RECV_REDUCE: the peer's operand is the left one */
    HR_INSTR_STAGED = 8,   /* SEND: in messages, though the peer could read it in place: the program changes it */
    HR_INSTR_CHANGED = 16, /* SEND: the program changes it: what is not mapped comes in messages, unless it is long */
    HR_INSTR_RETURNS = 32  /* SEND, RECV: the answer to `ref`, below */
};

struct hr_ref {
    uint32_t buf;
    uint32_t pad;
    uint64_t off;
};

struct hr_instr { /* 64 bytes; numpy dtype in hrdma/planning.py */
    uint8_t op;
    uint8_t lane; /* both ends say the same: the connection maps it to one of its rails */
    uint16_t flags;
    int32_t peer; /* rank in the communicator; -1: none */
    uint32_t tag;
    uint32_t after;
    uint32_t unlock, nunlock; /* run in the unlock array: instruction indices */
    uint32_t ref, nref;       /* run in the ref array: REDUCE sources. HR_INSTR_RETURNS: ref is an instruction */
    uint64_t len;
    uint8_t dst_buf, src_buf;
    uint8_t pad[6];
    uint64_t dst_off;
    uint64_t src_off;
};

struct hr_program;

/* Copies the arrays and validates them: indices and ranges in bounds (in_bytes, out_bytes, tmp_bytes), peers in [0,
 * size), `after` equal to the number of unlocks that name the instruction, no cycle, no send to oneself. HR_ERR_INVALID
 * with detail otherwise. */
hr_status hr_program_new(const struct hr_instr *instrs, uint32_t ninstr, const uint32_t *unlocks, uint32_t nunlock,
                         const struct hr_ref *refs, uint32_t nref, uint64_t in_bytes, uint64_t out_bytes,
                         uint64_t tmp_bytes, int size, struct hr_program **program_p, char detail[256]);
enum { HR_ASIDE_IN = 1, HR_ASIDE_OUT = 2, HR_ASIDE_WITHIN = 4 };
/* Buffers of its runs that are not in arenas (hr/memory.h) are replaced by room in one, where there is room: the input,
 * which is copied there before, and the output, which is copied back when all has ended well. In place one range takes
 * the place of both, whichever is said; then what is not said may not be needed: of HR_ASIDE_IN alone the program
 * writes nothing that anybody wants, of HR_ASIDE_OUT alone it reads nothing that it has not written, and it writes all
 * of its output. HR_ASIDE_WITHIN: the program does it, in scratch, which peers may map and write to then; its runs are
 * counted as such. Before the first run. */
void hr_program_set_aside(struct hr_program *program, uint32_t what);
/* Its owner runs it no more; what runs ends as it would have. */
void hr_program_put(struct hr_program *program);

#endif
