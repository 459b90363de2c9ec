/* congestion.c - a library to preload: every TCP socket that the program opens runs under $BENCH_CONGESTION.
 *
 * Peers do not let the congestion control of their sockets be chosen, and the system's default is not ours to change.
 * Sockets that are accepted have that of their listener. What cannot be set ends the process: no figure is better than
 * a wrong one.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int socket(int domain, int type, int protocol) {
    static int (*libc_socket)(int, int, int);
    const char *control = getenv("BENCH_CONGESTION");
    if (!libc_socket) *(void **)&libc_socket = dlsym(RTLD_NEXT, "socket");
    int fd = libc_socket(domain, type, protocol);
    if (fd < 0 || !control || (domain != AF_INET && domain != AF_INET6) || (type & 0xf) != SOCK_STREAM) return fd;
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, (socklen_t)strlen(control))) {
        dprintf(STDERR_FILENO, "congestion control %s: %s\n", control, strerror(errno));
        _exit(1);
    }
    return fd;
}
