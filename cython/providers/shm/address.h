/* address.h - how peers find a domain: the name of its Unix socket and the host on which that name means something. */
#ifndef HR_SHM_ADDRESS_H
#define HR_SHM_ADDRESS_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#define SHM_ADDRESS_VERSION 2

struct shm_address {
    uint8_t version;
    uint8_t name[16]; /* random */
    uint8_t host[16]; /* digest of boot id and network namespace, or of the option host */
};

/* An abstract name: it is in no file system, belongs to the network namespace, and goes with the last descriptor. */
static inline socklen_t shm_sockaddr(struct sockaddr_un *sa, const uint8_t name[16]) {
    char *p = sa->sun_path + 1;
    memset(sa, 0, sizeof *sa);
    sa->sun_family = AF_UNIX;
    p += sprintf(p, "hrdma-");
    for (int i = 0; i < 16; i++) p += sprintf(p, "%02x", name[i]);
    return (socklen_t)(p - (char *)sa);
}

#endif
