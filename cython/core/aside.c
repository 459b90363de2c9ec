/* aside.c - plain memory, copied to where peers may read and write for the time of a run.
 *
 * Where ranks share cores the kernel's copies between processes, a system call and a walk through pages for each, cost
 * more than two copies within one: a program that says so (hr_program_set_aside) works on copies of buffers that peers
 * cannot map. What others see of it is what they see of registered memory. Where there is no room for copies it works
 * on the buffers: ranks may differ in it. (HR_ASIDE_WITHIN: programs that copy by themselves, hrdma.topo.slices.)
 */

#include "core/program.h"
#include "core/xfer.h"
#include "hr/memory.h"

#define PIECE (512u << 10) /* others may have the engine in between */

static int is_mapped(const void *buf, uint64_t len) {
    struct hr_arena_info arena;
    return !len || hr_arena_find(buf, len, &arena);
}

void hr_aside_take(struct hr_run *run) {
    const struct hr_program *p = run->program;
    char *in = run->bufs[HR_BUF_IN], *out = run->bufs[HR_BUF_OUT];
    int goes_in = p->aside & HR_ASIDE_IN, comes_out = p->aside & HR_ASIDE_OUT;
    run->aside = run->back = NULL;
    if (!goes_in && !comes_out) return;
    if (p->in_bytes && p->out_bytes && in < out + p->out_bytes && out < in + p->in_bytes) { /* in place: one range */
        char *begin = in < out ? in : out, *ends[] = {in + p->in_bytes, out + p->out_bytes};
        uint64_t n = (uint64_t)((ends[0] > ends[1] ? ends[0] : ends[1]) - begin);
        if (is_mapped(begin, n) || !(run->aside = hr_arena_alloc(n, HR_ASIDE_ROOM))) return;
        run->bufs[HR_BUF_IN] = run->aside + (in - begin);
        run->bufs[HR_BUF_OUT] = run->aside + (out - begin);
    } else {
        goes_in = goes_in && !is_mapped(in, p->in_bytes);
        comes_out = comes_out && !is_mapped(out, p->out_bytes);
        uint64_t before = goes_in ? hr_page_up(p->in_bytes) : 0;
        if (!goes_in && !comes_out) return;
        if (!(run->aside = hr_arena_alloc(before + (comes_out ? p->out_bytes : 0), HR_ASIDE_ROOM))) return;
        if (goes_in) run->bufs[HR_BUF_IN] = run->aside;
        if (comes_out) run->bufs[HR_BUF_OUT] = run->aside + before;
    }
    if (goes_in) hr_copy(run->bufs[HR_BUF_IN], in, p->in_bytes, hr_store_into(run->aside, p->in_bytes, 0));
    if (comes_out) run->back = out;
}

static void copy_back(struct hr_run *run, uint64_t n) {
    hr_copy(run->back + run->brought, run->bufs[HR_BUF_OUT] + run->brought, n, HR_STORE_CACHED);
    run->brought += n;
}

static int bring_step(struct hr_engine *engine, struct hr_work *work) {
    struct hr_run *run = hr_container(work, struct hr_run, bringing);
    uint64_t left = run->program->out_bytes - run->brought;
    copy_back(run, left < PIECE ? left : PIECE);
    if (left > PIECE) return 1;
    hr_work_remove(engine, work);
    run->outstanding--;
    run->back = NULL;
    hr_run_ready(run);
    return 0;
}

int hr_aside_bring(struct hr_run *run) {
    if (!run->back) return 1;
    if (!hr_list_empty(&run->bringing.link)) return 0; /* an instruction that ended at once made it ready again */
    run->brought = 0;
    if (run->program->out_bytes <= HR_INLINE_WORK) {
        copy_back(run, run->program->out_bytes);
        run->back = NULL;
        return 1;
    }
    run->bringing.step = bring_step;
    run->outstanding++;
    hr_work_add(run->comm->engine, &run->bringing, run->priority);
    return 0;
}

void hr_aside_fail(struct hr_run *run) {
    if (hr_list_empty(&run->bringing.link)) return;
    hr_work_remove(run->comm->engine, &run->bringing);
    run->outstanding--;
}

void hr_aside_free(struct hr_run *run) {
    hr_arena_free(run->aside);
    run->aside = NULL;
}
