/* aside.c - plain memory, copied to where peers may read and write for the time of a run.
 *
 * Where ranks share cores the kernel's copies between processes, a system call and a walk through pages for each, cost
 * more than two copies within one: a program that says so (hr_program_set_aside) works on copies of buffers that peers
 * cannot map. What others see of it is what they see of registered memory.
 */

#include <string.h>

#include "core/program.h"
#include "core/xfer.h"
#include "hr/memory.h"

#define KEEP (256u << 10) /* up to this stays with the idle run */

static int is_mapped(const void *buf, uint64_t len) {
    struct hr_arena_info arena;
    return !len || hr_arena_find(buf, len, &arena);
}

static int room(struct hr_run *run, uint64_t need) {
    if (run->aside_have >= need) return 1;
    hr_arena_free(run->aside);
    run->aside = hr_arena_alloc(need, HR_ARENA_SMALL_PAGES | HR_ARENA_WRITABLE_BY_PEERS);
    run->aside_have = run->aside ? need : 0;
    return run->aside != NULL;
}

int hr_aside_take(struct hr_run *run) {
    const struct hr_program *p = run->program;
    char *in = run->bufs[HR_BUF_IN], *out = run->bufs[HR_BUF_OUT];
    int goes_in = p->aside & HR_ASIDE_IN, comes_out = p->aside & HR_ASIDE_OUT;
    run->back = NULL;
    if (!p->aside) return 1;
    if (p->in_bytes && p->out_bytes && in < out + p->out_bytes && out < in + p->in_bytes) { /* in place: one range */
        char *begin = in < out ? in : out, *ends[] = {in + p->in_bytes, out + p->out_bytes};
        uint64_t n = (uint64_t)((ends[0] > ends[1] ? ends[0] : ends[1]) - begin);
        if (is_mapped(begin, n)) return 1;
        if (!room(run, n)) return 0;
        run->bufs[HR_BUF_IN] = run->aside + (in - begin);
        run->bufs[HR_BUF_OUT] = run->aside + (out - begin);
    } else {
        goes_in = goes_in && !is_mapped(in, p->in_bytes);
        comes_out = comes_out && !is_mapped(out, p->out_bytes);
        uint64_t before = goes_in ? hr_page_up(p->in_bytes) : 0;
        if (!goes_in && !comes_out) return 1;
        if (!room(run, before + (comes_out ? p->out_bytes : 0))) return 0;
        if (goes_in) run->bufs[HR_BUF_IN] = run->aside;
        if (comes_out) run->bufs[HR_BUF_OUT] = run->aside + before;
    }
    if (goes_in) hr_copy(run->bufs[HR_BUF_IN], in, p->in_bytes, hr_store_into(run->aside, p->in_bytes, 0));
    if (comes_out) run->back = out;
    return 1;
}

void hr_aside_return(struct hr_run *run, hr_status status) {
    uint64_t n = run->program->out_bytes;
    if (run->back && status == HR_OK) hr_copy(run->back, run->bufs[HR_BUF_OUT], n, HR_STORE_CACHED);
    if (status == HR_OK && run->aside_have <= KEEP) return; /* else a lost peer may have it in its hands */
    hr_arena_free(run->aside);
    run->aside = NULL;
    run->aside_have = 0;
}
