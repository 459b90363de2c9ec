/* shm_child.h - a peer in a process of its own, connected to a side of shm_rig.h. */
#ifndef HR_TESTS_SHM_CHILD_H
#define HR_TESTS_SHM_CHILD_H

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "shm_rig.h"

struct child {
    pid_t pid;
    int to, from;              /* pipes; the child's numbers in the child */
    uint8_t addr[HR_MAX_ADDR]; /* of the other side */
};

static void give(int fd, const void *p, size_t n) { REQUIRE(write(fd, p, n) == (ssize_t)n); }
static void take(int fd, void *p, size_t n) {
    for (size_t have = 0; have < n;) {
        ssize_t got = read(fd, (char *)p + have, n - have);
        REQUIRE(got > 0);
        have += (size_t)got;
    }
}

/* Side 2 runs body in a child, connected to side 1 here. */
static struct child spawn(struct side *here, void (*body)(struct side *s, struct child *self)) {
    struct child c;
    int down[2], back[2], mine;
    REQUIRE(pipe2(down, O_CLOEXEC) == 0 && pipe2(back, O_CLOEXEC) == 0);
    c.pid = fork();
    REQUIRE(c.pid >= 0);
    mine = c.pid == 0;
    if (mine) prctl(PR_SET_PDEATHSIG, SIGKILL);
    c.to = mine ? back[1] : down[1];
    c.from = mine ? down[0] : back[0];
    close(mine ? back[0] : back[1]);
    close(mine ? down[1] : down[0]);

    static struct side there;
    struct side *s = mine ? &there : here;
    side_open(s, mine ? 2 : 1, mine ? 1 : 2, NULL);
    give(c.to, s->addr, s->addr_len);
    take(c.from, c.addr, s->addr_len);
    REQUIRE(ops->ep_connect(s->ep, c.addr, s->addr_len, !mine) == HR_OK);
    UNTIL(10, s->up, turn(s));
    if (mine) {
        body(s, &c);
        _exit(check_failures() != 0);
    }
    return c;
}

static int child_end(struct child *c) {
    int rc = -1;
    CHECK_EQ(waitpid(c->pid, &rc, 0), c->pid);
    close(c->to);
    close(c->from);
    return rc;
}

#endif
