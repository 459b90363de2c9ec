/* device.c - which devices: what was named, or the nearest real ones with an active port. */

/*
 * A device is named "mlx5_0", "mlx5_0:2" with its port, by a pattern ("mlx5_*"), or several of these with commas
 * between, best first. Without a name software devices (soft-RoCE, soft-iWARP) are passed over: tcp is faster than they
 * are. Simulated ones ("sim", see sim.h) are never found by a pattern.
 *
 * All that will do are rails, RAILS at most: those that were named first; of those that one pattern, or none, finds the
 * nearest to the processor that asks, by NUMA distance, then those with the larger MTU; software beside real ones is
 * left. They keep the order in which they were found, which is the same on hosts that are alike: rails of two hosts are
 * paired by number. A simulated one is another each time that it is named.
 *
 * A name is a promise, a pattern is a question. What is named and not there is an error. What is there and will not do
 * now (its port is down, it does not open, HRDMA_IFNAME excludes all of its GIDs: paths.c) is left with a word to the
 * user, and its number stays free: the devices behind it keep theirs. A pattern passes over what will not do.
 */

#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "providers/verbs/sim.h"
#include "providers/verbs/verbs.h"

#define SYSFS "/sys/class/infiniband"

enum { COMPLETIONS = 1024 }; /* to begin with */

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

/* One entry of the list: "mlx5_0", "mlx5_0:2", "mlx5_*". */
struct name {
    const char *device; /* or a pattern; NULL: none is named */
    int port;           /* 0: any */
    int is_pattern;
};

/* Takes the text apart, in place. 0: what it says of a port is none. */
static int name_read(char *text, struct name *name_p, char detail[256]) {
    char *colon = strchr(text, ':'), *end = "";
    *name_p = (struct name){.device = text, .is_pattern = strpbrk(text, "*?[") != NULL};
    if (!colon) return 1;
    long port = isdigit((unsigned char)colon[1]) ? strtol(colon + 1, &end, 10) : 0;
    if (*end || port < 1 || port > UINT8_MAX) {
        snprintf(detail, 256, "HRDMA_DEVICES: %.100s names no port: '%.60s' is no number from 1 to 255", text,
                 colon + 1);
        return 0;
    }
    *colon = 0;
    name_p->port = (int)port;
    return 1;
}

/* Without the blanks around it. */
static char *trimmed(char *text) {
    text += strspn(text, " \t");
    size_t len = strlen(text);
    while (len && (text[len - 1] == ' ' || text[len - 1] == '\t')) len--;
    text[len] = 0;
    return text;
}

void hr_verbs_leave(char left[HR_LEFT], const char *name, const char *why) {
    size_t at = strlen(left);
    if (at + 40 < HR_LEFT) snprintf(left + at, HR_LEFT - at, "%s%.60s is not used: %.180s", at ? "; " : "", name, why);
}

/* Why a device is not taken. Of several that are not, the reason that weighs most is told. */
enum refusal { TAKEN, SOFTWARE, UNFIT, WRONG_WISH, ABSENT };

static void tell(enum refusal why, const char *text, enum refusal *told, char detail[256]) {
    if (why < *told) return;
    *told = why;
    snprintf(detail, 256, "%s", text);
}

/* What is asked of the devices, and what was found so far. */
struct search {
    const struct hr_verbs_backend *verbs;
    struct hr_verbs_wish wish;
    int is_sim;
    struct hr_verbs_found *found;
    int n;
    enum refusal told;
    char *left, *detail; /* what is done without; why there is none */
};

static void give_up(struct hr_verbs_found *found) {
    if (found->ctx) found->verbs->close_device(found->ctx);
    found->ctx = NULL;
}

/* Opens it; or says in text why it will not do. */
static enum refusal try_device(const struct search *s, struct ibv_device *device, int any, struct hr_verbs_found *found,
                               char text[256]) {
    enum refusal why = UNFIT;
    unsigned node = 0;
    *found = (struct hr_verbs_found){.verbs = s->verbs, .is_sim = s->is_sim, .wish = s->wish};
    found->ctx = s->verbs->open_device(device);
    if (!found->ctx) {
        snprintf(text, 256, "cannot open %.60s: %s%s", device->name, strerror(errno),
                 s->is_sim ? "" : " (access to /dev/infiniband, and its driver: apt install ibverbs-providers)");
        return why;
    }
    if (s->verbs->query_device(found->ctx, &found->attr)) {
        snprintf(text, 256, "%.60s cannot be asked for its properties", device->name);
    } else if (s->wish.port > found->attr.phys_port_cnt) {
        snprintf(text, 256, "%.60s has no port %d: it has %d", device->name, s->wish.port, found->attr.phys_port_cnt);
        why = ABSENT;
    } else if ((found->software = is_software(&found->attr)) && any) {
        snprintf(text, 256, "%.60s is a software device, to which tcp is preferred: HRDMA_DEVICES=%.60s takes it",
                 device->name, device->name);
        why = SOFTWARE;
    } else {
        hr_status status =
            hr_verbs_paths_scan(&found->wish, s->verbs, found->ctx, found->attr.phys_port_cnt, &found->paths, text);
        why = status == HR_OK ? TAKEN : status == HR_ERR_INVALID ? WRONG_WISH : UNFIT;
    }
    getcpu(NULL, &node);
    found->distance = hr_verbs_numa_distance(device, node);
    if (why) give_up(found);
    return why;
}

int hr_verbs_nearer(const struct hr_verbs_found *a, const struct hr_verbs_found *b) {
    if (a->software != b->software) return b->software;
    if (a->distance != b->distance) return a->distance < b->distance;
    return a->paths.list[0].mtu > b->paths.list[0].mtu;
}

static int taken(const struct search *s, const struct ibv_device *device) {
    for (int i = 0; i < s->n && !s->is_sim; i++) {
        const struct hr_verbs_found *have = &s->found[i];
        int port = have->wish.port;
        if (have->ctx && strcmp(have->ctx->device->name, device->name) == 0 &&
            (!port || !s->wish.port || port == s->wish.port))
            return 1;
    }
    return 0;
}

/* One more; where there are too many, the farthest of those of this name, which are those from `first` on, goes. */
static void keep(struct search *s, int first, const struct hr_verbs_found *one) {
    int worst = s->n;
    s->found[s->n++] = *one;
    if (s->n <= HR_VERBS_RAILS) return;
    for (int i = s->n - 1; i >= first; i--)
        if (hr_verbs_nearer(&s->found[worst], &s->found[i])) worst = i;
    give_up(&s->found[worst]);
    memmove(&s->found[worst], &s->found[worst + 1], (size_t)(s->n - worst - 1) * sizeof *one);
    s->n--;
}

/* Software devices that a pattern finds beside real ones would only hold these back. */
static void drop_software(struct search *s, int first) {
    int real = 0, n = first;
    for (int i = first; i < s->n; i++) real |= !s->found[i].software;
    for (int i = first; i < s->n; i++)
        if (real && s->found[i].software)
            give_up(&s->found[i]);
        else
            s->found[n++] = s->found[i];
    s->n = n;
}

/* The device of that name. One that is there and will not do is left, and so is its number; one that is not there, or
 * has no such port, is an error: a typing mistake is not to cost a rail. */
static hr_status find_one(struct search *s, const struct name *name) {
    int n = 0, full = s->n == HR_VERBS_RAILS;
    char text[256], path[400];
    struct hr_verbs_found one;
    struct ibv_device **list = s->verbs->get_device_list(&n), *device = NULL;
    for (int i = 0; list && i < n; i++)
        if (strcmp(list[i]->name, name->device) == 0) device = list[i];
    enum refusal why = ABSENT;
    snprintf(path, sizeof path, SYSFS "/%.300s", name->device);
    snprintf(text, 256, "no RDMA device is called %.100s here: `rdma link` lists them", name->device);
    if (device && taken(s, device)) {
        snprintf(text, 256, "it is taken already");
        why = UNFIT;
    } else if (device) {
        why = try_device(s, device, 0, &one, text);
    } else if (*name->device && access(path, F_OK) == 0) {
        snprintf(text, 256, "libibverbs has no driver for %.60s: apt install ibverbs-providers", name->device);
    }
    if (list) s->verbs->free_device_list(list);
    if (why != TAKEN) tell(why, text, &s->told, s->detail);
    if (why == ABSENT) return HR_ERR_NO_DEVICE;
    if (full && why == TAKEN) {
        give_up(&one);
        snprintf(text, 256, "%d devices are the most", HR_VERBS_RAILS);
    }
    if (full || why != TAKEN) hr_verbs_leave(s->left, name->device, text);
    if (full) return HR_OK;
    if (why != TAKEN) one = (struct hr_verbs_found){.verbs = s->verbs};
    snprintf(one.reason, sizeof one.reason, "named");
    s->found[s->n++] = one;
    return HR_OK;
}

static void why_found(struct hr_verbs_found *one, const char *pattern, int only, int fit) {
    char by[40] = "", of[20] = "";
    if (pattern) snprintf(by, sizeof by, " by %.30s", pattern);
    if (fit > HR_VERBS_RAILS) snprintf(of, sizeof of, " of %d", fit);
    if (only && !pattern)
        snprintf(one->reason, sizeof one->reason, "the only device");
    else
        snprintf(one->reason, sizeof one->reason, "%s%s%s, NUMA distance %d", *of ? "nearest" : "found", of, by,
                 one->distance);
}

/* What a pattern finds, or who names none: those that will do. */
static void find_all(struct search *s, const struct name *name) {
    int n = 0, first = s->n, fit = 0, had = 0;
    char driverless[64], text[256], what[256];
    enum refusal worst = TAKEN;
    struct hr_verbs_found one;
    struct ibv_device **list = s->verbs->get_device_list(&n);
    const char *pattern = name->device ? name->device : "*";
    snprintf(what, sizeof what, "%s", s->detail);
    if (name->device && strcmp(pattern, "*") == 0) /* as who requires verbs and names none */
        snprintf(what, sizeof what,
                 "there is no RDMA device here: `hrdma rxe up` makes one, where the kernel has that");
    else if (name->device)
        snprintf(what, sizeof what, "no RDMA device is called %.100s here: `rdma link` lists them", pattern);
    for (int i = 0; list && i < n; i++) {
        if (fnmatch(pattern, list[i]->name, 0)) continue;
        if (taken(s, list[i])) {
            had++;
            continue;
        }
        enum refusal why = try_device(s, list[i], !name->device, &one, text);
        if (why) {
            tell(why == ABSENT ? UNFIT : why, text, &worst, what);
            continue;
        }
        fit++;
        keep(s, first, &one);
    }
    if (!fit && worst < UNFIT && hr_verbs_driverless(SYSFS, list, n, driverless) && !fnmatch(pattern, driverless, 0)) {
        snprintf(text, 256, "libibverbs has no driver for %s: apt install ibverbs-providers", driverless);
        tell(UNFIT, text, &worst, what);
    }
    if (list) s->verbs->free_device_list(list);
    drop_software(s, first);
    for (int i = first; i < s->n; i++) why_found(&s->found[i], name->device, n == 1, fit);
    if (fit || had) return;
    tell(worst, what, &s->told, s->detail);
    if (name->device) hr_verbs_leave(s->left, pattern, what);
}

static hr_status find(struct search *s, const struct name *name) {
    const char *why = NULL;
    s->is_sim = name->device && hr_verbs_sim_named(name->device);
    s->verbs = s->is_sim ? &hr_verbs_sim : hr_verbs_lib(&why);
    s->wish.port = name->port;
    if (s->verbs && name->device && !name->is_pattern) return find_one(s, name);
    if (s->verbs) {
        if (s->n < HR_VERBS_RAILS) find_all(s, name);
        return HR_OK;
    }
    char text[256];
    const char *called = name->device && strcmp(name->device, "*") ? name->device : NULL;
    snprintf(text, sizeof text, "%s%.60s%s%s", called ? "no RDMA device is called " : "", called ? called : "",
             called ? ": " : "", why);
    tell(name->device && !name->is_pattern ? ABSENT : UNFIT, text, &s->told, s->detail);
    if (name->device && !name->is_pattern) return HR_ERR_NO_DEVICE;
    if (name->device) hr_verbs_leave(s->left, name->device, why);
    return HR_OK;
}

hr_status hr_verbs_devices_find(const struct hr_verbs_wish *wish, const char *device,
                                struct hr_verbs_found found[HR_VERBS_RAILS + 1], int *n_p, char left[HR_LEFT],
                                char detail[256]) {
    struct search s = {.wish = *wish, .found = found, .told = TAKEN, .left = left, .detail = detail};
    struct name name = {NULL, 0, 0};
    hr_status status = HR_OK;
    device = device && *device ? device : NULL;
    char *copy = strdup(device ? device : ""), *rest = NULL;
    if (!copy) return HR_ERR_NOMEM;
    int any = !device || strcmp(device, "*") == 0, usable = 0;
    left[0] = 0;
    snprintf(detail, 256, "no RDMA device is %s%.100s%shere: `rdma link` lists them", any ? "" : "called ",
             any ? "" : device, any ? "" : " ");
    if (!device) status = find(&s, &name);
    for (char *item = device ? strtok_r(copy, ",", &rest) : NULL; item && status == HR_OK;
         item = strtok_r(NULL, ",", &rest)) {
        if (!*(item = trimmed(item))) continue;
        status = name_read(item, &name, detail) ? find(&s, &name) : HR_ERR_INVALID;
    }
    free(copy);
    for (int i = 0; i < s.n; i++) usable += s.found[i].ctx != NULL;
    if (status == HR_OK && !usable) status = s.told == WRONG_WISH ? HR_ERR_INVALID : HR_ERR_NO_DEVICE;
    for (int i = 0; i < s.n && status != HR_OK; i++) give_up(&s.found[i]);
    *n_p = status == HR_OK ? s.n : 0;
    return status;
}

hr_status hr_verbs_device_spare(const struct hr_verbs_wish *wish, const struct hr_verbs_found *rails, int n,
                                struct hr_verbs_found *found, char detail[256]) {
    *found = (struct hr_verbs_found){.verbs = &hr_verbs_sim, .is_tcp = 1, .software = 1, .wish = {.gid = -1}};
    found->ctx = hr_verbs_sim_tcp();
    if (!found->ctx) {
        snprintf(detail, 256, "the rail over tcp: %s", strerror(errno));
        return HR_ERR_NOMEM;
    }
    found->wish.ifname = wish->ifname;
    found->verbs->query_device(found->ctx, &found->attr);
    snprintf(found->reason, sizeof found->reason, "to fall back on");
    for (int i = 0, at = 0; i < n; i++)
        for (int k = 0; k < rails[i].paths.n; k++)
            memcpy(found->behind[at++], rails[i].paths.list[k].ndev, sizeof found->behind[0]);
    hr_status status = hr_verbs_paths_scan(&found->wish, found->verbs, found->ctx, 1, &found->paths, detail);
    if (status != HR_OK) give_up(found);
    return status;
}

hr_status hr_verbs_device_open(struct hr_verbs_domain *d, char detail[256]) {
    char limit[120];
    int flags;
    d->pd = d->verbs->alloc_pd(d->ctx);
    d->channel = d->pd ? d->verbs->create_comp_channel(d->ctx) : NULL;
    d->cq = d->channel ? d->verbs->create_cq(d->ctx, COMPLETIONS, d, d->channel, 0) : NULL;
    if (!d->cq) {
        int error = errno;
        snprintf(detail, 256, "%.60s: cannot create a completion queue of %d entries: %.60s%s", d->ctx->device->name,
                 COMPLETIONS, strerror(error), hr_verbs_memlock_text(error, limit));
        return HR_ERR_NOMEM;
    }
    int fds[2] = {d->channel->fd, d->ctx->async_fd};
    for (int i = 0; i < 2; i++)
        if ((flags = fcntl(fds[i], F_GETFL)) < 0 || fcntl(fds[i], F_SETFL, flags | O_NONBLOCK)) return HR_ERR_DEVICE;
    return HR_OK;
}

void hr_verbs_device_close(struct hr_verbs_domain *d) {
    hr_poll_forget(&d->poll, &d->comp); /* the device's own descriptors */
    hr_poll_forget(&d->poll, &d->async);
    hr_verbs_unwatch(d, &d->removed);
    hr_verbs_mem_close(d);
    if (d->cq) d->verbs->destroy_cq(d->cq);
    if (d->channel) d->verbs->destroy_comp_channel(d->channel);
    if (d->pd) d->verbs->dealloc_pd(d->pd);
    if (d->ctx) d->verbs->close_device(d->ctx);
    d->cq = NULL;
    d->channel = NULL;
    d->pd = NULL;
    d->ctx = NULL;
    d->stash_at = d->stashed = 0;
}

int hr_verbs_device_idle(const struct hr_verbs_domain *d) {
    for (const struct hr_link *l = d->eps.next; l != &d->eps; l = l->next) {
        const struct hr_verbs_ep *ep = hr_container(l, struct hr_verbs_ep, link);
        if (ep->state != HR_VERBS_NEW && ep->state != HR_VERBS_CLOSED) return 0;
    }
    return 1;
}
