/* setup.c - from a proven socket to a connection: the rings are handed over, and each side finds out what it may read.
 */

/*
 *   caller -> acceptor  OFFER   memfd with both rings, the caller's eventfd; where a word lies in the caller's memory
 *   acceptor -> caller  ANSWER  the acceptor's eventfd; the same for the acceptor; "I could read yours"
 *   caller -> acceptor  READY   "I could read yours"
 *
 * The memfd is one page of flags and targets (put.c), the ring caller -> acceptor, the ring acceptor -> caller. It
 * cannot shrink (sealed, and checked), so that no peer can make our loads fault. Its pages exist before it is handed
 * over.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "hr/reduce.h"
#include "providers/shm/shm.h"

#ifndef MADV_POPULATE_WRITE
#    define MADV_POPULATE_WRITE 23
#endif
#define TARGETS 2048 /* behind the flags */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* Records up to this have their lines claimed ahead. Of AMD's, Zen 5 gains a tenth by it without a common cache, up to
 * 2 KiB and the header; Zen 4 takes longer, with one or without: 256 B to 2 KiB by 3 to 8 %. */
static uint32_t claimed(void) {
    if (hr_reduce_claims()) return UINT32_MAX;
    return hr_reduce_family() < 26 ? 0 : 2304;
}

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }
static size_t segment_bytes(uint64_t ring_size) { return page_size() + 4 * ring_size; }

void hr_shm_unmap(struct shm_ep *e, int all) {
    if (e->segment && e->ring_size) munmap(e->segment + page_size(), segment_bytes(e->ring_size) - page_size());
    e->ring_size = 0;
    if (!all) return;
    if (e->segment) munmap(e->segment, page_size());
    e->segment = NULL;
    e->target = e->inlet = NULL;
}

static int map_at(uint8_t *at, size_t len, int fd, uint64_t offset) {
    return mmap(at, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) != MAP_FAILED;
}

/* Each ring twice in a row: see ring.h. 0 with errno. */
static int map_rings(struct shm_ep *e, int fd, uint64_t size, int caller) {
    size_t page = page_size();
    uint8_t *base = mmap(NULL, segment_bytes(size), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uint8_t *data[2];
    struct ring_ctl *ctl;

    if (base == MAP_FAILED) return 0;
    e->segment = base;
    e->ring_size = size;
    e->longest = size / 2 < SHM_LONG ? (uint32_t)(size / 2) : SHM_LONG;
    ctl = (struct ring_ctl *)(void *)base;
    data[0] = base + page;
    data[1] = data[0] + 2 * size;
    if (!map_at(base, page, fd, 0)) return 0;
    for (uint64_t i = 0; i < 4; i++)
        if (!map_at(data[i / 2] + (i & 1) * size, size, fd, page + i / 2 * size)) return 0;
    madvise(base, segment_bytes(size), MADV_DONTFORK);
    madvise(base, segment_bytes(size), MADV_POPULATE_WRITE); /* else they are faulted in one by one */
    ring_tx_init(&e->tx, &ctl[!caller], data[!caller], size, claimed());
    ring_rx_init(&e->rx, &ctl[caller], data[caller], size);
    struct shm_target *targets = (struct shm_target *)(void *)(base + TARGETS);
    e->target = &targets[!caller];
    e->inlet = &targets[caller];
    return 1;
}

static int new_segment(uint64_t ring_size) {
    off_t nbytes = (off_t)(page_size() + 2 * ring_size);
    int fd = memfd_create("hrdma-rings", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && ftruncate(fd, nbytes) == 0 && fallocate(fd, 0, 0, nbytes) == 0 && fcntl(fd, F_ADD_SEALS, SEALS) == 0)
        return fd;
    if (fd >= 0) {
        int error = errno;
        close(fd);
        errno = error;
    }
    return -1;
}

/* What a peer reads, and writes as it is, to find out whether it may; random. Of the process, not of a domain: who is
 * stopped as it is about to write does so when it goes on. */
static _Atomic uint64_t probe;

int hr_shm_probe_made(void) {
    uint64_t none = 0, random = 0;
    if (atomic_load(&probe)) return 1;
    if (getrandom(&random, sizeof random, 0) != sizeof random) return 0;
    atomic_compare_exchange_strong(&probe, &none, random | 1);
    return 1;
}

/* May this process read that one's memory? It is asked for a word that nothing else has. Never by changing a
 * permission. */
static int can_read(struct shm_ep *e, uint64_t addr, uint64_t word) {
    struct shm_domain *dom = shm_ep_domain(e);
    uint64_t seen = 0;
    struct iovec here = {&seen, sizeof seen}, there = {(void *)(uintptr_t)addr, sizeof seen};
    if (!dom->cma_allowed || e->pidfd < 0) return 0;
    return process_vm_readv(e->pid, &here, 1, &there, 1, 0) == (ssize_t)sizeof seen && seen == word;
}

/* May it write there? It writes what is there already. */
static int can_write(struct shm_ep *e, uint64_t addr, uint64_t word) {
    struct iovec here = {&word, sizeof word}, there = {(void *)(uintptr_t)addr, sizeof word};
    return e->can_read && process_vm_writev(e->pid, &here, 1, &there, 1, 0) == (ssize_t)sizeof word;
}

static uint32_t try_memory(struct shm_ep *e, const struct shm_frame *frame) {
    e->can_read = can_read(e, frame->addr, frame->word);
    e->can_write = can_write(e, frame->addr, frame->word) && hr_shm_put_seen(e);
    return (e->can_read ? SHM_CAN_READ : 0) | (e->can_write ? SHM_CAN_WRITE : 0);
}

static void come_up(struct shm_ep *e, uint32_t flags) {
    struct shm_domain *dom = shm_ep_domain(e);
    e->peer_can_read = flags & SHM_CAN_READ;
    e->base.puts = flags & SHM_CAN_WRITE && e->can_write;
    if (e->peer_can_read)
        dom->cma_yes++;
    else
        dom->cma_no++;
    if (!hr_shm_grow(&dom->live, dom->nlive, &dom->live_cap, sizeof *dom->live)) {
        hr_shm_lose(e, HR_ERR_UNREACHABLE, "no memory for one more endpoint");
        return;
    }
    e->live_index = dom->nlive;
    dom->live[dom->nlive++] = e;
    e->state = SHM_UP;
}

static struct shm_frame probe_frame(enum shm_frame_kind kind) {
    return (struct shm_frame){.kind = kind, .addr = (uintptr_t)&probe, .word = atomic_load(&probe)};
}

/* The socket was silent so far: that it is full is a failure. */
static int send_setup(struct shm_ep *e, const struct shm_frame *frame, const int *fds, int nfds) {
    hr_status status = hr_shm_frame_send(e, frame, fds, nfds);
    if (status == HR_AGAIN) hr_shm_lose(e, HR_ERR_UNREACHABLE, "process %d: %s", (int)e->pid, strerror(errno));
    return status == HR_OK;
}

void hr_shm_offer(struct shm_ep *e) {
    struct shm_domain *dom = shm_ep_domain(e);
    struct shm_frame frame = probe_frame(SHM_OFFER);
    int fds[2] = {new_segment(dom->ring_size), dom->wakefd};

    e->ringfd = fds[0];
    frame.size = dom->ring_size;
    if (fds[0] < 0 || !map_rings(e, fds[0], dom->ring_size, 1)) {
        hr_shm_lose(e, HR_ERR_UNREACHABLE, "no memory for two rings of %llu bytes: %s",
                    (unsigned long long)dom->ring_size, strerror(errno));
        return;
    }
    if (send_setup(e, &frame, fds, 2)) e->state = SHM_OFFERED;
}

static const char *wrong_segment(const struct shm_domain *dom, int fd, uint64_t ring_size) {
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (ring_size < SHM_MIN_RING || ring_size > SHM_MAX_RING || ring_size & (ring_size - 1)) return "its size";
    if (ring_size / 2 < dom->base.caps.max_send) return "its size: HRDMA_SHM=ring= has to be the same in both";
    if (fstat(fd, &st) < 0 || (uint64_t)st.st_size != page_size() + 2 * ring_size) return "the length of its file";
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) return "its file, which could shrink";
    return NULL;
}

static void on_offer(struct shm_ep *e, const struct shm_frame *frame, int *fds) {
    struct shm_frame reply = probe_frame(SHM_ANSWER);
    const char *wrong = wrong_segment(shm_ep_domain(e), fds[0], frame->size);

    if (wrong) {
        hr_shm_lose(e, HR_ERR_PROTOCOL, "process %d offered a ring of %llu bytes; refused because of %s", (int)e->pid,
                    (unsigned long long)frame->size, wrong);
        return;
    }
    if (!map_rings(e, fds[0], frame->size, 0)) {
        hr_shm_lose(e, HR_ERR_UNREACHABLE, "cannot map the rings of process %d: %s", (int)e->pid, strerror(errno));
        return;
    }
    e->peer_wakefd = fds[1];
    fds[1] = -1;
    reply.flags = try_memory(e, frame);
    if (send_setup(e, &reply, &shm_ep_domain(e)->wakefd, 1)) e->state = SHM_ANSWERED;
}

static void on_answer(struct shm_ep *e, const struct shm_frame *frame, int *fds) {
    struct shm_frame reply = {.kind = SHM_READY};
    e->peer_wakefd = fds[0];
    fds[0] = -1;
    close(e->ringfd);
    e->ringfd = -1;
    reply.flags = try_memory(e, frame);
    if (send_setup(e, &reply, NULL, 0)) come_up(e, frame->flags);
}

void hr_shm_on_setup_frame(struct shm_ep *e, const struct shm_frame *frame, int *fds, int nfds) {
    if (e->state == SHM_TAKEN && frame->kind == SHM_OFFER && nfds == 2)
        on_offer(e, frame, fds);
    else if (e->state == SHM_OFFERED && frame->kind == SHM_ANSWER && nfds == 1)
        on_answer(e, frame, fds);
    else if (e->state == SHM_ANSWERED && frame->kind == SHM_READY && nfds == 0)
        come_up(e, frame->flags);
    else
        hr_shm_lose(e, HR_ERR_PROTOCOL, "process %d sent control frame %u with %d descriptors, which cannot be now",
                    (int)e->pid, frame->kind, nfds);
}
