/* device.c - which device: what was named, or the nearest real one with an active port. */

/*
 * A device is named "mlx5_0", "mlx5_0:2" with its port, by a pattern ("mlx5_*"), or several of these with commas
 * between, best first. Without a name software devices (soft-RoCE, soft-iWARP) are passed over: tcp is faster than they
 * are. "sim" and "sim2" are simulated, and never found by a pattern.
 *
 * Of several that a name finds it is the one nearest to the processor that asks, by NUMA distance; then the one with
 * the larger MTU; then the first. A device all of whose GIDs HRDMA_IFNAME excludes is passed over (paths.c).
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "providers/verbs/verbs.h"

#define SYSFS "/sys/class/infiniband"

/* As the kernel's drivers report themselves. */
static const uint32_t software_vendors[] = {0x000000, 0xffffff, 0x626d74};

static int is_software(const struct ibv_device_attr *attr) {
    for (size_t i = 0; i < sizeof software_vendors / sizeof software_vendors[0]; i++)
        if (attr->vendor_id == software_vendors[i]) return 1;
    return 0;
}

int hr_verbs_driverless(const char *folder, struct ibv_device **list, int n, char name[64]) {
    DIR *dir = opendir(folder);
    int found = 0;
    for (struct dirent *entry; dir && !found && (entry = readdir(dir));) {
        int listed = *entry->d_name == '.';
        for (int i = 0; i < n; i++) listed |= strcmp(list[i]->name, entry->d_name) == 0;
        if (listed) continue;
        snprintf(name, 64, "%.63s", entry->d_name);
        found = 1;
    }
    if (dir) closedir(dir);
    return found;
}

int hr_verbs_device_count(const char **why_p) {
    const struct hr_verbs_backend *verbs = hr_verbs_lib(why_p);
    struct ibv_device **list;
    int n = 0, found = 0;
    char name[64];
    if (!verbs) return 0;
    list = verbs->get_device_list(&n);
    *why_p = "no RDMA device: `rdma link` lists them (package iproute2)";
    if (!n && hr_verbs_driverless(SYSFS, list, n, name))
        *why_p = "libibverbs has no driver for the RDMA device of this host: apt install ibverbs-providers";
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

/* One that would do. */
struct candidate {
    struct ibv_context *ctx;
    struct ibv_device_attr attr;
    struct hr_verbs_paths paths;
    int distance;
};

/* Why a device is not taken. Of several that are not, the reason that weighs most is told. */
enum refusal { TAKEN, SOFTWARE, UNFIT, WRONG_WISH };

static void tell(enum refusal why, const char *text, enum refusal *told, char detail[256]) {
    if (why < *told) return;
    *told = why;
    snprintf(detail, 256, "%s", text);
}

/* Opens it; or says in text why it will not do. */
static enum refusal try_device(const struct hr_verbs_domain *d, struct ibv_device *device, int any, struct candidate *c,
                               char text[256]) {
    enum refusal why = UNFIT;
    unsigned node = 0;
    c->ctx = d->verbs->open_device(device);
    if (!c->ctx) {
        snprintf(text, 256, "cannot open %.60s: %s%s", device->name, strerror(errno),
                 d->is_sim ? "" : " (access to /dev/infiniband, and its driver: apt install ibverbs-providers)");
        return why;
    }
    if (d->verbs->query_device(c->ctx, &c->attr)) {
        snprintf(text, 256, "%.60s cannot be asked for its properties", device->name);
    } else if (any && is_software(&c->attr)) {
        snprintf(text, 256, "%.60s is a software device, to which tcp is preferred: HRDMA_DEVICES=%.60s takes it",
                 device->name, device->name);
        why = SOFTWARE;
    } else {
        hr_status status = hr_verbs_paths_scan(&d->wish, d->verbs, c->ctx, c->attr.phys_port_cnt, &c->paths, text);
        why = status == HR_OK ? TAKEN : status == HR_ERR_INVALID ? WRONG_WISH : UNFIT;
    }
    getcpu(NULL, &node);
    c->distance = hr_verbs_numa_distance(device, node);
    if (why) d->verbs->close_device(c->ctx);
    return why;
}

static int better(const struct candidate *a, const struct candidate *b) {
    if (a->distance != b->distance) return a->distance < b->distance;
    return a->paths.list[0].mtu > b->paths.list[0].mtu;
}

/* The best that one name, or none, finds, if any. */
static void find(struct hr_verbs_domain *d, const char *item, enum refusal *told, char detail[256]) {
    int n = 0, found = 0;
    char driverless[64], text[256];
    struct candidate best = {0}, c;
    struct ibv_device **list = d->verbs->get_device_list(&n);
    for (int i = 0; list && i < n; i++) {
        if (item && !named(item, list[i]->name, &d->wish.port)) continue;
        enum refusal why = try_device(d, list[i], !item, &c, text);
        if (why) {
            tell(why, text, told, detail);
            continue;
        }
        if (found++ && !better(&c, &best)) {
            d->verbs->close_device(c.ctx);
            continue;
        }
        if (best.ctx) d->verbs->close_device(best.ctx);
        best = c;
    }
    if (!found && *told < UNFIT && !d->is_sim && hr_verbs_driverless(SYSFS, list, n, driverless) &&
        (!item || named(item, driverless, &d->wish.port))) {
        snprintf(text, 256, "libibverbs has no driver for %s: apt install ibverbs-providers", driverless);
        tell(UNFIT, text, told, detail);
    }
    if (list) d->verbs->free_device_list(list);
    if (!found) return;
    d->ctx = best.ctx;
    d->attr = best.attr;
    d->paths = best.paths;
    if (found > 1)
        snprintf(d->reason, sizeof d->reason, "best of %d devices, NUMA distance %d", found, best.distance);
    else
        snprintf(d->reason, sizeof d->reason, "%s",
                 item    ? "named"
                 : n > 1 ? "the only one that will do"
                         : "the only device");
}

static hr_status open_named(struct hr_verbs_domain *d, const char *device, char detail[256]) {
    const char *why = NULL;
    char *copy = strdup(device ? device : ""), *rest = NULL;
    enum refusal told = TAKEN;
    if (!copy) return HR_ERR_NOMEM;
    int any = !device || strcmp(device, "*") == 0;
    snprintf(detail, 256, "no RDMA device is %s%.100s%shere: `rdma link` lists them", any ? "" : "called ",
             any ? "" : device, any ? "" : " ");
    for (char *item = device ? strtok_r(copy, ",", &rest) : copy; item && !d->ctx; item = strtok_r(NULL, ",", &rest)) {
        size_t len = strcspn(item, ":");
        d->is_sim = (len == 3 || len == 4) && strncmp(item, "sim2", len) == 0;
        d->verbs = d->is_sim ? &hr_verbs_sim : hr_verbs_lib(&why);
        if (d->verbs)
            find(d, device ? item : NULL, &told, detail);
        else
            tell(UNFIT, why, &told, detail);
        if (!device) break;
    }
    free(copy);
    return d->ctx ? HR_OK : told == WRONG_WISH ? HR_ERR_INVALID : HR_ERR_NO_DEVICE;
}

hr_status hr_verbs_device_open(struct hr_verbs_domain *d, const char *device, char detail[256]) {
    hr_status status = open_named(d, device && *device ? device : NULL, detail);
    char limit[120];
    int flags;
    if (status != HR_OK) return status;
    d->pd = d->verbs->alloc_pd(d->ctx);
    d->channel = d->pd ? d->verbs->create_comp_channel(d->ctx) : NULL;
    d->cq = d->channel ? d->verbs->create_cq(d->ctx, 1024, d, d->channel, 0) : NULL;
    if (!d->cq) {
        int error = errno;
        snprintf(detail, 256, "%.60s: cannot create a completion queue: %s%s", d->ctx->device->name, strerror(error),
                 hr_verbs_memlock_text(error, limit));
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
