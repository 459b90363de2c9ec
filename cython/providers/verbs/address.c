/* address.c - the bytes by which peers reach a domain: where it listens for the exchange that makes a connection. */

/*
 *   0 version  1 count  then per listener: family (4 or 6), port (2, network order), address (4 or 16)
 *
 * Of a domain with several rails:
 *
 *   0 version (2)  1 count  then per rail: length, the address above; length 0: there is no rail of that number
 *
 * The exchange goes over the addresses of the device's own network, which are its GIDs: where the RDMA packets find a
 * way these do. Devices whose GIDs are no addresses (InfiniBand) are called over all that this host has.
 */

#include <arpa/inet.h>
#include <string.h>

#include "providers/verbs/verbs.h"

enum { VERSION = 1, RAILS_VERSION = 2 };

static int add(union hr_sockaddr *list, int have, int most, const union hr_sockaddr *a) {
    for (int i = 0; i < have; i++)
        if (hr_sockaddr_same(&list[i], a)) return have;
    if (have < most) list[have++] = *a;
    return have;
}

/* Whether a device that the rail stands in for may take the interface with it. */
static int shares_fate(const struct hr_verbs_domain *d, const struct hr_iface *iface) {
    for (int k = 0; k < HR_VERBS_BEHIND; k++)
        if (strcmp(iface->name, d->behind[k]) == 0) return 1;
    return 0;
}

/* Of a rail that stands in for devices: first those that do not share their fate, but not these alone, as bridges
 * inside this host are among them; loopback where there is room. */
static int spare_addresses(struct hr_verbs_domain *d, union hr_sockaddr *list, int most) {
    char ignored[256];
    int n = 0, sharing = 0;
    if (hr_ifaces_choose(d->ifaces, d->nifaces, d->wish.ifname, ignored) != HR_OK) return 0;
    for (int i = 0; i < d->nifaces; i++)
        sharing |= d->ifaces[i].chosen && !d->ifaces[i].loopback && shares_fate(d, &d->ifaces[i]);
    for (int rank = 0; rank < 3; rank++)
        for (int i = 0; i < d->nifaces; i++) {
            const struct hr_iface *iface = &d->ifaces[i];
            int its = iface->loopback ? 2 : shares_fate(d, iface);
            if (iface->chosen && its == rank) n = add(list, n, most - (!rank && sharing), &iface->at);
        }
    return n;
}

int hr_verbs_call_addresses(struct hr_verbs_domain *d, union hr_sockaddr *list, int most) {
    union hr_sockaddr a = {.v4 = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}}};
    int n = 0;
    if (d->is_sim) { /* its ports are this host's */
        list[0] = a;
        return 1;
    }
    if (d->is_tcp) return spare_addresses(d, list, most);
    for (int i = 0; i < d->paths.n; i++)
        if (d->paths.list[i].ethernet && hr_verbs_gid_address(&d->paths.list[i].gid, &a) &&
            hr_ifaces_own(d->ifaces, d->nifaces, &a))
            n = add(list, n, most, &a);
    for (int i = 0, found = n; i < d->nifaces && !found; i++)
        if (!d->ifaces[i].loopback) n = add(list, n, most, &d->ifaces[i].at);
    return n;
}

size_t hr_verbs_address_write(const struct hr_verbs_domain *d, void *bytes) {
    uint8_t *p = bytes, *e = p + 2;
    p[0] = VERSION;
    p[1] = (uint8_t)d->door.nlisteners;
    for (int i = 0; i < d->door.nlisteners; i++) e = hr_sockaddr_write(&d->door.listeners[i].at, e);
    return (size_t)(e - p);
}

size_t hr_verbs_addresses_write(struct hr_verbs_domain *const *rails, int n, void *bytes) {
    uint8_t *p = bytes, *e = p + 2;
    p[0] = RAILS_VERSION;
    p[1] = (uint8_t)n;
    for (int i = 0; i < n; e += 1 + *e, i++) *e = rails[i] ? (uint8_t)hr_verbs_address_write(rails[i], e + 1) : 0;
    return (size_t)(e - p);
}

int hr_verbs_address_rails(const void *bytes, size_t len) {
    const uint8_t *p = bytes;
    return len >= 2 && p[0] == RAILS_VERSION ? p[1] : 0;
}

const void *hr_verbs_address_rail(const void *bytes, size_t len, int rail, size_t *len_p) {
    const uint8_t *p = bytes, *end = p + len, *e = p + 2;
    *len_p = len;
    if (len < 2 || p[0] != RAILS_VERSION) return rail == 0 ? p : NULL;
    for (int i = 0; i < p[1] && e < end && *e < end - e; i++, e += 1 + *e) {
        *len_p = *e;
        if (i == rail) return *e ? e + 1 : NULL;
    }
    return NULL;
}

int hr_verbs_address_read(const void *bytes, size_t len, union hr_sockaddr *list) {
    const uint8_t *p = NULL;
    size_t all = len;
    for (int i = 0; !p && i <= hr_verbs_address_rails(bytes, all); i++) p = hr_verbs_address_rail(bytes, all, i, &len);
    const uint8_t *end = p + len, *e = p + 2;
    if (!p || len < 2 || p[0] != VERSION || !p[1] || p[1] > HR_VERBS_ADDRESSES) return -1;
    for (int i = 0; i < p[1]; i++)
        if (!(e = hr_sockaddr_read(&list[i], e, end))) return -1;
    return e == end ? p[1] : -1;
}
