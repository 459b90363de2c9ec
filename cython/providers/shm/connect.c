/* connect.c - endpoints from creation to abort, and the caller's way to a proven socket. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "providers/shm/address.h"
#include "providers/shm/shm.h"

hr_status hr_shm_ep_create(struct hr_domain *domain, uint64_t peer_id, void *ctx, struct hr_ep **ep_p) {
    struct shm_ep *e = calloc(1, sizeof *e), **tail = &shm_domain(domain)->eps;
    if (!e) return HR_ERR_NOMEM;
    e->base = (struct hr_ep){.domain = domain, .ctx = ctx, .peer_id = peer_id};
    e->sock = e->pidfd = e->peer_wakefd = e->ringfd = -1;
    while (*tail) tail = &(*tail)->next;
    *tail = e;
    *ep_p = &e->base;
    return HR_OK;
}

hr_status hr_shm_ep_connect(struct hr_ep *ep, const void *addr, size_t addr_len, int active) {
    struct shm_ep *e = shm_ep(ep);
    struct shm_domain *dom = shm_ep_domain(e);
    struct shm_address peer;

    if (e->state != SHM_IDLE || addr_len != sizeof peer) return HR_ERR_INVALID;
    memcpy(&peer, addr, sizeof peer);
    if (peer.version != SHM_ADDRESS_VERSION) return HR_ERR_INVALID;
    if (memcmp(peer.host, dom->host, sizeof peer.host)) return HR_ERR_UNREACHABLE;
    memcpy(e->peer_name, peer.name, sizeof e->peer_name);
    if (active) {
        e->handshake = malloc(sizeof *e->handshake);
        if (!e->handshake) return HR_ERR_NOMEM;
        hr_handshake_start(e->handshake, dom->auth, 1, dom->self_id, ep->peer_id);
    }
    e->state = active ? SHM_DIALING : SHM_WAITING;
    e->counted = 1;
    dom->connecting++;
    hr_shm_attend(dom);
    if (active) hr_shm_dial(e);
    return HR_OK;
}

/* Abstract sockets connect at once or not at all. */
void hr_shm_dial(struct shm_ep *e) {
    struct shm_domain *dom = shm_ep_domain(e);
    struct sockaddr_un sa;
    socklen_t sa_len = shm_sockaddr(&sa, e->peer_name);
    pid_t pid = 0;
    int rc;

    if (e->lost) return;
    if (e->sock < 0 && (e->sock = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) < 0) {
        hr_shm_lose(e, HR_ERR_UNREACHABLE, "socket: %s", strerror(errno));
        return;
    }
    do rc = connect(e->sock, (struct sockaddr *)&sa, sa_len);
    while (rc < 0 && errno == EINTR);
    if (rc < 0 && errno == EAGAIN) return; /* its backlog is full: progress tries again */
    if (rc < 0) {
        hr_shm_lose(e, HR_ERR_UNREACHABLE, "nobody listens at the shared-memory address of peer %llu: %s",
                    (unsigned long long)e->base.peer_id, strerror(errno));
        return;
    }
    if (!hr_shm_peer_allowed(e->sock, &pid)) {
        hr_shm_lose(e, HR_ERR_AUTH, "process %d, which listens there, belongs to another user", (int)pid);
        return;
    }
    hr_shm_attach(e, e->sock, pid);
    e->state = SHM_PROVING;
    if (e->lost == HR_OK) hr_shm_on_socket(e);
    hr_shm_attend(dom);
}

void hr_shm_attach(struct shm_ep *e, int fd, pid_t pid) {
    struct shm_domain *dom = shm_ep_domain(e);
    e->sock = fd;
    e->pid = pid;
    if (!hr_shm_watch(dom, fd, &e->on_socket, SHM_ON_SOCKET, e)) {
        hr_shm_lose(e, HR_ERR_UNREACHABLE, "epoll_ctl: %s", strerror(errno));
        return;
    }
#ifdef SYS_pidfd_open
    /* In another pid namespace the peer has no number here: the socket's hang-up has to do. */
    if (pid > 0) e->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (e->pidfd >= 0) hr_shm_watch(dom, e->pidfd, &e->on_pidfd, SHM_ON_PIDFD, e);
#endif
}

static void prove(struct shm_ep *e) {
    int want_write = 0;
    hr_status status = hr_handshake_step(e->handshake, e->sock, &want_write);
    if (status == HR_AGAIN) {
        struct epoll_event event = {.events = EPOLLIN | (want_write ? EPOLLOUT : 0u), .data.ptr = &e->on_socket};
        epoll_ctl(shm_ep_domain(e)->epfd, EPOLL_CTL_MOD, e->sock, &event);
    } else if (hr_is_error(status)) {
        hr_shm_lose(e, hr_is_peer_error(status) ? status : HR_ERR_UNREACHABLE, "handshake with process %d failed: %s",
                    (int)e->pid, hr_status_text(status));
    } else {
        free(e->handshake);
        e->handshake = NULL;
        hr_shm_offer(e);
    }
}

void hr_shm_on_socket(struct shm_ep *e) {
    if (e->state == SHM_PROVING)
        prove(e);
    else if (e->sock >= 0 && e->state != SHM_DIALING)
        hr_shm_frames_drain(e);
}

static void leave_live(struct shm_domain *dom, struct shm_ep *e) {
    if (e->live_index >= dom->nlive || dom->live[e->live_index] != e) return;
    dom->live[e->live_index] = dom->live[--dom->nlive];
    dom->live[e->live_index]->live_index = e->live_index;
    if (dom->cursor >= dom->nlive) dom->cursor = 0;
}

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* Rings first: from then on nothing of the peer is looked at. Mappings of its arenas that were imported and not
 * released stay until they are, because the engine may be in the middle of reading them; the others go now. */
void hr_shm_ep_abort(struct hr_ep *ep) {
    struct shm_ep *e = shm_ep(ep);
    struct shm_domain *dom = shm_ep_domain(e);

    if (e->state == SHM_ABORTED) return;
    e->state = SHM_ABORTED;
    if (e->counted) dom->connecting--;
    e->counted = 0;
    leave_live(dom, e);
    hr_shm_board_leave(e);
    hr_shm_board_unmap(e);
    hr_shm_unmap(e, 0);
    if (e->sock >= 0)
        shutdown(e->sock, SHUT_RDWR); /* a forked child may hold a copy: closing would not tell the peer */
    if (e->sock >= 0) epoll_ctl(dom->epfd, EPOLL_CTL_DEL, e->sock, NULL);
    if (e->pidfd >= 0) epoll_ctl(dom->epfd, EPOLL_CTL_DEL, e->pidfd, NULL);
    while (e->frame_nfds) close_fd(&e->frame_fds[--e->frame_nfds]);
    close_fd(&e->sock);
    close_fd(&e->peer_wakefd);
    close_fd(&e->ringfd);
    free(e->handshake);
    free(e->push.copy);
    free(e->sent);
    e->handshake = NULL;
    e->push.copy = NULL;
    e->sent = NULL;
    e->nsent = e->sent_cap = 0;
    e->pushing = e->special = 0;
    hr_shm_maps_drop(e, 0);
}

void hr_shm_ep_destroy(struct hr_ep *ep) {
    struct shm_ep *e = shm_ep(ep), **link = &shm_ep_domain(e)->eps;
    hr_shm_ep_abort(ep);
    hr_shm_maps_drop(e, 1);
    close_fd(&e->pidfd); /* until here it tells whether the peer can still write to what it has mapped */
    hr_shm_unmap(e, 1);  /* and these whether its kernel is at it */
    while (*link != e) link = &(*link)->next;
    *link = e->next;
    free(e);
}
