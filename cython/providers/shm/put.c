/* put.c - writing into memory of a peer that nobody has mapped: process_vm_writev, and how the owner of the memory ends
 * it.
 */

/*
 * A process may be stopped just before it calls the kernel, go on a minute later, and write where something else is by
 * then. So the kernel is told where to write (the remote iovec) in memory that both sides have mapped, and the owner
 * can empty it:
 *
 *     writer                                   owner
 *     turn: a new number, its thread           what may() asks for is withdrawn
 *     the target is filled                     the target is emptied
 *     may()? else it does not call             waits while turn is the same, and its thread neither stopped nor gone
 *     process_vm_writev
 *     turn: no thread
 *
 * The writer asks after it has filled the target, the owner empties it after may() would say no: so the writer is
 * refused, or its target is empty, or the kernel had read the target before. In that case the call goes on until it is
 * over: signals are looked at on the way out, and who waits for a page in it is in D. So a thread that is seen stopped,
 * or asleep (S: a frozen process), is not in the middle of one, and will find an empty target if it was about to make
 * it. Who finds its target emptied for the sake of another put fills it again.
 *
 * The process may have ended, and its number be another's: it is looked at before each call. Who is stopped between
 * that and the call would write into another process if the owner was killed meanwhile, so that nobody has emptied the
 * target, its number has come again, and the newcomer has memory there that this user may write.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "providers/shm/shm.h"

#define EMPTIED 1000                   /* times in a row: that is no owner that is in its senses */
#define PATIENCE ((int64_t)5000000000) /* ns, for a thread that runs, or waits for a page, and is not stopped */
#define NAP 50000                      /* ns */

_Static_assert(offsetof(struct shm_target, len) == offsetof(struct shm_target, base) + sizeof(uint64_t) &&
                   sizeof(struct iovec) == 2 * sizeof(uint64_t) && offsetof(struct iovec, iov_len) == sizeof(uint64_t),
               "the kernel reads it as an iovec");

static hr_status put(struct shm_ep *e, const uint8_t *local, uint64_t addr, uint64_t left, int (*may)(void *),
                     void *arg) {
    struct shm_target *t = e->target;
    for (int emptied = 0; left && emptied < EMPTIED;) {
        struct iovec here = {(void *)(uintptr_t)local, left};
        if (hr_shm_ended(e)) return HR_ERR_PEER_LOST;
        atomic_store(&t->base, addr);
        atomic_store(&t->len, left);
        if (!may(arg)) return HR_ERR_CANCELED;
        ssize_t n = process_vm_writev(e->pid, &here, 1, (const struct iovec *)(const void *)&t->base, 1, 0);
        if (n < 0) return errno == ESRCH ? HR_ERR_PEER_LOST : errno == EFAULT ? HR_ERR_ACCESS : HR_ERR_IO;
        emptied = n ? 0 : emptied + 1;
        local += n;
        addr += (uint64_t)n;
        left -= (uint64_t)n;
    }
    return left ? HR_ERR_IO : HR_OK;
}

hr_status hr_shm_post_put(struct hr_ep *ep, const struct hr_rma *rma, int (*may)(void *arg), void *arg) {
    struct shm_ep *e = shm_ep(ep);
    const struct hr_rmem *remote = rma->remote;
    if (e->state != SHM_UP || e->lost) return e->lost ? e->lost : HR_ERR_PEER_LOST;
    if (!remote->puts || rma->offset > remote->len || rma->len > remote->len - rma->offset) return HR_ERR_ACCESS;
    uint64_t turn = (atomic_load_explicit(&e->target->turn, memory_order_relaxed) >> 32) + 1;
    atomic_store(&e->target->turn, turn << 32 | (uint32_t)syscall(SYS_gettid));
    hr_status status = put(e, rma->local, remote->addr + rma->offset, rma->len, may, arg);
    atomic_store(&e->target->turn, turn << 32);
    return status;
}

/* As in the third field of /proc/.../stat; X: there is none; 0: it cannot be seen. */
static char state_of(const char *path) {
    char text[256];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    int error = errno;
    if (fd >= 0) close(fd);
    if (n <= 0) return n < 0 && (error == ENOENT || error == ESRCH) ? 'X' : 0;
    text[n] = 0;
    const char *name = strrchr(text, ')'); /* which may have any character in it */
    return name && name[1] == ' ' ? name[2] : 0;
}

/* A thread that cannot be found has ended if its process can be. */
static char thread_state(pid_t pid, uint32_t thread) {
    char process[64], task[64];
    snprintf(process, sizeof process, "/proc/%d/stat", (int)pid);
    snprintf(task, sizeof task, "/proc/%d/task/%u/stat", (int)pid, thread);
    char state = state_of(task), of_all = state == 'X' ? state_of(process) : state;
    return of_all && of_all != 'X' ? state : 0;
}

/* /proc may be that of other numbers than ours. */
int hr_shm_put_seen(const struct shm_ep *e) {
    char self[16];
    ssize_t n = readlink("/proc/self", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    return e->pid > 0 && e->pidfd >= 0 && atoi(self) == getpid() && thread_state(e->pid, (uint32_t)e->pid) != 0;
}

hr_status hr_shm_put_stop(struct shm_ep *e) {
    struct shm_target *t = e->inlet;
    const struct timespec nap = {.tv_nsec = NAP};
    if (!t) return HR_OK; /* never connected */
    atomic_store(&t->len, 0);
    uint64_t turn = atomic_load(&t->turn);
    int64_t deadline = hr_now() + PATIENCE;
    while ((uint32_t)turn && atomic_load(&t->turn) == turn && !hr_shm_ended(e)) {
        char state = thread_state(e->pid, (uint32_t)turn);
        if (state && strchr("TtSZX", state)) break;
        if (hr_now() > deadline) return HR_ERR_UNSUPPORTED;
        nanosleep(&nap, NULL);
    }
    return HR_OK;
}
