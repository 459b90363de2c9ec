/* test_verbs_kept.c - memory outside arenas whose owner says when it goes: registered once, not copied, bounded, and
 * given up when it went. */

#include "providers/verbs/verbs.h"

#include "hr/memory.h"
#include "verbs_rig.h"

enum { LEN = 1 << 20 };

static struct hr_verbs_domain *domain_of(struct node *n) { return (struct hr_verbs_domain *)n->domain; }

/* A write and a read of it, there and back. */
static void move(struct pair *p, void *local, const struct hr_rmem *rmem) {
    struct hr_rma rma = {.local = local, .len = LEN, .remote = rmem, .cookie = p};
    p->ca.dones = 0;
    CHECK_EQ(verbs->post_write(p->ca.ep, &rma), HR_INPROGRESS);
    RUN(p->a, p->b, p->ca.dones == 1);
    hr_status status = HR_AGAIN; /* while buffers are on their way */
    RUN(p->a, p->b, (status = status == HR_AGAIN ? verbs->post_read(p->ca.ep, &rma) : status) == HR_INPROGRESS);
    RUN(p->a, p->b, p->ca.dones == 2);
    CHECK_EQ(p->ca.done_status, HR_OK);
}

TEST(kept_memory_is_registered_once_and_not_copied) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    uint8_t *here = malloc(2 * LEN), *there = malloc(2 * LEN);
    uint64_t ids[2] = {hr_memory_keep(here, 2 * LEN), hr_memory_keep(there, 2 * LEN)};
    pair_open(&p, NULL);
    for (int round = 1; round <= 4; round++) { /* other parts of it are the same memory */
        size_t at = round % 2 ? 0 : LEN;
        share(&p, there + at, LEN, &mem, &rmem);
        memset(here + at, round, LEN);
        move(&p, here + at, &rmem);
        CHECK_MEM(there + at, here + at, LEN);
        CHECK_EQ(inside(&p.a)->counts.registered, 1);
        CHECK_EQ(inside(&p.b)->counts.registered, 1);
        CHECK_EQ(inside(&p.a)->counts.direct, 2ull * LEN * (unsigned)round);
        CHECK_EQ(inside(&p.a)->counts.staged, 0);
        CHECK_EQ(inside(&p.a)->pinned, 2 * LEN);
        verbs->mem_deregister(p.b.domain, &mem);
    }
    hr_memory_forget(ids[0]);
    hr_memory_forget(ids[1]);
    RUN(p.a, p.b, !inside(&p.a)->pinned && !inside(&p.b)->pinned); /* without another operation */
    share(&p, there, LEN, &mem, &rmem);                            /* not kept: registered anew, */
    move(&p, here, &rmem);                                         /* and from buffers */
    CHECK_EQ(inside(&p.b)->counts.registered, 2);
    CHECK_EQ(inside(&p.a)->counts.staged, 2 * LEN);
    verbs->mem_deregister(p.b.domain, &mem);
    CHECK_EQ(inside(&p.b)->pinned, 0);
    pair_close(&p);
    free(here);
    free(there);
}

TEST(what_is_in_use_stays_and_the_oldest_of_the_rest_makes_room) {
    struct node n;
    struct hr_mem held, mem, last;
    char detail[256];
    uint8_t *blocks[4];
    uint64_t ids[4];
    REQUIRE(node_open(&n, 1, "sim", "pin=3M", detail) == HR_OK);
    for (int i = 0; i < 4; i++) ids[i] = hr_memory_keep(blocks[i] = malloc(LEN), LEN);
    CHECK_EQ(verbs->mem_register(n.domain, blocks[0], LEN, HR_ACCESS_REMOTE_WRITE, &held), HR_OK);
    for (int i = 1; i < 3; i++) {
        CHECK_EQ(verbs->mem_register(n.domain, blocks[i], LEN, HR_ACCESS_REMOTE_READ, &mem), HR_OK);
        verbs->mem_deregister(n.domain, &mem);
    }
    CHECK_EQ(inside(&n)->pinned, 3 * LEN);
    CHECK_EQ(inside(&n)->counts.registered, 3);
    CHECK_EQ(verbs->mem_register(n.domain, blocks[3], LEN, HR_ACCESS_REMOTE_READ, &last), HR_OK); /* for 1 */
    CHECK_EQ(inside(&n)->pinned, 3 * LEN);
    CHECK_EQ(verbs->mem_register(n.domain, blocks[2], LEN, HR_ACCESS_REMOTE_READ, &mem), HR_OK); /* is there */
    CHECK_EQ(inside(&n)->counts.registered, 4);
    CHECK_EQ(verbs->mem_register(n.domain, blocks[1], LEN, HR_ACCESS_REMOTE_READ, &mem), HR_ERR_NOMEM); /* all in use */
    CHECK(strstr(n.domain->refused, "pin=3145728 is what may be pinned"));
    hr_memory_forget(ids[0]); /* while it is in use */
    hr_verbs_mem_tidy(domain_of(&n));
    CHECK_EQ(inside(&n)->pinned, 3 * LEN);
    verbs->mem_deregister(n.domain, &held);
    CHECK_EQ(inside(&n)->pinned, 2 * LEN);
    verbs->domain_close(n.domain);
    for (int i = 0; i < 4; i++) {
        hr_memory_forget(ids[i]); /* once more is no harm */
        free(blocks[i]);
    }
}

TEST(a_buffer_on_its_way_is_not_given_up) {
    struct pair p;
    struct hr_mem mem, other;
    struct hr_rmem rmem;
    uint8_t *here = malloc(LEN), *there = hr_arena_alloc(LEN, HR_ARENA_WRITABLE_BY_PEERS), *more = malloc(LEN);
    uint64_t ids[2] = {hr_memory_keep(here, LEN), hr_memory_keep(more, LEN)};
    pair_open_with(&p, "pin=1M", NULL);
    share(&p, there, LEN, &mem, &rmem);
    struct hr_rma write = {.local = memset(here, 5, LEN), .len = LEN, .remote = &rmem, .cookie = &p};
    CHECK_EQ(verbs->post_write(p.ca.ep, &write), HR_INPROGRESS);
    CHECK_EQ(verbs->mem_register(p.a.domain, more, LEN, HR_ACCESS_REMOTE_READ, &other), HR_ERR_NOMEM);
    RUN(p.a, p.b, p.ca.dones == 1);
    CHECK_EQ(verbs->mem_register(p.a.domain, more, LEN, HR_ACCESS_REMOTE_READ, &other), HR_OK);
    CHECK_MEM(there, here, LEN);
    CHECK_EQ(verbs->post_write(p.ca.ep, &write), HR_INPROGRESS); /* by buffers: there is no room */
    RUN(p.a, p.b, p.ca.dones == 2);
    CHECK_EQ(inside(&p.a)->counts.staged, LEN);
    verbs->mem_deregister(p.b.domain, &mem);
    pair_close(&p);
    for (int i = 0; i < 2; i++) hr_memory_forget(ids[i]);
    hr_arena_free(there);
    free(here);
    free(more);
}

TEST(where_a_fork_would_move_pages_nothing_is_kept) {
    struct node n;
    struct hr_mem mem;
    char detail[256];
    uint8_t *block = malloc(LEN);
    uint64_t id = hr_memory_keep(block, LEN);
    REQUIRE(node_open(&n, 1, "sim", NULL, detail) == HR_OK);
    CHECK(inside(&n)->keeps);
    domain_of(&n)->keeps = 0;
    for (unsigned i = 1; i <= 2; i++) {
        CHECK_EQ(verbs->mem_register(n.domain, block, LEN / 2, HR_ACCESS_REMOTE_READ, &mem), HR_OK);
        CHECK_EQ(inside(&n)->pinned, LEN / 2);
        CHECK_EQ(inside(&n)->counts.registered, i);
        verbs->mem_deregister(n.domain, &mem);
        CHECK_EQ(inside(&n)->pinned, 0);
    }
    verbs->domain_close(n.domain);
    hr_memory_forget(id);
    free(block);
}
