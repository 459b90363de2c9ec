/* address.c - the bytes by which peers reach a domain: where it listens, and which host that is. */

/*
 *   0 version  1 count  2 host id (8)  then per listener: family (4 or 6), port (2, network order), address (4 or 16)
 *
 * The host id says whether a loopback address in the list leads to the same network stack: same boot and same network
 * namespace. Two namespaces of one machine are two hosts here.
 */

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "providers/tcp/tcp.h"

#define VERSION 1
#define FIXED 10

uint64_t hr_tcp_host_id(void) {
    struct stat ns;
    char text[128] = {0};
    uint8_t digest[32];
    uint64_t id;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, 40);
    if (fd >= 0) close(fd);
    if (n <= 0 || stat("/proc/self/ns/net", &ns)) return 0;
    int len = (int)n + snprintf(text + n, sizeof text - (size_t)n, "%llu:%llu", (unsigned long long)ns.st_dev,
                                (unsigned long long)ns.st_ino);
    hr_sha256(text, (size_t)len, digest);
    memcpy(&id, digest, sizeof id);
    return id ? id : 1;
}

static size_t entry_len(const union hr_tcp_sockaddr *at) { return at->sa.sa_family == AF_INET ? 3 + 4 : 3 + 16; }

size_t hr_tcp_address_write(const struct hr_tcp_domain *d, void *bytes) {
    uint8_t *p = bytes;
    size_t used = FIXED;
    p[0] = VERSION;
    p[1] = 0;
    memcpy(p + 2, &d->host_id, 8);
    for (int i = 0; i < d->nlisteners; i++) {
        const union hr_tcp_sockaddr *at = &d->listeners[i].at;
        int v4 = at->sa.sa_family == AF_INET;
        if (used + entry_len(at) > HR_MAX_ADDR) continue;
        uint8_t *e = p + used;
        e[0] = v4 ? 4 : 6;
        memcpy(e + 1, v4 ? &at->v4.sin_port : &at->v6.sin6_port, 2);
        memcpy(e + 3, v4 ? (const void *)&at->v4.sin_addr : (const void *)&at->v6.sin6_addr, v4 ? 4 : 16);
        used += entry_len(at);
        p[1]++;
    }
    return used;
}

int hr_tcp_address_read(const void *bytes, size_t len, uint64_t *host_id_p, union hr_tcp_sockaddr *list) {
    const uint8_t *p = bytes;
    size_t used = FIXED;
    if (len < FIXED || len > HR_MAX_ADDR || p[0] != VERSION || p[1] > HR_TCP_ADDRESSES) return -1;
    memcpy(host_id_p, p + 2, 8);
    memset(list, 0, HR_TCP_ADDRESSES * sizeof *list);
    for (int i = 0; i < p[1]; i++) {
        if (used >= len || (p[used] != 4 && p[used] != 6)) return -1;
        int v4 = p[used] == 4;
        list[i].sa.sa_family = v4 ? AF_INET : AF_INET6;
        if (used + entry_len(&list[i]) > len) return -1;
        const uint8_t *e = p + used;
        memcpy(v4 ? &list[i].v4.sin_port : &list[i].v6.sin6_port, e + 1, 2);
        memcpy(v4 ? (void *)&list[i].v4.sin_addr : (void *)&list[i].v6.sin6_addr, e + 3, v4 ? 4 : 16);
        used += entry_len(&list[i]);
    }
    return used == len ? p[1] : -1;
}
