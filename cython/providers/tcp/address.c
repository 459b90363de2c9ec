/* address.c - the bytes by which peers reach a domain: where it listens, and which host that is. */

/*
 *   0 version  1 count  2 host id (8)  then per listener: family (4 or 6), port (2, network order), address (4 or 16)
 *
 * The host id says whether a loopback address in the list leads to the same network stack: same boot (five bytes) and
 * same network namespace (three). Two namespaces of one machine are two hosts, but no network need be between them.
 */

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "providers/tcp/tcp.h"

#define VERSION 1
#define FIXED 10
#define MACHINE 5 /* bytes of the host id */

static void hash(const char *text, size_t len, void *to, size_t n) {
    uint8_t digest[32];
    hr_sha256(text, len, digest);
    memcpy(to, digest, n);
}

uint64_t hr_tcp_host_id(void) {
    struct stat ns;
    char text[128] = {0};
    uint8_t bytes[8];
    uint64_t id;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, 40);
    if (fd >= 0) close(fd);
    if (n <= 0 || stat("/proc/self/ns/net", &ns)) return 0;
    int len = (int)n + snprintf(text + n, sizeof text - (size_t)n, "%llu:%llu", (unsigned long long)ns.st_dev,
                                (unsigned long long)ns.st_ino);
    hash(text, (size_t)n, bytes, MACHINE);
    hash(text, (size_t)len, bytes + MACHINE, sizeof bytes - MACHINE);
    memcpy(&id, bytes, sizeof id);
    return id ? id : 1;
}

int hr_tcp_same_machine(uint64_t a, uint64_t b) { return a && b && memcmp(&a, &b, MACHINE) == 0; }

size_t hr_tcp_address_write(const struct hr_tcp_domain *d, void *bytes) {
    uint8_t *p = bytes, *e = p + FIXED;
    p[0] = VERSION;
    p[1] = 0;
    memcpy(p + 2, &d->host_id, 8);
    for (int i = 0; i < d->door.nlisteners; i++) {
        const union hr_sockaddr *at = &d->door.listeners[i].at;
        if ((size_t)(e - p) + hr_sockaddr_size(at) > HR_MAX_ADDR) continue;
        e = hr_sockaddr_write(at, e);
        p[1]++;
    }
    return (size_t)(e - p);
}

int hr_tcp_address_read(const void *bytes, size_t len, uint64_t *host_id_p, union hr_sockaddr *list) {
    const uint8_t *p = bytes, *end = p + len, *e = p + FIXED;
    if (len < FIXED || len > HR_MAX_ADDR || p[0] != VERSION || p[1] > HR_TCP_ADDRESSES) return -1;
    memcpy(host_id_p, p + 2, 8);
    for (int i = 0; i < p[1]; i++)
        if (!(e = hr_sockaddr_read(&list[i], e, end))) return -1;
    return e == end ? p[1] : -1;
}
