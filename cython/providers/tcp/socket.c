/* socket.c - settings of a connection's socket: latency, buffers, congestion control, traffic class. */

#include <errno.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "providers/tcp/tcp.h"

/*
 * What is handed to the kernel cannot be overtaken. TCP_NOTSENT_LOWAT keeps the part of a socket's queue that has not
 * been sent small, however large the buffer for what is in flight has grown: the rest waits in our own ring, where an
 * urgent message gets between the chunks of a read's answer and where the engine sees it as unsent.
 */
#define NOTSENT_LOWAT (256 << 10)

/* A host that vanished without a word: found by probes when the connection is idle, by user_timeout when it is not. The
 * control plane's heartbeats are faster; this is what remains when there is no control plane. */
#define KEEPALIVE_IDLE 30
#define KEEPALIVE_INTERVAL 10
#define KEEPALIVE_COUNT 3

static int set(int fd, int level, int option, int value) { return setsockopt(fd, level, option, &value, sizeof value); }

hr_status hr_tcp_socket_control(int fd, const char *name) {
    if (!*name || setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name)) == 0) return HR_OK;
    return HR_ERR_INVALID;
}

/*
 * Congestion control is for networks. Between two processes of one machine there is none to control, and what looks for
 * it finds some all the same: bbr paces, which halves the bandwidth; cubic takes a receiver that has no processor for a
 * longer way, and bounds what is in flight at 1 MiB, so that messages lie with the sender and are sent by the core that
 * acknowledges. Reno waits for a loss, and everybody may have it: "auto" takes it on such connections, and leaves real
 * links to the system's choice.
 */
hr_status hr_tcp_socket_resolve(struct hr_tcp_domain *d, char detail[256]) {
    int is_auto = strcmp(d->opt.cc, "auto") == 0;
    hr_status status = HR_OK;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 && errno == EAFNOSUPPORT) fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        snprintf(detail, 256, "cannot make a tcp socket: %s", strerror(errno));
        return HR_ERR_DEVICE;
    }
    d->may_narrow = !d->opt.rcvbuf && hr_tcp_one_way_able(fd);
    if (is_auto && hr_tcp_socket_control(fd, "reno") == 0) strcpy(d->cc_local, "reno");
    if (!is_auto && strcmp(d->opt.cc, "system") != 0) {
        if (hr_tcp_socket_control(fd, d->opt.cc)) {
            snprintf(detail, 256, "cc=%s: %s (sysctl net.ipv4.tcp_allowed_congestion_control lists what is allowed)",
                     d->opt.cc, strerror(errno));
            status = HR_ERR_INVALID;
        }
        strcpy(d->cc_local, d->opt.cc);
        strcpy(d->cc_remote, d->opt.cc);
    }
    close(fd);
    return status;
}

int hr_tcp_socket_unsent(int fd, int most) {
    return set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, most ? most : NOTSENT_LOWAT);
}

/* The control is there before the first packet, as one that paces leaves a socket paced. */
int hr_tcp_socket_prepare(struct hr_tcp_domain *d, int fd, int local) {
    if (hr_tcp_socket_control(fd, local ? d->cc_local : d->cc_remote)) return -1;
    if (d->opt.sndbuf && set(fd, SOL_SOCKET, SO_SNDBUF, d->opt.sndbuf)) return -1;
    if (d->opt.rcvbuf && set(fd, SOL_SOCKET, SO_RCVBUF, d->opt.rcvbuf)) return -1;
    if (set(fd, IPPROTO_TCP, TCP_NODELAY, 1) || hr_tcp_socket_unsent(fd, 0) ||
        set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, (int)(d->opt.user_timeout * 1000)) ||
        set(fd, SOL_SOCKET, SO_KEEPALIVE, 1) || set(fd, IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_IDLE) ||
        set(fd, IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_INTERVAL) || set(fd, IPPROTO_TCP, TCP_KEEPCNT, KEEPALIVE_COUNT))
        return -1;
    return 0;
}

/* The type of service goes first: setting it overwrites the priority. Both are read back, since some kernels and
 * sandboxes accept and ignore them. The two low bits of the byte are the kernel's (ECN). The kernel's priorities count
 * up with urgency, and 6 is the highest that needs no privilege. */
hr_status hr_tcp_socket_class(int fd, int family, int dscp, int priority) {
    int level = family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6;
    int option = family == AF_INET ? IP_TOS : IPV6_TCLASS;
    int tos = 0, prio = -1, wanted = priority > 0 ? 7 - priority : 6;
    socklen_t len = sizeof tos;
    if (set(fd, level, option, dscp << 2) || set(fd, SOL_SOCKET, SO_PRIORITY, wanted)) return HR_ERR_UNSUPPORTED;
    if (getsockopt(fd, level, option, &tos, &len) || tos >> 2 != dscp) return HR_ERR_UNSUPPORTED;
    len = sizeof prio;
    if (getsockopt(fd, SOL_SOCKET, SO_PRIORITY, &prio, &len) || prio != wanted) return HR_ERR_UNSUPPORTED;
    return HR_OK;
}
