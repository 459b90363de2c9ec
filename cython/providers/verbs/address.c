/* address.c - the bytes by which peers reach a domain: where it listens for the exchange that makes a connection. */

/*
 *   0 version  1 count  then per listener: family (4 or 6), port (2, network order), address (4 or 16)
 *
 * The exchange goes over the addresses of the device's own network, which are its GIDs: where the RDMA packets find a
 * way these do. Devices whose GIDs are no addresses (InfiniBand) are called over all that this host has.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>

#include "providers/verbs/verbs.h"

#define VERSION 1

socklen_t hr_verbs_sockaddr_len(const union hr_verbs_sockaddr *a) {
    return a->sa.sa_family == AF_INET ? sizeof a->v4 : sizeof a->v6;
}

const char *hr_verbs_sockaddr_text(const union hr_verbs_sockaddr *a, char text[80]) {
    char at[INET6_ADDRSTRLEN] = "?";
    int v4 = a->sa.sa_family == AF_INET;
    inet_ntop(a->sa.sa_family, v4 ? (const void *)&a->v4.sin_addr : (const void *)&a->v6.sin6_addr, at, sizeof at);
    snprintf(text, 80, v4 ? "%s:%d" : "[%s]:%d", at, ntohs(v4 ? a->v4.sin_port : a->v6.sin6_port));
    return text;
}

static int is_loopback(const union hr_verbs_sockaddr *a) {
    if (a->sa.sa_family == AF_INET) return (ntohl(a->v4.sin_addr.s_addr) >> 24) == 127;
    return IN6_IS_ADDR_LOOPBACK(&a->v6.sin6_addr);
}

static int same_host(const union hr_verbs_sockaddr *a, const union hr_verbs_sockaddr *b) {
    if (a->sa.sa_family != b->sa.sa_family) return 0;
    if (a->sa.sa_family == AF_INET) return a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
    return memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, sizeof a->v6.sin6_addr) == 0;
}

int hr_verbs_is_own(const struct hr_verbs_domain *d, const union hr_verbs_sockaddr *a) {
    if (is_loopback(a)) return 1;
    for (int i = 0; i < d->nown; i++)
        if (same_host(&d->own[i], a)) return 1;
    return 0;
}

hr_status hr_verbs_own_addresses(struct hr_verbs_domain *d, char detail[256]) {
    struct ifaddrs *list;
    int most = (int)(sizeof d->own / sizeof d->own[0]);
    if (getifaddrs(&list)) {
        snprintf(detail, 256, "cannot list network interfaces: %s", strerror(errno));
        return HR_ERR_DEVICE;
    }
    for (struct ifaddrs *at = list; at && d->nown < most; at = at->ifa_next) {
        if (!at->ifa_addr || !(at->ifa_flags & IFF_UP)) continue;
        union hr_verbs_sockaddr *own = &d->own[d->nown];
        if (at->ifa_addr->sa_family == AF_INET)
            memcpy(&own->v4, at->ifa_addr, sizeof own->v4);
        else if (at->ifa_addr->sa_family == AF_INET6)
            memcpy(&own->v6, at->ifa_addr, sizeof own->v6);
        else
            continue;
        d->nown++;
    }
    freeifaddrs(list);
    return HR_OK;
}

/* The address that a GID is, or 0: link-local ones need an interface to go with them. */
static int gid_address(const union ibv_gid *gid, union hr_verbs_sockaddr *a) {
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    static const uint8_t none[16];
    memset(a, 0, sizeof *a);
    if (memcmp(gid->raw, mapped, sizeof mapped) == 0) {
        a->v4.sin_family = AF_INET;
        memcpy(&a->v4.sin_addr, gid->raw + 12, 4);
        return 1;
    }
    if (memcmp(gid->raw, none, sizeof none) == 0 || (gid->raw[0] == 0xfe && (gid->raw[1] & 0xc0) == 0x80)) return 0;
    a->v6.sin6_family = AF_INET6;
    memcpy(&a->v6.sin6_addr, gid->raw, 16);
    return 1;
}

static int add(union hr_verbs_sockaddr *list, int have, int most, const union hr_verbs_sockaddr *a) {
    for (int i = 0; i < have; i++)
        if (same_host(&list[i], a)) return have;
    if (have < most) list[have++] = *a;
    return have;
}

static int is_link_local(const union hr_verbs_sockaddr *a) {
    return a->sa.sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&a->v6.sin6_addr);
}

int hr_verbs_call_addresses(struct hr_verbs_domain *d, union hr_verbs_sockaddr *list, int most) {
    union hr_verbs_sockaddr a = {.v4 = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}}};
    union ibv_gid gid;
    int n = 0;
    if (d->is_sim) { /* its ports are this host's */
        list[0] = a;
        return 1;
    }
    if (gid_address(&d->gid, &a) && hr_verbs_is_own(d, &a)) n = add(list, n, most, &a);
    for (int i = 0; i < d->port_attr.gid_tbl_len && d->port_attr.link_layer == IBV_LINK_LAYER_ETHERNET; i++)
        if (!d->verbs->query_gid(d->ctx, d->port, i, &gid) && gid_address(&gid, &a) && hr_verbs_is_own(d, &a))
            n = add(list, n, most, &a);
    for (int i = 0; i < d->nown && !n; i++)
        if (!is_loopback(&d->own[i]) && !is_link_local(&d->own[i])) n = add(list, n, most, &d->own[i]);
    return n;
}

size_t hr_verbs_address_write(const struct hr_verbs_domain *d, void *bytes) {
    uint8_t *p = bytes, *e = p + 2;
    p[0] = VERSION;
    p[1] = (uint8_t)d->nlisteners;
    for (int i = 0; i < d->nlisteners; i++) {
        const union hr_verbs_sockaddr *at = &d->listeners[i].at;
        int v4 = at->sa.sa_family == AF_INET;
        *e++ = v4 ? 4 : 6;
        memcpy(e, v4 ? &at->v4.sin_port : &at->v6.sin6_port, 2);
        memcpy(e + 2, v4 ? (const void *)&at->v4.sin_addr : (const void *)&at->v6.sin6_addr, v4 ? 4 : 16);
        e += 2 + (v4 ? 4 : 16);
    }
    return (size_t)(e - p);
}

int hr_verbs_address_read(const void *bytes, size_t len, union hr_verbs_sockaddr *list) {
    const uint8_t *p = bytes, *end = p + len, *e = p + 2;
    if (len < 2 || p[0] != VERSION || !p[1] || p[1] > HR_VERBS_ADDRESSES) return -1;
    memset(list, 0, HR_VERBS_ADDRESSES * sizeof *list);
    for (int i = 0; i < p[1]; i++) {
        if (e >= end || (*e != 4 && *e != 6)) return -1;
        int v4 = *e++ == 4, size = v4 ? 4 : 16;
        if (end - e < 2 + size) return -1;
        list[i].sa.sa_family = v4 ? AF_INET : AF_INET6;
        memcpy(v4 ? &list[i].v4.sin_port : &list[i].v6.sin6_port, e, 2);
        memcpy(v4 ? (void *)&list[i].v4.sin_addr : (void *)&list[i].v6.sin6_addr, e + 2, (size_t)size);
        e += 2 + size;
    }
    return e == end ? p[1] : -1;
}
