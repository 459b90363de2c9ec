/* verbs.c - the verbs provider: its vtable, its options, opening and closing of a domain. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "providers/verbs/bond.h"

#define SEGMENT (1u << 20)
#define FIRST_WINDOW (1u << 20) /* a link that has RDMA carries this in a fraction of a millisecond */
#define PIN (64u << 20)

/* A positive whole number with K, M or G; -1 when it is none. */
static int64_t parse_size(const char *text) {
    char *end;
    long long value = strtoll(text, &end, 10);
    int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    if (end == text || value < 0 || value > (INT64_MAX >> 31)) return -1;
    return end[shift ? 1 : 0] ? -1 : (int64_t)value << shift;
}

static hr_status parse_option(struct hr_verbs_options *options, const char *key, const char *value, char detail[256]) {
    int64_t size = parse_size(value);
    int known = hr_verbs_inject_option(&options->inject, key, value, detail);
    if (known) return known > 0 ? HR_OK : HR_ERR_INVALID;
    if (strcmp(key, "gid") == 0 && size >= 0 && size < 256) {
        options->wish.gid = (int)size;
        return HR_OK;
    }
    if (strcmp(key, "pin") == 0 && size >= 0) {
        options->pin = (uint64_t)size;
        return HR_OK;
    }
    if (strcmp(key, "ack_timeout") == 0 && size >= 8 && size <= 31) {
        options->ack_timeout = (int)size;
        return HR_OK;
    }
    if (strcmp(key, "silence") == 0) {
        double seconds = strtod(value, NULL);
        options->silence = seconds > 0 ? (int64_t)((seconds < 1e6 ? seconds : 1e6) * 1e9) : 0;
        return HR_OK;
    }
    if (strcmp(key, "fallback") == 0 && (strcmp(value, "tcp") == 0 || strcmp(value, "none") == 0)) {
        options->fallback = *value == 't';
        return HR_OK;
    }
    if (strcmp(key, "receives") == 0 && (strcmp(value, "shared") == 0 || strcmp(value, "own") == 0)) {
        options->own = *value == 'o';
        options->share = *value == 's';
        return HR_OK;
    }
    if (strcmp(key, "receives") == 0)
        snprintf(detail, 256, "verbs option receives=%.100s: shared or own", value);
    else if (strcmp(key, "fallback") == 0)
        snprintf(detail, 256, "verbs option fallback=%.100s: tcp or none", value);
    else if (strcmp(key, "ack_timeout") == 0)
        snprintf(detail, 256, "verbs option ack_timeout=%.100s: 8 to 31, the exponent of 4.096 us", value);
    else if (strcmp(key, "gid") == 0 || strcmp(key, "pin") == 0)
        snprintf(detail, 256, "verbs option %s=%.100s: %s", key, value,
                 *key == 'g' ? "an index of the port's GID table, 0 to 255" : "a size in bytes such as 64M");
    else
        snprintf(detail, 256,
                 "verbs has no option '%.60s'; it has gid, pin, ack_timeout, fallback, receives, wc_error, wc_status, "
                 "errno, reg_errno, deaf, narrow, fault_seed, fault_budget",
                 key);
    return HR_ERR_INVALID;
}

static hr_status parse_options(struct hr_verbs_options *options, const char *text, char detail[256]) {
    char *copy, *rest = NULL;
    hr_status status;
    if (!text || !*text) return HR_OK;
    copy = strdup(text);
    status = copy ? HR_OK : HR_ERR_NOMEM;
    for (char *item = copy ? strtok_r(copy, ",", &rest) : NULL; item && !status; item = strtok_r(NULL, ",", &rest)) {
        char *equals = strchr(item, '=');
        if (equals) *equals = 0;
        status = parse_option(options, item, equals ? equals + 1 : "", detail);
    }
    free(copy);
    return status;
}

static void domain_close(struct hr_domain *domain) {
    struct hr_verbs_domain *d = (struct hr_verbs_domain *)domain;
    hr_door_close(&d->door);
    hr_verbs_unwatch(d, &d->timer);
    hr_verbs_unwatch(d, &d->wake);
    hr_verbs_device_close(d);
    if (d->poll.fd >= 0) close(d->poll.fd);
    free(d->ifaces);
    free(d->ifname);
    free(d->stash);
    free(d);
}

static hr_status open_parts(struct hr_verbs_domain *d, char detail[256]) {
    hr_status status = hr_verbs_device_open(d, detail);
    if (status) return status;
    if ((d->nifaces = hr_ifaces_scan(&d->ifaces)) < 0) {
        d->nifaces = 0;
        snprintf(detail, 256, "cannot list network interfaces: %s", strerror(errno));
        return HR_ERR_DEVICE;
    }
    d->poll.fd = epoll_create1(EPOLL_CLOEXEC);
    d->timer.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    d->wake.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    d->comp.fd = d->channel->fd;
    d->async.fd = d->ctx->async_fd;
    if (d->poll.fd < 0 || d->timer.fd < 0 || d->wake.fd < 0 || hr_poll_watch(&d->poll, &d->timer, EPOLLIN) ||
        hr_poll_watch(&d->poll, &d->wake, EPOLLIN) || hr_poll_watch(&d->poll, &d->comp, EPOLLIN) ||
        hr_poll_watch(&d->poll, &d->async, EPOLLIN)) {
        snprintf(detail, 256, "cannot set up the verbs domain: %s (open files: ulimit -n)", strerror(errno));
        return HR_ERR_NOMEM;
    }
    if (d->verbs != &hr_verbs_sim) hr_verbs_removed_watch(d);
    return hr_verbs_listen(d, detail);
}

hr_status hr_verbs_domain_open(const struct hr_provider *self, const struct hr_domain_params *params,
                               const struct hr_verbs_options *options, const struct hr_verbs_found *found,
                               int addresses, struct hr_verbs_domain **d_p, char detail[256]) {
    struct hr_verbs_domain *d = calloc(1, sizeof *d);
    hr_status status = HR_OK;
    if (!d) {
        snprintf(detail, 256, "out of memory");
        found->verbs->close_device(found->ctx);
        return HR_ERR_NOMEM;
    }
    d->base = (struct hr_domain){.ops = self, .sink = params->sink, .owner = params->owner};
    d->auth = params->auth;
    d->self_id = params->self_id;
    d->verbs = found->verbs;
    d->keeps = hr_verbs_fork_safe(d->verbs) && !d->is_tcp;
    d->ctx = found->ctx;
    snprintf(d->name, sizeof d->name, "%.60s", found->ctx->device->name);
    d->attr = found->attr;
    d->paths = found->paths;
    d->is_sim = found->is_sim;
    d->is_tcp = found->is_tcp;
    d->software = found->software && !found->is_sim;
    memcpy(d->behind, found->behind, sizeof d->behind);
    memcpy(d->reason, found->reason, sizeof d->reason);
    d->wish = found->wish;
    d->addresses = addresses;
    d->pin = options->pin;
    d->silence = options->silence;
    d->ack_timeout = options->ack_timeout;
    d->inject = options->inject;
    d->shares = !options->own && found->attr.max_srq > 0 && found->attr.max_srq_wr >= HR_VERBS_RECVS + HR_VERBS_SPARE;
    d->alone_most = options->share ? 0 : HR_VERBS_ALONE;
    d->poll.fd = -1;
    d->timer = (struct hr_source){.kind = HR_VERBS_TIMER, .fd = -1};
    d->wake = (struct hr_source){.kind = HR_VERBS_WAKE, .fd = -1};
    d->comp = (struct hr_source){.kind = HR_VERBS_CHANNEL, .fd = -1};
    d->async = (struct hr_source){.kind = HR_VERBS_ASYNC, .fd = -1};
    d->removed = (struct hr_source){.kind = HR_VERBS_REMOVED, .fd = -1};
    hr_list_init(&d->eps);
    hr_list_init(&d->pools);
    hr_list_init(&d->ready);
    hr_list_init(&d->calls);
    hr_list_init(&d->door.callers);
    hr_list_init(&d->ending);
    d->wish.ifname = d->ifname = NULL;
    if (params->ifname && !(d->wish.ifname = d->ifname = strdup(params->ifname))) status = HR_ERR_NOMEM;
    if (!status) status = open_parts(d, detail);
    if (status) {
        domain_close(&d->base);
        return status;
    }
    d->base.caps = (struct hr_caps){
        .flags = HR_CAP_READ | HR_CAP_WRITE | HR_CAP_ANYMEM | HR_CAP_CONFIRMS | HR_CAP_PINS |
                 (d->attr.atomic_cap ? HR_CAP_ATOMIC : 0),
        .max_send = HR_VERBS_MESSAGE,
        .eager_max = HR_VERBS_MESSAGE,
        .segment = SEGMENT,
        .window = FIRST_WINDOW,
    };
    *d_p = d;
    return HR_OK;
}

static hr_status domain_open(const struct hr_provider *self, const struct hr_domain_params *params,
                             struct hr_domain **domain_p, char detail[256]) {
    struct hr_verbs_options options = {.wish = {.gid = -1, .ifname = params->ifname}, .pin = PIN};
    struct hr_verbs_found found[HR_VERBS_RAILS + 1];
    struct hr_verbs_domain *d;
    char left[HR_LEFT];
    int n = 0;
    detail[0] = 0;
    options.inject = (struct hr_verbs_inject){.status = IBV_WC_RETRY_EXC_ERR, .seed = 1, .budget = UINT64_MAX};
    hr_status status = parse_options(&options, params->options, detail);
    if (!status) status = hr_verbs_devices_find(&options.wish, params->device, found, &n, left, detail);
    if (status) return status;
    if (n > 1 || options.fallback) return hr_bond_open(params, &options, found, n, left, domain_p, detail);
    status = hr_verbs_domain_open(self, params, &options, found, HR_VERBS_ADDRESSES, &d, detail);
    if (status != HR_OK) return status;
    memcpy(d->base.left, left, sizeof left);
    *domain_p = &d->base;
    return HR_OK;
}

static size_t domain_address(struct hr_domain *domain, void *addr) {
    return hr_verbs_address_write((struct hr_verbs_domain *)domain, addr);
}

static void domain_describe(struct hr_domain *domain, char *text, size_t size) {
    struct hr_verbs_domain *d = (struct hr_verbs_domain *)domain;
    char path[160] = "no active port", at[HR_SOCKADDR_TEXT], counts[100], why[200] = "";
    int best = 0;
    if (!d->ctx) {
        snprintf(text, size, "%s is gone", d->name);
        return;
    }
    if (d->used.port || d->paths.n) hr_verbs_path_text(d->used.port ? &d->used : &d->paths.list[0], path);
    for (int i = 0; d->used.port && i < d->paths.n; i++)
        if (d->paths.list[i].port == d->used.port && d->paths.list[i].index == d->used.index) best = i;
    if (d->paths.n) hr_verbs_path_why(&d->wish, &d->paths, best, why);
    int n = snprintf(text, size, "%s, %s: %s, of %d; %s%s%s receives; %s%s", d->name, d->reason, path, d->paths.n, why,
                     *why ? "; " : "",
                     !d->shares      ? "own"
                     : d->alone_most ? "own, then shared"
                                     : "shared",
                     *d->fallback ? "left: " : "called at ",
                     *d->fallback ? d->fallback : hr_sockaddr_text(&d->door.listeners[0].at, at));
    int more = snprintf(counts, sizeof counts, "; %llu registrations, at most %.1f MB pinned outside arenas",
                        (unsigned long long)d->counts.registered, (double)d->counts.most * 1e-6);
    if (n + more < (int)size) memcpy(text + n, counts, (size_t)more + 1);
}

const struct hr_provider hr_provider_verbs = {
    .name = "verbs",
    .device_count = hr_verbs_device_count,
    .domain_open = domain_open,
    .domain_close = domain_close,
    .domain_address = domain_address,
    .domain_describe = domain_describe,
    .mem_register = hr_verbs_mem_register,
    .mem_deregister = hr_verbs_mem_deregister,
    .mem_quiet = hr_verbs_mem_quiet,
    .mem_export = hr_verbs_mem_export,
    .mem_import = hr_verbs_mem_import,
    .mem_release = hr_verbs_mem_release,
    .ep_create = hr_verbs_ep_create,
    .ep_connect = hr_verbs_ep_connect,
    .ep_abort = hr_verbs_ep_abort,
    .ep_destroy = hr_verbs_ep_destroy,
    .ep_set_class = hr_verbs_ep_set_class,
    .ep_unsent = hr_verbs_ep_unsent,
    .post_send = hr_verbs_post_send,
    .post_write = hr_verbs_post_write,
    .post_read = hr_verbs_post_read,
    .post_atomic = hr_verbs_post_atomic,
    .post_put = hr_cannot_put,
    .cancel = hr_verbs_cancel,
    .progress = hr_verbs_progress,
    .event_fd = hr_verbs_event_fd,
    .event_arm = hr_verbs_event_arm,
    .event_disarm = hr_verbs_event_disarm,
};
