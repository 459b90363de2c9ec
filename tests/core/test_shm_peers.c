/* test_shm_peers.c - the shm provider and its peer: whose memory is reached how, and what holds when the peer dies or
 * stops. */

#define _GNU_SOURCE
#include <poll.h>

#include "hr/memory.h"
#include "providers/shm/address.h"
#include "shm_child.h"

static int mappings_of(const void *p) {
    char line[512];
    int n = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        if (sscanf(line, "%lx-%lx", &from, &to) == 2 && (uintptr_t)p >= from && (uintptr_t)p < to)
            n += strstr(line, "memfd:") != NULL;
    }
    if (maps) fclose(maps);
    return n;
}

static struct hr_rmem import(struct side *from, struct side *to, void *p, size_t len, uint32_t access,
                             hr_status *status_p) {
    struct hr_mem mem;
    struct hr_desc desc;
    struct hr_rmem rmem = {0};
    CHECK_EQ(ops->mem_register(from->domain, p, len, access, &mem), HR_OK);
    *status_p = ops->mem_export(from->ep, &mem, p, len, &desc);
    if (*status_p == HR_OK) *status_p = ops->mem_import(to->ep, &desc, &rmem);
    return rmem;
}

TEST(arenas_are_mapped_once_and_kept_while_used) {
    struct side a, b;
    hr_status status;
    uint8_t copy[5000];
    size_t len = (size_t)600 << 20; /* more than is kept for reuse when freed */
    pair_open(&a, &b, NULL);
    uint8_t *small = hr_arena_alloc(100000, 0);
    fill(small, 100000, 5);
    struct hr_rmem r1 = import(&a, &b, small, 1000, HR_ACCESS_REMOTE_READ, &status);
    struct hr_rmem r2 = import(&a, &b, small + 5000, 95000, HR_ACCESS_REMOTE_READ, &status);
    REQUIRE(status == HR_OK && r1.ptr);
    CHECK_EQ((const uint8_t *)r2.ptr - (const uint8_t *)r1.ptr, 5000);
    CHECK((const uint8_t *)r1.ptr != small);
    CHECK_MEM(r2.ptr, small + 5000, 95000);
    struct hr_rma rma = {.local = copy, .len = sizeof copy, .remote = &r2, .offset = 90000};
    CHECK_EQ(ops->post_read(b.ep, &rma), HR_OK);
    CHECK_MEM(copy, small + 95000, sizeof copy);
    CHECK_EQ(shm_ep(b.ep)->nmaps, 1);
    CHECK_EQ(shm_ep(a.ep)->nsent, 1);
    ops->mem_release(b.ep, &r2);

    uint8_t *large = hr_arena_alloc(len, 0);
    REQUIRE(large);
    large[7] = 77;
    struct hr_rmem r3 = import(&a, &b, large, len, HR_ACCESS_REMOTE_READ, &status);
    REQUIRE(status == HR_OK && r3.ptr);
    const uint8_t *seen = r3.ptr;
    CHECK_EQ(shm_ep(b.ep)->nmaps, 2);
    hr_arena_free(large);
    UNTIL(1, shm_ep(a.ep)->nsent == 1, BOTH(&a, &b));
    for (int i = 0; i < 200; i++) BOTH(&a, &b);
    CHECK_EQ(seen[7], 77); /* the peer gave it back, we still look at it */
    ops->mem_release(b.ep, &r3);
    CHECK_EQ(shm_ep(b.ep)->nmaps, 1);
    CHECK_EQ(mappings_of(seen), 0);

    const uint8_t *still = r1.ptr; /* an abort leaves what the engine has not released */
    ops->ep_abort(b.ep);
    CHECK_EQ(still[999], small[999]);
    ops->mem_release(b.ep, &r1);
    CHECK_EQ(mappings_of(still), 0);
    hr_arena_free(small);
    side_close(&a), side_close(&b);
}

TEST(other_memory_needs_the_kernels_permission) {
    for (int allowed = 0; allowed < 2; allowed++) {
        struct side a, b;
        hr_status status;
        uint8_t *plain = malloc(3000000), *copy = malloc(3000000);
        pair_open(&a, &b, allowed ? NULL : "cma=0");
        fill(plain, 3000000, 9);
        struct hr_rmem r = import(&a, &b, plain, 3000000, HR_ACCESS_REMOTE_READ, &status);
        if (!allowed) {
            CHECK_EQ(status, HR_ERR_UNSUPPORTED);
        } else if (status == HR_ERR_UNSUPPORTED) {
            printf("the kernel does not permit process_vm_readv here\n");
        } else {
            struct hr_rma rma = {.local = copy, .len = 2999999, .remote = &r, .offset = 1};
            CHECK(!r.ptr);
            CHECK_EQ(ops->post_read(b.ep, &rma), HR_OK);
            CHECK_MEM(copy, plain + 1, 2999999);
            rma.len = 3000000;
            CHECK_EQ(ops->post_read(b.ep, &rma), HR_ERR_ACCESS);
        }
        side_close(&a), side_close(&b);
        free(plain), free(copy);
    }
}

/* A write that is let go of half way goes on from a copy; deregistered memory takes nothing more. */
TEST(canceled_and_revoked_writes) {
    struct side a, b;
    struct hr_mem mem;
    struct hr_desc desc;
    struct hr_rmem rmem;
    size_t len = 1 << 20;
    uint8_t *target = calloc(1, len), *source = malloc(len), *expected = malloc(len);
    pair_open(&a, &b, "ring=131072");
    fill(source, len, 3);
    memcpy(expected, source, len);
    CHECK_EQ(ops->mem_register(b.domain, target, len, HR_ACCESS_REMOTE_WRITE, &mem), HR_OK);
    CHECK_EQ(ops->mem_export(b.ep, &mem, target, len, &desc), HR_OK);
    CHECK_EQ(ops->mem_import(a.ep, &desc, &rmem), HR_OK);
    struct hr_rma rma = {.local = source, .len = len, .remote = &rmem, .with_notify = 1, .value = 42, .cookie = &a};
    CHECK_EQ(ops->post_write(a.ep, &rma), HR_INPROGRESS);
    CHECK_EQ(send_small(&a), HR_AGAIN); /* nothing overtakes it */
    CHECK(ops->ep_unsent(a.ep) > 0);
    CHECK_EQ(ops->cancel(a.ep, &a), HR_OK);
    CHECK(hr_is_error(ops->cancel(a.ep, &a)));
    memset(source, 0xee, len);
    UNTIL(2, b.notified == 42, BOTH(&a, &b));
    CHECK_MEM(target, expected, len);
    CHECK_EQ(a.done, 0);
    CHECK_EQ(ops->ep_unsent(a.ep), 0);

    rma.cookie = NULL;
    rma.value = 43;
    CHECK_EQ(ops->post_write(a.ep, &rma), HR_INPROGRESS);
    ops->mem_deregister(b.domain, &mem);
    UNTIL(2, a.done == 1, BOTH(&a, &b));
    for (int i = 0; i < 100; i++) BOTH(&a, &b);
    CHECK_MEM(target, expected, len);
    CHECK_EQ(b.notified, 42);
    side_close(&a), side_close(&b);
    free(target), free(source), free(expected);
}

/* ---- two processes ---- */

static void hundred_then_die(struct side *s, struct child *self) {
    (void)self;
    for (uint64_t i = 0; i < 100; i++) CHECK_EQ(send_pattern(s, i, 500), HR_OK);
    raise(SIGKILL);
}

/* Sockets of the name that is in a domain's address. */
static int names_left(const uint8_t *addr) {
    struct shm_address told;
    struct sockaddr_un sa;
    char line[512];
    int n = 0;
    memcpy(&told, addr, sizeof told);
    shm_sockaddr(&sa, told.name);
    FILE *file = fopen("/proc/net/unix", "r");
    REQUIRE(file);
    while (fgets(line, sizeof line, file)) n += strstr(line, sa.sun_path + 1) != NULL;
    fclose(file);
    return n;
}

TEST(a_killed_peers_last_words_come_first) {
    struct side a;
    struct child c = spawn(&a, hundred_then_die);
    CHECK(names_left(a.addr));
    a.check_pattern = 1;
    CHECK_EQ(WTERMSIG(child_end(&c)), SIGKILL);
    shm_domain(a.domain)->attend = 1; /* its death is known before the first record was looked at */
    double start = now();
    UNTIL(3, a.lost, turn(&a));
    CHECK_EQ(a.lost, HR_ERR_PEER_LOST);
    CHECK(now() - start < 1);
    CHECK_EQ(a.received, 100);
    CHECK_EQ(a.bad, 0);
    CHECK(strstr(a.detail, "process"));
    CHECK_EQ(send_small(&a), HR_ERR_PEER_LOST);
    side_close(&a);
    CHECK_EQ(names_left(a.addr), 0);
    CHECK_EQ(names_left(c.addr), 0);
}

/* As data loaders do: the peer forks, dies, and its child keeps all its descriptors. */
static void fork_then_die(struct side *s, struct child *self) {
    pid_t pid = fork();
    (void)s;
    if (pid == 0) {
        sleep(5);
        _exit(0);
    }
    give(self->to, &pid, sizeof pid);
    raise(SIGKILL);
}

TEST(a_forked_child_does_not_hide_its_parents_death) {
    struct side a;
    pid_t grandchild = 0;
    struct child c = spawn(&a, fork_then_die);
    take(c.from, &grandchild, sizeof grandchild);
    struct pollfd fd = {.fd = ops->event_fd(a.domain), .events = POLLIN};
    while (ops->event_arm(a.domain) == HR_AGAIN) turn(&a);
    CHECK_EQ(poll(&fd, 1, 2000), 1); /* and it wakes who sleeps */
    UNTIL(1, a.lost, turn(&a));
    CHECK_EQ(a.lost, HR_ERR_PEER_LOST);
    kill(grandchild, SIGKILL);
    child_end(&c);
    side_close(&a);
}

/* A peer that is stopped harms nobody; what it does when it goes on reaches no aborted endpoint. */
static uint8_t window[4096];
static void write_for_ever(struct side *s, struct child *self) {
    struct hr_desc desc;
    struct hr_rmem rmem;
    uint8_t ones[4096];
    memset(ones, 1, sizeof ones);
    take(self->from, &desc, sizeof desc);
    CHECK_EQ(ops->mem_import(s->ep, &desc, &rmem), HR_OK);
    while (!s->lost) {
        struct hr_rma rma = {.local = ones, .len = sizeof ones, .remote = &rmem};
        hr_status status = ops->post_write(s->ep, &rma);
        CHECK(status == HR_OK || status == HR_AGAIN || status == HR_INPROGRESS || status == HR_ERR_PEER_LOST);
        turn(s);
    }
    CHECK_EQ(s->lost, HR_ERR_PEER_LOST);
}

TEST(a_stopped_peer_changes_nothing_later) {
    struct side a;
    struct hr_mem mem;
    struct hr_desc desc;
    int rc;
    struct child c = spawn(&a, write_for_ever);
    CHECK_EQ(ops->mem_register(a.domain, window, sizeof window, HR_ACCESS_REMOTE_WRITE, &mem), HR_OK);
    CHECK_EQ(ops->mem_export(a.ep, &mem, window, sizeof window, &desc), HR_OK);
    give(c.to, &desc, sizeof desc);
    UNTIL(2, window[4095] == 1, turn(&a));
    kill(c.pid, SIGSTOP);
    CHECK_EQ(waitpid(c.pid, &rc, WUNTRACED), c.pid);
    double start = now();
    hr_status status;
    while ((status = send_pattern(&a, 0, 1000)) == HR_OK) continue;
    CHECK_EQ(status, HR_AGAIN);
    ops->ep_abort(a.ep);
    CHECK(now() - start < 2);
    memset(window, 0, sizeof window);
    kill(c.pid, SIGCONT);
    CHECK_EQ(child_end(&c), 0);
    for (int i = 0; i < 100; i++) turn(&a);
    for (size_t i = 0; i < sizeof window; i++) CHECK_EQ(window[i], 0);
    CHECK_EQ(a.lost, HR_OK);
    side_close(&a);
}
