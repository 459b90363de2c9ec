/* device.c - which device, port and GID: what was named, or the first real one with an active port. */

/*
 * A device is named "mlx5_0", "mlx5_0:2" with its port, by a pattern ("mlx5_*"), or several of these with commas
 * between, best first. Without a name software devices (soft-RoCE, soft-iWARP) are passed over: tcp is faster than they
 * are. "sim" is the simulated one and is never found by a pattern.
 *
 * GIDs, best first: RoCE v2 of an IPv4 address, RoCE v2 of a global IPv6 address, RoCE v2 of a link-local one, the
 * rest.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "providers/verbs/verbs.h"

/* As the kernel's drivers report themselves. */
static const uint32_t software_vendors[] = {0x000000, 0xffffff, 0x626d74};

static int is_software(const struct ibv_device_attr *attr) {
    for (size_t i = 0; i < sizeof software_vendors / sizeof software_vendors[0]; i++)
        if (attr->vendor_id == software_vendors[i]) return 1;
    return 0;
}

void hr_verbs_gid_text(const union ibv_gid *gid, char text[64]) { inet_ntop(AF_INET6, gid->raw, text, 64); }

int hr_verbs_device_count(const char **why_p) {
    const struct hr_verbs_backend *verbs = hr_verbs_lib(why_p);
    struct ibv_device **list;
    int n = 0, found = 0;
    if (!verbs) return 0;
    list = verbs->get_device_list(&n);
    *why_p = "no RDMA device: `rdma link` lists them (package iproute2)";
    for (int i = 0; list && i < n; i++) {
        struct ibv_context *ctx = verbs->open_device(list[i]);
        struct ibv_device_attr attr;
        if (!ctx) {
            *why_p = "no RDMA device can be opened: the user needs access to /dev/infiniband";
            continue;
        }
        if (verbs->query_device(ctx, &attr) == 0) {
            if (is_software(&attr))
                *why_p = "only software RDMA devices, to which tcp is preferred: name one in HRDMA_DEVICES";
            else
                found++;
        }
        verbs->close_device(ctx);
    }
    if (list) verbs->free_device_list(list);
    return found;
}

/* ---- GIDs ---- */

/* Whether the kernel calls this entry RoCE v2. A table that says nothing of types has one type only. */
static int is_v2(const char *device, int port, int index) {
    char path[200], text[32] = "";
    snprintf(path, sizeof path, "/sys/class/infiniband/%.64s/ports/%d/gid_attrs/types/%d", device, port, index);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 1;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    return n > 0 && strstr(text, "v2");
}

static int gid_rank(const char *device, int port, const union ibv_gid *gid, int index) {
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    static const uint8_t none[16];
    if (memcmp(gid->raw, none, sizeof none) == 0) return 0;
    if (!is_v2(device, port, index)) return 1;
    if (memcmp(gid->raw, mapped, sizeof mapped) == 0) return 4;
    return gid->raw[0] == 0xfe && (gid->raw[1] & 0xc0) == 0x80 ? 2 : 3;
}

int hr_verbs_gid_choose(const struct hr_verbs_backend *verbs, struct ibv_context *ctx, uint8_t port, int entries,
                        int wanted, union ibv_gid *gid_p) {
    int best = 0, chosen = -1;
    for (int i = 0; i < entries; i++) {
        union ibv_gid gid;
        if (verbs->query_gid(ctx, port, i, &gid)) continue;
        int rank = gid_rank(ctx->device->name, port, &gid, i);
        if (wanted >= 0 ? i != wanted || !rank : rank <= best) continue;
        best = rank;
        chosen = i;
        *gid_p = gid;
    }
    return chosen;
}

static hr_status choose_gid(struct hr_verbs_domain *d, char detail[256]) {
    int wanted = d->gid_index, entries = d->port_attr.gid_tbl_len;
    d->gid_index = hr_verbs_gid_choose(d->verbs, d->ctx, d->port, entries, wanted, &d->gid);
    if (d->gid_index >= 0) return HR_OK;
    if (wanted >= 0)
        snprintf(detail, 256, "verbs option gid=%d: port %d of %s has no such GID; it has %d entries", wanted, d->port,
                 d->ctx->device->name, entries);
    else
        snprintf(detail, 256, "port %d of %s has no GID: give its interface an address", d->port, d->ctx->device->name);
    return wanted >= 0 ? HR_ERR_INVALID : HR_ERR_NO_DEVICE;
}

/* ---- devices ---- */

/* "name" or "name:port". */
static int named(const char *item, const char *name, int *port_p) {
    char pattern[80];
    const char *colon = strchr(item, ':');
    size_t len = colon ? (size_t)(colon - item) : strlen(item);
    if (len >= sizeof pattern) return 0;
    memcpy(pattern, item, len);
    pattern[len] = 0;
    *port_p = colon ? atoi(colon + 1) : 0;
    return fnmatch(pattern, name, 0) == 0;
}

static int active_port(struct hr_verbs_domain *d, int wanted) {
    for (int port = 1; port <= d->attr.phys_port_cnt; port++) {
        if (wanted && port != wanted) continue;
        memset(&d->port_attr, 0, sizeof d->port_attr);
        if (d->verbs->query_port(d->ctx, (uint8_t)port, &d->port_attr) || d->port_attr.state != IBV_PORT_ACTIVE)
            continue;
        d->port = (uint8_t)port;
        return 1;
    }
    return 0;
}

/* Opens it and keeps it if it will do; notes in detail why not. */
static int try_device(struct hr_verbs_domain *d, struct ibv_device *device, int port, int any, char detail[256]) {
    d->ctx = d->verbs->open_device(device);
    if (!d->ctx) {
        snprintf(detail, 256, "cannot open %.60s: %s%s", device->name, strerror(errno),
                 d->is_sim ? "" : " (access to /dev/infiniband, and its driver: apt install ibverbs-providers)");
        return 0;
    }
    if (d->verbs->query_device(d->ctx, &d->attr))
        snprintf(detail, 256, "%.60s cannot be asked for its properties", device->name);
    else if (any && is_software(&d->attr))
        snprintf(detail, 256, "%.60s is a software device, to which tcp is preferred: HRDMA_DEVICES=%.60s takes it",
                 device->name, device->name);
    else if (!active_port(d, port))
        snprintf(detail, 256, "%.60s has no active port%s: ip link set ... up", device->name,
                 port ? " of that number" : "");
    else
        return 1;
    d->verbs->close_device(d->ctx);
    d->ctx = NULL;
    return 0;
}

static void find(struct hr_verbs_domain *d, const char *item, char detail[256]) {
    int n = 0, port = 0;
    struct ibv_device **list = d->verbs->get_device_list(&n);
    for (int i = 0; list && i < n && !d->ctx; i++)
        if (!item || named(item, list[i]->name, &port)) try_device(d, list[i], port, !item, detail);
    if (list) d->verbs->free_device_list(list);
}

static hr_status open_named(struct hr_verbs_domain *d, const char *device, char detail[256]) {
    const char *why = NULL;
    char *copy = strdup(device ? device : ""), *rest = NULL;
    if (!copy) return HR_ERR_NOMEM;
    int any = !device || strcmp(device, "*") == 0;
    snprintf(detail, 256, "no RDMA device is %s%.100s%shere: `rdma link` lists them", any ? "" : "called ",
             any ? "" : device, any ? "" : " ");
    for (char *item = device ? strtok_r(copy, ",", &rest) : copy; item && !d->ctx; item = strtok_r(NULL, ",", &rest)) {
        d->is_sim = strcmp(item, "sim") == 0;
        d->verbs = d->is_sim ? &hr_verbs_sim : hr_verbs_lib(&why);
        if (d->verbs)
            find(d, device ? item : NULL, detail);
        else
            snprintf(detail, 256, "%s", why);
        if (!device) break;
    }
    free(copy);
    return d->ctx ? HR_OK : HR_ERR_NO_DEVICE;
}

hr_status hr_verbs_device_open(struct hr_verbs_domain *d, const char *device, char detail[256]) {
    hr_status status = open_named(d, device && *device ? device : NULL, detail);
    int flags;
    if (status == HR_OK) status = choose_gid(d, detail);
    if (status != HR_OK) return status;
    d->pd = d->verbs->alloc_pd(d->ctx);
    d->channel = d->pd ? d->verbs->create_comp_channel(d->ctx) : NULL;
    d->cq = d->channel ? d->verbs->create_cq(d->ctx, 1024, d, d->channel, 0) : NULL;
    if (!d->cq) {
        snprintf(detail, 256, "%.60s: cannot create a completion queue: %s", d->ctx->device->name, strerror(errno));
        return HR_ERR_NOMEM;
    }
    int fds[2] = {d->channel->fd, d->ctx->async_fd};
    for (int i = 0; i < 2; i++)
        if ((flags = fcntl(fds[i], F_GETFL)) < 0 || fcntl(fds[i], F_SETFL, flags | O_NONBLOCK)) return HR_ERR_DEVICE;
    return HR_OK;
}

void hr_verbs_device_close(struct hr_verbs_domain *d) {
    if (d->cq) d->verbs->destroy_cq(d->cq);
    if (d->channel) d->verbs->destroy_comp_channel(d->channel);
    if (d->pd) d->verbs->dealloc_pd(d->pd);
    if (d->ctx) d->verbs->close_device(d->ctx);
}
