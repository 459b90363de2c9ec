/* test_shm_puts.c - what is written by process_vm_writev into memory that nobody has mapped, and how its owner ends
 * that. */

#define _GNU_SOURCE
#include <sys/mman.h>

#include "shm_child.h"

enum { BYTES = 1 << 20 };
static uint8_t theirs[BYTES], mine[BYTES], expected[BYTES];

static hr_status show(struct side *owner, uint32_t access, struct hr_mem *mem, struct hr_desc *desc) {
    CHECK_EQ(ops->mem_register(owner->domain, theirs, BYTES, access, mem), HR_OK);
    return ops->mem_export(owner->ep, mem, theirs, BYTES, desc);
}

/* ---- two endpoints of one process ---- */

struct asked {              /* by post_put */
    int times, yes;         /* yes: so often */
    struct shm_ep *empties; /* whose inlet is emptied each time, as for the sake of another put */
};
static int may(void *arg) {
    struct asked *a = arg;
    if (a->empties) atomic_store(&a->empties->inlet->len, 0);
    return a->times++ < a->yes;
}

/* b may put into memory of a. 0, and nothing is open: the kernel does not permit it here. */
static int opened(struct side *a, struct side *b, struct hr_mem *mem, struct hr_rmem *rmem) {
    struct hr_desc desc;
    memset(rmem, 0, sizeof *rmem);
    pair_open(a, b, NULL);
    if (show(a, HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_PUT, mem, &desc) == HR_OK)
        CHECK_EQ(ops->mem_import(b->ep, &desc, rmem), HR_OK);
    if (!rmem->puts) side_close(a), side_close(b);
    return rmem->puts;
}
#define REFUSED "the kernel does not permit process_vm_writev here"

static int permitted(void) {
    struct side a, b;
    struct hr_mem mem;
    struct hr_rmem rmem;
    int puts = opened(&a, &b, &mem, &rmem);
    if (puts) side_close(&a), side_close(&b);
    return puts;
}

TEST(what_is_put_is_there) {
    static const size_t spots[][2] = {{0, 1}, {1, 7}, {4095, 2}, {12345, 54321}, {BYTES - 1, 1}, {0, BYTES}};
    struct side a, b;
    struct hr_mem mem;
    struct hr_rmem rmem;
    if (!opened(&a, &b, &mem, &rmem)) SKIP(REFUSED);
    CHECK(!rmem.ptr && !rmem.out);
    memset(theirs, 0, BYTES), memset(expected, 0, BYTES);
    for (size_t i = 0; i < sizeof spots / sizeof *spots; i++) {
        struct asked asked = {.yes = 1};
        struct hr_rma rma = {.local = mine, .len = spots[i][1], .remote = &rmem, .offset = spots[i][0]};
        fill(mine, BYTES, (int)i + 3);
        memcpy(expected + rma.offset, mine, rma.len);
        CHECK_EQ(ops->post_put(b.ep, &rma, may, &asked), HR_OK);
        CHECK_EQ(asked.times, 1);
        CHECK_MEM(theirs, expected, BYTES);
    }
    CHECK_EQ(ops->mem_quiet(a.ep, &mem), HR_OK);
    side_close(&a), side_close(&b);
}

TEST(what_may_not_be_put_is_not) {
    struct side a, b;
    struct hr_mem mem;
    struct hr_desc desc;
    struct hr_rmem rmem, readable;
    if (!opened(&a, &b, &mem, &rmem)) SKIP(REFUSED);
    CHECK_EQ(show(&a, HR_ACCESS_REMOTE_READ, &mem, &desc), HR_OK);
    CHECK_EQ(ops->mem_import(b.ep, &desc, &readable), HR_OK);
    CHECK(!readable.puts);
    fill(theirs, BYTES, 5), memcpy(expected, theirs, BYTES);
    struct asked no = {0}, yes = {.yes = 1 << 30};
    struct hr_rma rma = {.local = mine, .len = 4096, .remote = &rmem};
    CHECK_EQ(ops->post_put(b.ep, &rma, may, &no), HR_ERR_CANCELED);
    rma.offset = BYTES - 4095;
    CHECK_EQ(ops->post_put(b.ep, &rma, may, &yes), HR_ERR_ACCESS);
    rma = (struct hr_rma){.local = mine, .len = 4096, .remote = &readable};
    CHECK_EQ(ops->post_put(b.ep, &rma, may, &yes), HR_ERR_ACCESS);
    rmem.addr = 4096; /* nothing is there */
    rma.remote = &rmem;
    CHECK_EQ(ops->post_put(b.ep, &rma, may, &yes), HR_ERR_ACCESS);
    CHECK_MEM(theirs, expected, BYTES);
    ops->ep_abort(b.ep);
    CHECK_EQ(ops->post_put(b.ep, &rma, may, &yes), HR_ERR_PEER_LOST);
    side_close(&a), side_close(&b);
}

TEST(a_target_that_was_emptied_is_filled_again) {
    struct side a, b;
    struct hr_mem mem;
    struct hr_rmem rmem;
    if (!opened(&a, &b, &mem, &rmem)) SKIP(REFUSED);
    fill(theirs, BYTES, 5), memcpy(expected, theirs, BYTES), fill(mine, BYTES, 6);
    struct asked twice = {.yes = 2, .empties = shm_ep(a.ep)}, always = {.yes = 1 << 30, .empties = shm_ep(a.ep)};
    struct hr_rma rma = {.local = mine, .len = BYTES, .remote = &rmem};
    CHECK_EQ(ops->post_put(b.ep, &rma, may, &twice), HR_ERR_CANCELED);
    CHECK_EQ(twice.times, 3);
    CHECK_EQ(ops->post_put(b.ep, &rma, may, &always), HR_ERR_IO); /* it ends */
    CHECK_MEM(theirs, expected, BYTES);
    always.empties = NULL;
    CHECK_EQ(ops->post_put(b.ep, &rma, may, &always), HR_OK);
    CHECK_MEM(theirs, mine, BYTES);
    side_close(&a), side_close(&b);
}

TEST(without_the_kernels_permission_nothing_is_put) {
    struct side a, b;
    struct hr_mem mem;
    struct hr_desc desc;
    pair_open(&a, &b, "cma=0");
    CHECK(!(a.domain->caps.flags & HR_CAP_PUT));
    CHECK_EQ(show(&a, HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_PUT, &mem, &desc), HR_ERR_UNSUPPORTED);
    side_close(&a), side_close(&b);
}

/* ---- the writer is stopped ---- */

static struct hr_rmem import(struct side *s, struct child *self) {
    struct hr_desc desc;
    struct hr_rmem rmem;
    take(self->from, &desc, sizeof desc);
    CHECK_EQ(ops->mem_import(s->ep, &desc, &rmem), HR_OK);
    CHECK(rmem.puts);
    memset(mine, 1, BYTES);
    return rmem;
}

/* It has been told that it may, and is stopped before it does. */
static int told_and_stopped(void *arg) {
    int *asked = arg;
    if (++*asked > 1) return 0;
    raise(SIGSTOP);
    return 1;
}
static void stop_before(struct side *s, struct child *self) {
    int asked = 0;
    struct hr_rmem rmem = import(s, self);
    struct hr_rma rma = {.local = mine, .len = BYTES, .remote = &rmem};
    CHECK_EQ(ops->post_put(s->ep, &rma, told_and_stopped, &asked), HR_ERR_CANCELED);
    CHECK_EQ(asked, 2);
}

TEST(who_is_stopped_before_it_puts_changes_nothing_later) {
    for (int aborted = 0; aborted < 2; aborted++) {
        struct side a;
        struct hr_mem mem;
        struct hr_desc desc;
        int rc;
        if (!permitted()) SKIP(REFUSED);
        struct child c = spawn(&a, stop_before);
        CHECK_EQ(show(&a, HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_PUT, &mem, &desc), HR_OK);
        give(c.to, &desc, sizeof desc);
        CHECK_EQ(waitpid(c.pid, &rc, WUNTRACED), c.pid);
        CHECK(WIFSTOPPED(rc));
        double start = now();
        if (aborted) ops->ep_abort(a.ep);
        CHECK_EQ(ops->mem_quiet(a.ep, &mem), HR_OK);
        CHECK(now() - start < 1);
        memset(theirs, 7, BYTES), memset(expected, 7, BYTES);
        kill(c.pid, SIGCONT);
        CHECK_EQ(child_end(&c), 0);
        CHECK_MEM(theirs, expected, BYTES);
        side_close(&a);
    }
}

/* In memory of both: whether puts are permitted, and how many have ended well, and not. */
struct permission {
    atomic_int stands;
    _Atomic uint64_t ended, refused;
};
static struct permission *permission;

static int stands(void *arg) {
    (void)arg;
    return atomic_load(&permission->stands) == 1;
}
static void put_for_ever(struct side *s, struct child *self) {
    struct hr_rmem rmem = import(s, self);
    struct hr_rma rma = {.local = mine, .len = BYTES, .remote = &rmem};
    while (atomic_load(&permission->stands) != 2) {
        hr_status status = ops->post_put(s->ep, &rma, stands, NULL);
        CHECK(status == HR_OK || status == HR_ERR_CANCELED);
        atomic_fetch_add(status == HR_OK ? &permission->ended : &permission->refused, 1);
    }
}

TEST(who_is_stopped_anywhere_changes_nothing_later) {
    struct side a;
    struct hr_mem mem;
    struct hr_desc desc;
    uint64_t changed = 0, seen = 0;
    if (!permitted()) SKIP(REFUSED);
    permission = mmap(NULL, sizeof *permission, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(permission != MAP_FAILED);
    permission->stands = 1;
    struct child c = spawn(&a, put_for_ever);
    CHECK_EQ(show(&a, HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_PUT, &mem, &desc), HR_OK);
    give(c.to, &desc, sizeof desc);
    for (int round = 0; round < 100; round++) {
        uint64_t before = permission->ended;
        UNTIL(10, permission->ended > before, usleep(10));
        usleep((useconds_t)(round * 37 % 500));
        if (round % 2) kill(c.pid, SIGSTOP); /* else it goes on, and is refused */
        permission->stands = 0;
        CHECK_EQ(ops->mem_quiet(a.ep, &mem), HR_OK);
        memset(theirs, 7, BYTES);
        kill(c.pid, SIGCONT);
        uint64_t refused = permission->refused; /* the one that was under way, and one more */
        UNTIL(10, permission->refused > refused + 1, usleep(10));
        for (size_t i = 0; i < BYTES; i++) changed += theirs[i] != 7;
        seen = permission->ended;
        permission->stands = 1;
    }
    permission->stands = 2;
    CHECK_EQ(child_end(&c), 0);
    CHECK_EQ(changed, 0);
    CHECK(seen >= 100);
    side_close(&a);
    munmap(permission, sizeof *permission);
}
