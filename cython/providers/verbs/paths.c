/* paths.c - the ways out of a device: GIDs of its active ports, best first; and pairs of them, to be tried in turn. */

/*
 * A GID is an address of the network interface behind the port. Of those that HRDMA_IFNAME leaves (by the interface's
 * name, or by the address that the GID is) the order is: RoCE v2 of an IPv4 address, RoCE v2 of a global IPv6 address,
 * RoCE v2 of a link-local one, the rest; then the larger MTU; then port and index. GIDs without an interface
 * (InfiniBand, the simulated device) are not the grammar's to choose. HR_VERBS_PATHS are kept; ports take turns among
 * equals, so that one with many addresses does not hide another.
 *
 * Which pair works only the network knows: try.c tries them. Both ends make the same list of pairs from what they have
 * told each other: of one kind both, in that order, and those first whose addresses have the longer prefix in common,
 * as two of one network have.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "providers/verbs/verbs.h"

enum { GID_NONE, GID_OTHER, GID_LINK_LOCAL, GID_IPV6, GID_IPV4 };
static const char *const kind_names[] = {"none", "not RoCE v2", "link-local", "IPv6", "IPv4"};

void hr_verbs_gid_text(const union ibv_gid *gid, char text[64]) { inet_ntop(AF_INET6, gid->raw, text, 64); }

/* One word of what the kernel tells of a device: its length, 0 where there is nothing to be read. */
static size_t sysfs(const struct ibv_device *device, const char *what, char *text, size_t size) {
    char path[400];
    snprintf(path, sizeof path, "%s/%s", device->ibdev_path, what);
    int fd = *device->ibdev_path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t n = fd < 0 ? 0 : read(fd, text, size - 1);
    if (fd >= 0) close(fd);
    text[n > 0 ? n : 0] = 0;
    text[strcspn(text, "\n")] = 0;
    return strlen(text);
}

static size_t gid_attr(const struct ibv_device *device, int port, int index, const char *of, char *text, size_t size) {
    char what[80];
    snprintf(what, sizeof what, "ports/%d/gid_attrs/%s/%d", port, of, index);
    return sysfs(device, what, text, size);
}

/* By the address that it is. */
static int family_of(const union ibv_gid *gid) {
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    static const uint8_t none[16];
    if (memcmp(gid->raw, none, sizeof none) == 0) return GID_NONE;
    if (memcmp(gid->raw, mapped, sizeof mapped) == 0) return GID_IPV4;
    return gid->raw[0] == 0xfe && (gid->raw[1] & 0xc0) == 0x80 ? GID_LINK_LOCAL : GID_IPV6;
}

/* A table that says nothing of types has one type only. */
static int kind_of(const struct ibv_device *device, int port, const union ibv_gid *gid, int index) {
    int family = family_of(gid);
    char type[32];
    int other = family && gid_attr(device, port, index, "types", type, sizeof type) && !strstr(type, "v2");
    return other ? GID_OTHER : family;
}

int hr_verbs_gid_choose(const struct hr_verbs_backend *verbs, struct ibv_context *ctx, uint8_t port, int entries,
                        int wanted, union ibv_gid *gid_p) {
    int best = GID_NONE, chosen = -1;
    for (int i = 0; i < entries; i++) {
        union ibv_gid gid;
        if (verbs->query_gid(ctx, port, i, &gid)) continue;
        int kind = kind_of(ctx->device, port, &gid, i);
        if (wanted >= 0 ? i != wanted || !kind : kind <= best) continue;
        best = kind;
        chosen = i;
        *gid_p = gid;
    }
    return chosen;
}

/* The address that a GID is; link-local ones need an interface to go with them. */
int hr_verbs_gid_address(const union ibv_gid *gid, union hr_sockaddr *a) {
    int family = family_of(gid);
    memset(a, 0, sizeof *a);
    if (family == GID_IPV4) {
        a->v4.sin_family = AF_INET;
        memcpy(&a->v4.sin_addr, gid->raw + 12, 4);
        return 1;
    }
    a->v6.sin6_family = AF_INET6;
    memcpy(&a->v6.sin6_addr, gid->raw, 16);
    return family == GID_IPV6;
}

/* ---- this side's ---- */

static int before(const struct hr_verbs_path *a, const struct hr_verbs_path *b) {
    if (a->kind != b->kind) return a->kind > b->kind;
    return a->mtu != b->mtu ? a->mtu > b->mtu : a->nth < b->nth; /* equals stay in the order of port and index */
}

static void insert(struct hr_verbs_paths *paths, const struct hr_verbs_path *path) {
    int i = paths->n < HR_VERBS_PATHS ? paths->n++ : HR_VERBS_PATHS;
    for (; i > 0 && before(path, &paths->list[i - 1]); i--)
        if (i < HR_VERBS_PATHS) paths->list[i] = paths->list[i - 1];
    if (i < HR_VERBS_PATHS) paths->list[i] = *path;
}

/* Whether the grammar takes a GID; notes in shown what there is to choose from. */
static hr_status chosen(const char *ifname, const struct hr_verbs_path *path, char shown[256]) {
    struct hr_iface iface = {.prefix = path->kind == GID_IPV4 ? 32 : 128};
    if (!ifname || !*ifname || !*path->ndev) return HR_OK;
    memcpy(iface.name, path->ndev, sizeof iface.name);
    hr_verbs_gid_address(&path->gid, &iface.at);
    return hr_ifaces_choose(&iface, 1, ifname, shown);
}

/* seen_p: counts the GIDs that are of the wished index. */
static hr_status scan_port(const struct hr_verbs_wish *wish, const struct hr_verbs_backend *verbs,
                           struct ibv_context *ctx, const struct ibv_port_attr *attr, struct hr_verbs_path *path,
                           struct hr_verbs_paths *paths, int *seen_p, char detail[256]) {
    uint8_t nth[GID_IPV4 + 1] = {0};
    for (int i = 0; i < attr->gid_tbl_len; i++) {
        char shown[256];
        if ((wish->gid >= 0 && i != wish->gid) || verbs->query_gid(ctx, path->port, i, &path->gid)) continue;
        path->index = (uint8_t)i;
        path->kind = (uint8_t)kind_of(ctx->device, path->port, &path->gid, i);
        if (!path->kind || i > UINT8_MAX) continue;
        ++*seen_p;
        memset(path->ndev, 0, sizeof path->ndev);
        gid_attr(ctx->device, path->port, i, "ndevs", path->ndev, sizeof path->ndev);
        hr_status status = chosen(wish->ifname, path, shown);
        if (status == HR_ERR_INVALID) memcpy(detail, shown, sizeof shown);
        if (status == HR_ERR_INVALID) return status;
        path->nth = nth[path->kind];
        if (status == HR_OK)
            nth[path->kind]++, insert(paths, path);
        else
            paths->excluded++, snprintf(detail, 256, "%.60s: %.190s", ctx->device->name, shown);
    }
    return HR_OK;
}

void hr_verbs_port_idle(const struct ibv_device *device, int port, const struct ibv_port_attr *attr, char text[256]) {
    static const char *const states[] = {"in no state", "down", "waiting for its subnet manager", "not active yet"};
    const char *state = (unsigned)attr->state < 4 ? states[attr->state] : "not active";
    char ndev[64] = "";
    for (int i = 0; i < attr->gid_tbl_len && !*ndev; i++) gid_attr(device, port, i, "ndevs", ndev, sizeof ndev);
    if (!*ndev) sysfs(device, "parent", ndev, sizeof ndev); /* soft-RoCE's, though its port has no GID */
    if (attr->link_layer == IBV_LINK_LAYER_ETHERNET)
        snprintf(text, 256, "port %d of %.60s is %s: ip link set %s up", port, device->name, state,
                 *ndev ? ndev : "...");
    else
        snprintf(text, 256, "port %d of %.60s is %s: look at cable and switch, and for a subnet manager", port,
                 device->name, state);
}

hr_status hr_verbs_paths_scan(const struct hr_verbs_wish *wish, const struct hr_verbs_backend *verbs,
                              struct ibv_context *ctx, int ports, struct hr_verbs_paths *paths, char detail[256]) {
    const char *name = ctx->device->name;
    int entries = 0, seen = 0;
    hr_status status = HR_OK;
    *paths = (struct hr_verbs_paths){.max_message = UINT32_MAX};
    snprintf(detail, 256, "%.60s has no active port: ip link set ... up", name);
    for (int port = 1; port <= ports && status == HR_OK; port++) {
        struct hr_verbs_path path = {.port = (uint8_t)port};
        struct ibv_port_attr attr = {0};
        if (wish->port && port != wish->port) continue;
        if (verbs->query_port(ctx, (uint8_t)port, &attr)) continue;
        if (attr.max_msg_sz < paths->max_message) paths->max_message = attr.max_msg_sz;
        if (attr.state != IBV_PORT_ACTIVE && (ports == 1 || wish->port))
            hr_verbs_port_idle(ctx->device, port, &attr, detail);
        if (attr.state != IBV_PORT_ACTIVE) continue;
        snprintf(detail, 256, "port %d of %.60s has no GID: give its interface an address", port, name);
        path.lid = attr.lid;
        path.mtu = (uint8_t)attr.active_mtu;
        path.ethernet = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
        if (attr.gid_tbl_len > entries) entries = attr.gid_tbl_len;
        status = scan_port(wish, verbs, ctx, &attr, &path, paths, &seen, detail);
    }
    if (status != HR_OK || paths->n) return status;
    if (wish->gid < 0 || !entries || seen) return HR_ERR_NO_DEVICE;
    snprintf(detail, 256, "verbs option gid=%d: %.60s has no such GID; it has %d entries", wish->gid, name, entries);
    return HR_ERR_INVALID;
}

void hr_verbs_path_text(const struct hr_verbs_path *path, char text[160]) {
    char gid[64];
    hr_verbs_gid_text(&path->gid, gid);
    snprintf(text, 160, "port %d GID %d %s (%s%s%s, MTU %d)", path->port, path->index, gid, kind_names[path->kind],
             *path->ndev ? ", " : "", path->ndev, 128 << path->mtu);
}

void hr_verbs_path_kind(const struct hr_verbs_path *path, char text[40]) {
    static const char *const names[] = {"none", "InfiniBand", "link-local", "global IPv6", "IPv4-mapped"};
    if (path->ethernet && path->kind == GID_OTHER)
        snprintf(text, 40, "RoCE v1");
    else
        snprintf(text, 40, "%s%s", names[path->kind], path->ethernet ? " RoCE v2" : "");
}

void hr_verbs_path_why(const struct hr_verbs_wish *wish, const struct hr_verbs_paths *paths, int i, char text[200]) {
    const struct hr_verbs_path *path = &paths->list[i];
    char kind[40], other[40];
    int next = i + 1, n;
    while (next < paths->n && paths->list[next].kind == path->kind && paths->list[next].mtu == path->mtu) next++;
    const struct hr_verbs_path *than = next < paths->n ? &paths->list[next] : NULL;
    hr_verbs_path_kind(path, kind);
    if (than) hr_verbs_path_kind(than, other);
    if (wish->gid >= 0)
        n = snprintf(text, 200, "gid=%d asks for it", wish->gid);
    else if (paths->n == 1)
        n = snprintf(text, 200, "there is no other");
    else if (!than)
        n = snprintf(text, 200, "the first of %d that are equal", paths->n - i);
    else if (than->kind != path->kind)
        n = snprintf(text, 200, "%s goes before %s", kind, other);
    else
        n = snprintf(text, 200, "MTU %d goes before %d", 128 << path->mtu, 128 << than->mtu);
    if (paths->excluded) snprintf(text + n, (size_t)(200 - n), "; HRDMA_IFNAME leaves out %d", paths->excluded);
}

int hr_verbs_numa_distance(const struct ibv_device *device, unsigned node) {
    enum { SAME = 10 };
    char text[1024], path[80], *at = text;
    long value = SAME;
    int fd;
    if (!sysfs(device, "device/numa_node", text, sizeof text) || (value = strtol(text, NULL, 10)) < 0) return SAME;
    snprintf(path, sizeof path, "/sys/devices/system/node/node%u/distance", node);
    if ((unsigned)value == node || (fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        return (unsigned)value == node ? SAME : 2 * SAME;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    for (long i = 0, distance; (distance = strtol(at, &at, 10)); i++)
        if (i == value) return (int)distance;
    return 2 * SAME;
}

/* ---- both sides' ---- */

static int common_bits(const union ibv_gid *a, const union ibv_gid *b) {
    int bits = 0;
    while (bits < 128 && !((a->raw[bits / 8] ^ b->raw[bits / 8]) >> (7 - bits % 8) & 1)) bits++;
    return bits;
}

static int goodness(const struct hr_verbs_end *a, const struct hr_verbs_end *b) {
    return a->kind * 256 + (a->kind > GID_LINK_LOCAL ? common_bits(&a->gid, &b->gid) : 0);
}

int hr_verbs_pairs(const struct hr_verbs_open *active, const struct hr_verbs_open *passive,
                   struct hr_verbs_pair pairs[HR_VERBS_PAIRS]) {
    int n = 0, any = active->fixed || passive->fixed;
    for (int sum = 0; sum < active->npaths + passive->npaths;
         sum++) /* best of both first, where nothing else decides */
        for (int i = 0; i <= sum && i < active->npaths; i++) {
            int j = sum - i, at = n;
            if (j >= passive->npaths) continue;
            const struct hr_verbs_end *a = &active->paths[i], *b = &passive->paths[j];
            if (a->kind != b->kind && !any) continue;
            struct hr_verbs_pair pair = {(uint8_t)i, (uint8_t)j, goodness(a, b)};
            if (at == HR_VERBS_PAIRS && pairs[--at].goodness >= pair.goodness) continue;
            for (; at > 0 && pairs[at - 1].goodness < pair.goodness; at--) pairs[at] = pairs[at - 1];
            pairs[at] = pair;
            if (n < HR_VERBS_PAIRS) n++;
        }
    return n;
}
