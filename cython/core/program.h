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
    uint32_t *folds;  /* of a RECV: the REDUCE for which alone it is, of a REDUCE: the answer, and 1; 0: others', too */
    uint32_t ninstr, nunlock, nref, nfirst;
    uint64_t in_bytes, out_bytes, tmp_bytes;
    int size, paced, mutual;     /* paced: as HR_REQ_PACED */
    struct hr_run *_Atomic idle; /* one run kept for the next time; HR_NO_RUN: its owner has let it go */
};

#define HR_NO_RUN ((struct hr_run *)1)
void hr_program_get(struct hr_program *program);
void hr_program_drop(struct hr_program *program);

void hr_run_free(struct hr_run *run);
/* A RECV with HR_RECV_FOLD has come, whole, and is shown: 1, what it is for was done out of it; 0, keep it. */
int hr_run_fold(struct hr_request *req, const void *data, size_t len);

#endif
