/* ways.h - how many pages of far memory are gone through side by side. */
#ifndef HR_CORE_REDUCE_WAYS_H
#define HR_CORE_REDUCE_WAYS_H

#include <stdint.h>

#include "table.h"

struct hr_reduce_trial {
    int kind, way; /* way -1: it is not one */
    int64_t since;
};

/* Before and after a job of one source or two whose memory is far: begin says how it goes, in job->pages. is_half: of
 * 16-bit floating types, which are bound by other things. */
struct hr_reduce_trial hr_reduce_way_begin(hr_reduce_job *job, int is_half);
void hr_reduce_way_end(const struct hr_reduce_trial *trial, size_t nbytes);

#endif
