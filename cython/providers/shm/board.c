/* board.c - one copy of a payload that goes to several peers: the board from which all of them read it. */

/*
 * A message whose payload goes to other peers as well (hr_msg.same) is a record in each of their rings, and the payload
 * is on the board, once: a file of this domain that they map to read. What is on it goes round like a ring, and is
 * written over when all who were shown it are through. How far a peer is, it says in its ring's flags (taken) now and
 * then, and before it sleeps; one that says nothing, as it is stopped, costs the others the board, not the message:
 * then it goes by the rings. So it is ever after where one was given up that may still read.
 *
 * Why: of four ranks on two cores each took what it sends into three rings, two of which the other core reads: 128
 * lines to be had from there, and 128 to be fetched. Of the board it is 64, and who reads a line second finds it in its
 * core's cache. EPYC of Zen 4, allreduce of 4 KiB on four ranks: see benchmarks/learned_shm.md.
 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hr/reduce.h"
#include "providers/shm/shm.h"

#ifndef MADV_POPULATE_WRITE
#    define MADV_POPULATE_READ 22
#    define MADV_POPULATE_WRITE 23
#endif
#ifndef F_SEAL_FUTURE_WRITE
#    define F_SEAL_FUTURE_WRITE 0x0010
#endif
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static int board_made(struct shm_board *b) {
    b->fd = memfd_create("hrdma-board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (b->fd < 0 || ftruncate(b->fd, SHM_BOARD) < 0 || fallocate(b->fd, 0, 0, SHM_BOARD) < 0) return 0;
    b->base = mmap(NULL, SHM_BOARD, PROT_READ | PROT_WRITE, MAP_SHARED, b->fd, 0);
    if (b->base == MAP_FAILED) return 0;
    madvise(b->base, SHM_BOARD, MADV_DONTFORK);
    madvise(b->base, SHM_BOARD, MADV_POPULATE_WRITE);
    fcntl(b->fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE); /* before Linux 5.1 peers could write to it */
    if (fcntl(b->fd, F_ADD_SEALS, SEALS) == 0) return 1;
    munmap(b->base, SHM_BOARD);
    return 0;
}

static void board_open(struct shm_board *b) {
    b->state = board_made(b) ? SHM_BOARD_OPEN : SHM_BOARD_NONE;
    b->limit = SHM_BOARD;
    if (b->state == SHM_BOARD_NONE && b->fd >= 0) close(b->fd);
}

void hr_shm_board_close(struct shm_board *b) {
    if (b->state != SHM_BOARD_OPEN && b->state != SHM_BOARD_LEFT) return;
    munmap(b->base, SHM_BOARD);
    close(b->fd);
}

/* How far the peer says that it has read: 0 where that cannot be. */
static int ask(struct shm_ep *e) {
    uint64_t taken = atomic_load_explicit(&e->tx.ctl->taken, memory_order_acquire);
    if (taken - e->taken > e->shown - e->taken) {
        hr_shm_lose(e, HR_ERR_PROTOCOL, "process %d says that it has read what it was never shown", (int)e->pid);
        return 0;
    }
    e->taken = taken;
    return 1;
}

/* Something that it may read yet: not if it has given up this connection, or ended. */
static int reads(struct shm_ep *e) {
    if (e->shown == e->taken || atomic_load_explicit(&e->tx.ctl->left, memory_order_acquire)) return 0;
    return !(e->lost && hr_shm_ended(e));
}

/* How far the slowest has come of those who have something to read. */
static void look(struct shm_domain *dom) {
    struct shm_board *b = &dom->board;
    b->limit = b->tail + SHM_BOARD;
    for (uint32_t i = 0; i < dom->nlive; i++) {
        struct shm_ep *e = dom->live[i];
        if (reads(e)) ask(e);
        uint64_t from = e->taken > e->from ? e->taken : e->from;
        if (reads(e) && from + SHM_BOARD < b->limit) b->limit = from + SHM_BOARD;
    }
}

/* A peer that is given up may read what it was shown later than this domain could know: then nothing is written over it
 * any more. */
void hr_shm_board_leave(struct shm_ep *e) {
    struct shm_board *b = &shm_ep_domain(e)->board;
    if (e->ring_size && b->state == SHM_BOARD_OPEN && reads(e) && (!ask(e) || reads(e)) && !hr_shm_ended(e))
        b->state = SHM_BOARD_LEFT;
}

static int put(struct shm_domain *dom, const struct hr_msg *msg) {
    struct shm_board *b = &dom->board;
    uint64_t at = b->tail, end;
    if (at % SHM_BOARD + msg->len > SHM_BOARD) at += SHM_BOARD - at % SHM_BOARD;
    end = ring_lines(at + msg->len);
    if (end > b->limit) look(dom);
    if (end > b->limit) return 0;
    hr_copy(b->base + at % SHM_BOARD, msg->payload, msg->len, HR_STORE_SHARED);
    b->same = msg->same;
    b->at = at;
    b->len = msg->len;
    b->tail = end;
    return 1;
}

int hr_shm_board_put(struct shm_ep *e, const struct hr_msg *msg, uint64_t *at_p) {
    struct shm_domain *dom = shm_ep_domain(e);
    struct shm_board *b = &dom->board;
    if (e->state != SHM_UP || e->lost) return 0;
    if (b->state == SHM_BOARD_UNUSED) board_open(b);
    if (b->state != SHM_BOARD_OPEN) return 0;
    if (!e->board_sent) {
        struct shm_frame frame = {.kind = SHM_BOARD_IS, .size = SHM_BOARD};
        if (hr_shm_frame_send(e, &frame, &b->fd, 1) != HR_OK) return 0;
        e->board_sent = 1;
    }
    if ((b->same != msg->same || b->len != msg->len) && (b->refused == msg->same || !put(dom, msg))) {
        b->refused = msg->same; /* for all that it goes to */
        return 0;
    }
    if (b->at < e->shown) return 0; /* once to each: of a second time its word would say nothing */
    if (b->limit > b->at + SHM_BOARD) b->limit = b->at + SHM_BOARD;
    *at_p = b->at;
    return 1;
}

/* --- the reader's side
 * --------------------------------------------------------------------------------------------------- */

void hr_shm_on_board(struct shm_ep *e, const struct shm_frame *frame, int fd) {
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    void *base;
    if (fd < 0) {
        hr_shm_lose(e, HR_ERR_UNREACHABLE,
                    "process %d offered a board, and its descriptor did not come: ulimit -n allows more", (int)e->pid);
        return;
    }
    if (e->board || frame->size != SHM_BOARD || seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) < 0 ||
        st.st_size != SHM_BOARD) {
        hr_shm_lose(e, HR_ERR_PROTOCOL, "process %d offered a board of %llu bytes that cannot be", (int)e->pid,
                    (unsigned long long)frame->size);
        return;
    }
    base = mmap(NULL, SHM_BOARD, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        hr_shm_lose(e, HR_ERR_NOMEM, "no memory to map the board of process %d", (int)e->pid);
        return;
    }
    e->board = base;
    madvise(base, SHM_BOARD, MADV_DONTFORK);
    madvise(base, SHM_BOARD, MADV_POPULATE_READ);
}

const uint8_t *hr_shm_board_at(struct shm_ep *e, uint64_t at, size_t len) {
    if (!e->board) hr_shm_frames_drain(e);
    return e->board && len && at % SHM_BOARD + len <= SHM_BOARD ? e->board + at % SHM_BOARD : NULL;
}

void hr_shm_board_say(struct shm_ep *e) {
    if (e->said == e->read) return;
    e->said = e->read;
    atomic_store_explicit(&e->rx.ctl->taken, e->read, memory_order_release);
}

void hr_shm_board_unmap(struct shm_ep *e) {
    if (e->ring_size) atomic_store_explicit(&e->rx.ctl->left, 1, memory_order_release);
    if (e->board) munmap((void *)(uintptr_t)e->board, SHM_BOARD);
    e->board = NULL;
}
