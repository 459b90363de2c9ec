/* limit_tcp.c - what loopback TCP allows: two processes, one socket, send() and recv() straight into the target.
 *
 *     limit_tcp pingpong|bandwidth BYTES 2 SECONDS REPETITIONS [sleep|cubic|...]
 *
 * Both sides spin in recv(); with `sleep` they block in it. Any other option is the congestion control to take instead
 * of the system's. bandwidth is a stream of messages; the receiver's time counts, as it is the last.
 */

#define _GNU_SOURCE
#include "limit.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

static int fd, flags = MSG_DONTWAIT;
static char *x, *out;

static void send_all(void) {
    for (size_t done = 0; done < nbytes;) {
        ssize_t n = send(fd, x + done, nbytes - done, MSG_NOSIGNAL | flags);
        limit_need(n > 0 || errno == EAGAIN, "send");
        if (n > 0) done += (size_t)n;
    }
}

static void recv_all(void) {
    for (size_t done = 0; done < nbytes;) {
        ssize_t n = recv(fd, out + done, nbytes - done, flags);
        limit_need(n > 0 || (n < 0 && errno == EAGAIN), "recv");
        if (n > 0) done += (size_t)n;
    }
}

static void pingpong(void) {
    if (me == 0) send_all();
    recv_all();
    if (me == 1) send_all();
}

static void bandwidth(void) {
    if (me == 0)
        send_all();
    else
        recv_all();
}

static void join(const char *control) {
    static int fds[2];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    limit_need(!bind(listener, (void *)&at, len) && !listen(listener, 1), "listen");
    limit_need(!getsockname(listener, (void *)&at, &len), "getsockname");
    fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    for (int i = 0; i < 2 && *control; i++) {
        int which = i ? listener : fds[0];
        limit_need(!setsockopt(which, IPPROTO_TCP, TCP_CONGESTION, control, (socklen_t)strlen(control)), control);
    }
    limit_need(!connect(fds[0], (void *)&at, len), "connect");
    fds[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    limit_need(fds[1] >= 0, "accept");
    for (int i = 0; i < 2; i++) setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    close(listener);
    limit_fork();
    fd = fds[me];
    close(fds[!me]);
}

int main(int argc, char **argv) {
    void (*call)(void);
    unsigned long operations = 1;
    uint64_t wrong = 0;

    limit_begin(argc, argv);
    if (ranks == 2 && !strcmp(what, "pingpong")) {
        call = pingpong, operations = 2;
    } else if (ranks == 2 && !strcmp(what, "bandwidth")) {
        call = bandwidth;
    } else {
        fprintf(stderr, "limit_tcp: no case %s of %d ranks\n", what, ranks);
        return 2;
    }
    if (!strcmp(option, "sleep")) flags = 0;
    join(flags ? option : "");
    x = limit_memory(nbytes);
    out = limit_memory(nbytes);
    limit_measure(call, operations);

    for (size_t i = 0; i < nbytes; i++) x[i] = (char)((i * 31 + (size_t)me * 7) % 251);
    call();
    for (size_t i = 0; i < nbytes && (call == pingpong || me == 1); i++)
        wrong += out[i] != (char)((i * 31 + (size_t)!me * 7) % 251);
    return limit_end(wrong);
}
