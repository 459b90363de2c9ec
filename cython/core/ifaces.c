/* ifaces.c - lists this host's addresses and chooses among them by the interface grammar. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <fnmatch.h>
#include <ifaddrs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hr/ifaces.h"

#define MAX_ITEMS 64

struct item {
    char text[64];
    int exclude;
    int network; /* at/prefix below; otherwise text is a name or glob */
    union hr_sockaddr at;
    int prefix;
};

static const uint8_t *bytes_of(const union hr_sockaddr *a, int *nbytes_p) {
    if (a->sa.sa_family == AF_INET) {
        *nbytes_p = 4;
        return (const uint8_t *)&a->v4.sin_addr;
    }
    *nbytes_p = 16;
    return (const uint8_t *)&a->v6.sin6_addr;
}

int hr_sockaddr_within(const union hr_sockaddr *a, const union hr_sockaddr *b, int prefix) {
    int n;
    if (a->sa.sa_family != b->sa.sa_family) return 0;
    const uint8_t *x = bytes_of(a, &n), *y = bytes_of(b, &n);
    int whole = prefix / 8, rest = prefix % 8;
    if (memcmp(x, y, (size_t)whole)) return 0;
    return rest == 0 || ((x[whole] ^ y[whole]) >> (8 - rest)) == 0;
}

int hr_sockaddr_same(const union hr_sockaddr *a, const union hr_sockaddr *b) {
    return hr_sockaddr_within(a, b, a->sa.sa_family == AF_INET ? 32 : 128);
}

int hr_sockaddr_loopback(const union hr_sockaddr *a) {
    int n;
    if (a->sa.sa_family == AF_INET) return *bytes_of(a, &n) == 127;
    return IN6_IS_ADDR_LOOPBACK(&a->v6.sin6_addr);
}

int hr_ifaces_own(const struct hr_iface *list, int n, const union hr_sockaddr *a) {
    if (hr_sockaddr_loopback(a)) return 1;
    for (int i = 0; i < n; i++)
        if (hr_sockaddr_same(a, &list[i].at)) return 1;
    return 0;
}

socklen_t hr_sockaddr_len(const union hr_sockaddr *a) {
    return a->sa.sa_family == AF_INET ? sizeof a->v4 : sizeof a->v6;
}

uint16_t hr_sockaddr_port(const union hr_sockaddr *a) {
    return ntohs(a->sa.sa_family == AF_INET ? a->v4.sin_port : a->v6.sin6_port);
}

void hr_sockaddr_set_port(union hr_sockaddr *a, uint16_t port) {
    if (a->sa.sa_family == AF_INET)
        a->v4.sin_port = htons(port);
    else
        a->v6.sin6_port = htons(port);
}

const char *hr_sockaddr_text(const union hr_sockaddr *a, char text[HR_SOCKADDR_TEXT]) {
    char host[INET6_ADDRSTRLEN] = "?";
    int n, v6 = a->sa.sa_family == AF_INET6, port = hr_sockaddr_port(a);
    inet_ntop(a->sa.sa_family, bytes_of(a, &n), host, sizeof host);
    if (port)
        snprintf(text, HR_SOCKADDR_TEXT, "%s%s%s:%d", v6 ? "[" : "", host, v6 ? "]" : "", port);
    else
        snprintf(text, HR_SOCKADDR_TEXT, "%s", host);
    return text;
}

static int prefix_of(const struct sockaddr *mask, int family) {
    union hr_sockaddr m;
    int n, bits = 0;
    if (!mask) return family == AF_INET ? 32 : 128;
    memset(&m, 0, sizeof m);
    m.sa.sa_family = (sa_family_t)family;
    memcpy(&m, mask, family == AF_INET ? sizeof m.v4 : sizeof m.v6);
    m.sa.sa_family = (sa_family_t)family;
    const uint8_t *bytes = bytes_of(&m, &n);
    while (bits < 8 * n && bytes[bits / 8] >> (7 - bits % 8) & 1) bits++;
    return bits;
}

static int usable(const struct ifaddrs *ifa) {
    if (!ifa->ifa_addr || !(ifa->ifa_flags & IFF_UP)) return 0;
    if (ifa->ifa_addr->sa_family == AF_INET) return 1;
    if (ifa->ifa_addr->sa_family != AF_INET6) return 0;
    struct sockaddr_in6 v6;
    memcpy(&v6, ifa->ifa_addr, sizeof v6);
    return !IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr);
}

int hr_ifaces_scan(struct hr_iface **list_p) {
    struct ifaddrs *all;
    int count = 0, n = 0;
    if (getifaddrs(&all)) return -1;
    for (struct ifaddrs *ifa = all; ifa; ifa = ifa->ifa_next) count += usable(ifa);
    struct hr_iface *list = calloc(count ? (size_t)count : 1, sizeof *list);
    if (!list) {
        freeifaddrs(all);
        return -1;
    }
    for (int loopback = 0; loopback < 2; loopback++)
        for (struct ifaddrs *ifa = all; ifa; ifa = ifa->ifa_next) {
            if (!usable(ifa) || !!(ifa->ifa_flags & IFF_LOOPBACK) != loopback) continue;
            struct hr_iface *a = &list[n++];
            int family = ifa->ifa_addr->sa_family;
            snprintf(a->name, sizeof a->name, "%s", ifa->ifa_name);
            memcpy(&a->at, ifa->ifa_addr, family == AF_INET ? sizeof a->at.v4 : sizeof a->at.v6);
            hr_sockaddr_set_port(&a->at, 0);
            a->prefix = (uint8_t)prefix_of(ifa->ifa_netmask, family);
            a->loopback = (uint8_t)loopback;
        }
    freeifaddrs(all);
    *list_p = list;
    return n;
}

/* An address with an optional /prefix. 1: it is one; 0: it is not, hence a name; -1: it is one and wrong. */
static int parse_network(struct item *item, char detail[256]) {
    char host[sizeof item->text], *slash, *end;
    memcpy(host, item->text, sizeof host);
    if ((slash = strchr(host, '/'))) *slash = 0;
    memset(&item->at, 0, sizeof item->at);
    if (inet_pton(AF_INET, host, &item->at.v4.sin_addr) == 1)
        item->at.sa.sa_family = AF_INET;
    else if (inet_pton(AF_INET6, host, &item->at.v6.sin6_addr) == 1)
        item->at.sa.sa_family = AF_INET6;
    else if (!slash)
        return 0;
    else {
        snprintf(detail, 256, "interface item '%.63s': '%.63s' is not an IPv4 or IPv6 address", item->text, host);
        return -1;
    }
    int most = item->at.sa.sa_family == AF_INET ? 32 : 128;
    item->prefix = most;
    if (!slash) return 1;
    long bits = strtol(slash + 1, &end, 10);
    if (!isdigit((unsigned char)slash[1]) || *end || bits > most) {
        snprintf(detail, 256, "interface item '%.63s': the prefix '%.63s' is not in 0..%d", item->text, slash + 1,
                 most);
        return -1;
    }
    item->prefix = (int)bits;
    return 1;
}

static int parse(const char *grammar, struct item *items, char detail[256]) {
    int n = 0;
    for (const char *p = grammar;; p++) {
        const char *stop = strchrnul(p, ','), *from = p, *to = stop;
        while (from < to && isspace((unsigned char)*from)) from++;
        while (to > from && isspace((unsigned char)to[-1])) to--;
        int exclude = from < to && *from == '^';
        from += exclude;
        if (from == to) {
            snprintf(detail, 256, "interfaces '%.150s': item %d is empty", grammar, n + 1);
            return -1;
        }
        if (n == MAX_ITEMS) {
            snprintf(detail, 256, "interfaces '%.150s': more than %d items", grammar, MAX_ITEMS);
            return -1;
        }
        struct item *item = &items[n++];
        if ((size_t)(to - from) >= sizeof item->text) {
            snprintf(detail, 256, "interfaces: the item '%.100s' is longer than any name or network", from);
            return -1;
        }
        memcpy(item->text, from, (size_t)(to - from));
        item->text[to - from] = 0;
        item->exclude = exclude;
        if ((item->network = parse_network(item, detail)) < 0) return -1;
        if (!*stop) return n;
        p = stop;
    }
}

static int matches(const struct item *item, const struct hr_iface *a) {
    if (item->network) return hr_sockaddr_within(&item->at, &a->at, item->prefix);
    return fnmatch(item->text, a->name, 0) == 0;
}

static void say_what_exists(const struct hr_iface *list, int n, const char *grammar, char detail[256]) {
    char text[HR_SOCKADDR_TEXT];
    int used = snprintf(detail, 256, "no interface matches '%.80s'; there are:", grammar);
    for (int i = 0; i < n && used < 256; i++)
        used += snprintf(detail + used, 256 - (size_t)used, "%s %s %s/%d", i ? "," : "", list[i].name,
                         hr_sockaddr_text(&list[i].at, text), list[i].prefix);
}

hr_status hr_ifaces_choose(struct hr_iface *list, int n, const char *grammar, char detail[256]) {
    struct item items[MAX_ITEMS];
    int nitems = 0, positive = 0, chosen = 0;
    if (grammar && *grammar && (nitems = parse(grammar, items, detail)) < 0) return HR_ERR_INVALID;
    for (int k = 0; k < nitems; k++) positive |= !items[k].exclude;
    for (int i = 0; i < n; i++) {
        int in = !positive, out = 0;
        for (int k = 0; k < nitems; k++)
            if (matches(&items[k], &list[i])) *(items[k].exclude ? &out : &in) = 1;
        list[i].chosen = in && !out;
        chosen += list[i].chosen;
    }
    if (chosen) return HR_OK;
    if (n == 0)
        snprintf(detail, 256, "no network interface is up: ip link set lo up");
    else
        say_what_exists(list, n, grammar ? grammar : "", detail);
    return HR_ERR_NO_DEVICE;
}
