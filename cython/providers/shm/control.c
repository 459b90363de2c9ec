/* control.c - frames of fixed size with file descriptors, over the Unix socket that stays beside the rings. */

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "providers/shm/shm.h"

enum { MAX_FDS = 2 };

/* So small a message is taken in full or not at all. */
hr_status hr_shm_frame_send(struct shm_ep *e, const struct shm_frame *frame, const int *fds, int nfds) {
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(MAX_FDS * sizeof(int))] = {0};
    struct iovec iov = {.iov_base = (void *)(uintptr_t)frame, .iov_len = sizeof *frame};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    ssize_t n;

    if (nfds) {
        struct cmsghdr *c;
        msg.msg_control = control;
        msg.msg_controllen = CMSG_SPACE((size_t)nfds * sizeof(int));
        c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN((size_t)nfds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, (size_t)nfds * sizeof(int));
    }
    do n = sendmsg(e->sock, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n == (ssize_t)sizeof *frame) return HR_OK;
    /* The kernel bounds the descriptors on their way per user as well. */
    if (n < 0 && (errno == EAGAIN || errno == ETOOMANYREFS || errno == ENOBUFS)) return HR_AGAIN;
    hr_shm_lose(e, HR_ERR_PEER_LOST, "the Unix socket to process %d failed: %s", (int)e->pid, strerror(errno));
    return HR_ERR_PEER_LOST;
}

static void keep_fds(struct shm_ep *e, struct msghdr *msg) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
        size_t n =
            c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS ? (c->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (e->frame_nfds < MAX_FDS)
                e->frame_fds[e->frame_nfds++] = fd;
            else
                close(fd);
        }
    }
}

/* The frame's descriptors belong to the handler, which sets those it keeps to -1. */
static void on_frame(struct shm_ep *e) {
    struct shm_frame frame;
    int fds[MAX_FDS] = {-1, -1}, nfds = e->frame_nfds;
    memcpy(&frame, e->frame, sizeof frame);
    memcpy(fds, e->frame_fds, (size_t)nfds * sizeof(int));
    e->frame_have = 0;
    e->frame_nfds = 0;
    if (e->state == SHM_UP && (frame.kind == SHM_ARENA || frame.kind == SHM_GONE))
        hr_shm_on_arena_frame(e, &frame, fds[0]);
    else if (e->state == SHM_UP && frame.kind == SHM_BOARD_IS)
        hr_shm_on_board(e, &frame, fds[0]);
    else
        hr_shm_on_setup_frame(e, &frame, fds, nfds);
    for (int i = 0; i < nfds; i++)
        if (fds[i] >= 0) close(fds[i]);
}

void hr_shm_frames_drain(struct shm_ep *e) {
    while (e->sock >= 0 && (e->lost == HR_OK || e->lost == HR_ERR_PEER_LOST)) {
        _Alignas(struct cmsghdr) char control[CMSG_SPACE(MAX_FDS * sizeof(int))];
        struct iovec iov = {.iov_base = e->frame + e->frame_have, .iov_len = sizeof e->frame - e->frame_have};
        struct msghdr msg = {
            .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        ssize_t n = recvmsg(e->sock, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (n <= 0) {
            hr_shm_lose(e, HR_ERR_PEER_LOST, "process %d closed the connection or ended", (int)e->pid);
            return;
        }
        keep_fds(e, &msg);
        e->frame_have += (uint32_t)n;
        if (e->frame_have == sizeof e->frame) on_frame(e);
    }
}
