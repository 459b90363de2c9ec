/* tcp.c - the tcp provider: its vtable, its options, opening and closing of a domain. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "hr/cores.h"
#include "providers/tcp/tcp.h"

/* One more copy costs less than the round trip of a rendezvous up to here. 4 KiB more than a power of two, as the last
 * block of a vector has what the others leave (topo/layout.py). */
#define EAGER_MAX HR_TCP_MAX_SEND
#define EAGER_LOOSE \
    (68u << 10)            /* ranks that share cores run ahead of one another, and what they send must be put aside */
#define SEGMENT (2u << 20) /* larger ones gain nothing */
#define PIECE 130816       /* with its headers two segments of loopback, which are 65483 bytes */
#define CREDIT (4u << 20)  /* with less, streams of short messages are announced, as the receiver is a turn behind */
#define FIRST_WINDOW (64u << 10) /* the bound that the slowest links get as well */
#define MAX_STREAMS 4            /* lanes of a connection in the engine */

static int device_count(const char **why_p) {
    struct hr_iface *list;
    int n = hr_ifaces_scan(&list);
    if (n >= 0) free(list);
    if (n > 0) return 1;
    *why_p = n < 0 ? "the kernel does not list its interfaces" : "no network interface is up: ip link set lo up";
    return 0;
}

/* A positive whole number with K, M or G; -1 when it is none or too large for an int. */
static long parse_number(const char *text) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (end == text || errno || value <= 0) return -1;
    int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    if (shift) end++;
    return *end || value > (0x7fffffffL >> shift) ? -1 : value << shift;
}

static hr_status parse_option(struct hr_tcp_options *opt, const char *key, const char *value, char detail[256]) {
    long number = parse_number(value);
    if (strcmp(key, "cc") == 0) {
        if (!*value || strlen(value) >= sizeof opt->cc) {
            snprintf(detail, 256, "tcp option cc=%.100s: auto, system, or the name of a congestion control", value);
            return HR_ERR_INVALID;
        }
        strcpy(opt->cc, value);
        return HR_OK;
    }
    if (strcmp(key, "streams") == 0) { /* for whoever connects: each connection is one endpoint here */
        if (number > 0 && number <= MAX_STREAMS) return HR_OK;
        snprintf(detail, 256, "tcp option streams=%.100s: connections to each peer, 1 to %d", value, MAX_STREAMS);
        return HR_ERR_INVALID;
    }
    int is_buffer = strcmp(key, "sndbuf") == 0 || strcmp(key, "rcvbuf") == 0;
    if (!is_buffer && strcmp(key, "user_timeout")) {
        snprintf(detail, 256, "tcp has no option '%.100s'; it has cc, sndbuf, rcvbuf, streams, user_timeout", key);
        return HR_ERR_INVALID;
    }
    if (number < 0 || (!is_buffer && number > 86400)) {
        snprintf(detail, 256, "tcp option %s=%.100s: %s", key, value,
                 is_buffer ? "a size in bytes such as 4M" : "seconds, 1 to 86400");
        return HR_ERR_INVALID;
    }
    if (!is_buffer)
        opt->user_timeout = (unsigned)number;
    else
        *(*key == 's' ? &opt->sndbuf : &opt->rcvbuf) = (int)number;
    return HR_OK;
}

static hr_status parse_options(struct hr_tcp_options *opt, const char *text, char detail[256]) {
    *opt = (struct hr_tcp_options){.cc = "auto", .user_timeout = 60};
    if (!text || !*text) return HR_OK;
    char *copy = strdup(text), *rest = NULL;
    hr_status status = copy ? HR_OK : HR_ERR_NOMEM;
    for (char *item = copy ? strtok_r(copy, ",", &rest) : NULL; item && !status; item = strtok_r(NULL, ",", &rest)) {
        char *equals = strchr(item, '=');
        if (equals) *equals = 0;
        status = parse_option(opt, item, equals ? equals + 1 : "", detail);
    }
    free(copy);
    return status;
}

static void domain_close(struct hr_domain *domain) {
    struct hr_tcp_domain *d = (struct hr_tcp_domain *)domain;
    hr_door_close(&d->door);
    hr_tcp_unwatch(d, &d->timer);
    hr_tcp_unwatch(d, &d->wake);
    if (d->poll.fd >= 0) close(d->poll.fd);
    free(d->ifaces);
    free(d->regions);
    free(d->scratch);
    free(d);
}

static hr_status open_parts(struct hr_tcp_domain *d, const struct hr_domain_params *params, char detail[256]) {
    hr_status status = parse_options(&d->opt, params->options, detail);
    if (!status) status = hr_tcp_socket_resolve(d, detail);
    if (status) return status;
    d->nifaces = hr_ifaces_scan(&d->ifaces);
    if (d->nifaces < 0) {
        d->nifaces = 0;
        snprintf(detail, 256, "cannot list network interfaces: %s", strerror(errno));
        return HR_ERR_DEVICE;
    }
    if ((status = hr_ifaces_choose(d->ifaces, d->nifaces, params->ifname, detail))) return status;
    d->host_id = hr_tcp_host_id();
    d->scratch = malloc(HR_TCP_SCRATCH);
    d->poll.fd = epoll_create1(EPOLL_CLOEXEC);
    d->timer.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    d->wake.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (!d->scratch || d->poll.fd < 0 || d->timer.fd < 0 || d->wake.fd < 0 ||
        hr_poll_watch(&d->poll, &d->timer, EPOLLIN) || hr_poll_watch(&d->poll, &d->wake, EPOLLIN)) {
        snprintf(detail, 256, "cannot set up the tcp domain: %s (open files: ulimit -n)", strerror(errno));
        return HR_ERR_NOMEM;
    }
    return hr_tcp_listen(d, detail);
}

static hr_status domain_open(const struct hr_provider *self, const struct hr_domain_params *params,
                             struct hr_domain **domain_p, char detail[256]) {
    if (params->device) {
        snprintf(detail, 256, "tcp has no devices; choose interfaces instead of device '%.100s'", params->device);
        return HR_ERR_INVALID;
    }
    struct hr_tcp_domain *d = calloc(1, sizeof *d);
    if (!d) {
        snprintf(detail, 256, "out of memory");
        return HR_ERR_NOMEM;
    }
    d->base = (struct hr_domain){.ops = self, .sink = params->sink, .owner = params->owner};
    d->base.caps = (struct hr_caps){
        .flags = HR_CAP_READ | HR_CAP_WRITE | HR_CAP_ATOMIC | HR_CAP_ANYMEM | HR_CAP_REVOKE | HR_CAP_HINTS,
        .max_send = HR_TCP_MAX_SEND,
        .eager_max = EAGER_MAX,
        .eager_loose = EAGER_LOOSE,
        .segment = SEGMENT,
        .piece = PIECE,
        .credit = CREDIT,
        .window = FIRST_WINDOW,
    };
    d->auth = params->auth;
    d->crowded = hr_crowded(params->local_peers);
    d->self_id = params->self_id;
    d->poll.fd = -1;
    d->timer = (struct hr_source){.kind = HR_TCP_TIMER, .fd = -1};
    d->wake = (struct hr_source){.kind = HR_TCP_WAKE, .fd = -1};
    hr_list_init(&d->eps);
    hr_list_init(&d->ready);
    hr_list_init(&d->door.callers);
    detail[0] = 0;
    hr_status status = open_parts(d, params, detail);
    if (status) {
        domain_close(&d->base);
        return status;
    }
    *domain_p = &d->base;
    return HR_OK;
}

static size_t domain_address(struct hr_domain *domain, void *addr) {
    return hr_tcp_address_write((struct hr_tcp_domain *)domain, addr);
}

static void domain_describe(struct hr_domain *domain, char *text, size_t size) {
    struct hr_tcp_domain *d = (struct hr_tcp_domain *)domain;
    char at[HR_SOCKADDR_TEXT];
    size_t used = 0;
    for (int i = 0; i < d->door.nlisteners && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s %s", i ? ", " : "", d->door.listeners[i].name,
                                 hr_sockaddr_text(&d->door.listeners[i].at, at));
    if (used < size)
        snprintf(text + used, size - used, "; congestion control: %s on this machine, %s to others",
                 *d->cc_local ? d->cc_local : "system", *d->cc_remote ? d->cc_remote : "system");
}

const struct hr_provider hr_provider_tcp = {
    .name = "tcp",
    .device_count = device_count,
    .domain_open = domain_open,
    .domain_close = domain_close,
    .domain_address = domain_address,
    .domain_describe = domain_describe,
    .mem_register = hr_tcp_mem_register,
    .mem_deregister = hr_tcp_mem_deregister,
    .mem_quiet = hr_tcp_mem_quiet,
    .mem_export = hr_tcp_mem_export,
    .mem_import = hr_tcp_mem_import,
    .mem_release = hr_tcp_mem_release,
    .ep_create = hr_tcp_ep_create,
    .ep_connect = hr_tcp_ep_connect,
    .ep_abort = hr_tcp_ep_abort,
    .ep_destroy = hr_tcp_ep_destroy,
    .ep_set_class = hr_tcp_ep_set_class,
    .ep_unsent = hr_tcp_ep_unsent,
    .post_send = hr_tcp_post_send,
    .post_write = hr_tcp_post_write,
    .post_read = hr_tcp_post_read,
    .post_atomic = hr_tcp_post_atomic,
    .post_put = hr_cannot_put,
    .cancel = hr_tcp_cancel,
    .progress = hr_tcp_progress,
    .event_fd = hr_tcp_event_fd,
    .event_arm = hr_tcp_event_arm,
    .event_disarm = hr_tcp_event_disarm,
};
