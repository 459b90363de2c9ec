/* domain.c - the table of the shared-memory provider, and its domain: options, address, opening and closing. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hr/cores.h"
#include "providers/shm/address.h"
#include "providers/shm/shm.h"

#define EAGER (32u << 10)        /* what is longer is read in place, or begins to arrive while the rest is copied */
#define EAGER_CROWDED (4u << 10) /* of arenas where ranks share cores: what is read in place is not copied twice */
#define EAGER_SAME (16u << 10)   /* the same of what goes to several peers: one copy serves all */
#define PIECE (128u << 10)       /* of what was asked for: one is read while the next is written */

int hr_shm_grow(void *array_p, uint32_t n, uint32_t *cap_p, size_t element) {
    void *array;
    uint32_t cap = *cap_p ? 2 * *cap_p : 8;
    if (n < *cap_p) return 1;
    memcpy(&array, array_p, sizeof array);
    array = realloc(array, cap * element);
    if (!array) return 0;
    memcpy(array_p, &array, sizeof array);
    *cap_p = cap;
    return 1;
}

int hr_shm_watch(struct shm_domain *dom, int fd, struct shm_watch *watch, enum shm_source source, void *owner) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = watch};
    if (source == SHM_ON_WAKE) event.events |= EPOLLET; /* never read: each write is an event of its own */
    if (source == SHM_ON_SOCKET) event.events |= EPOLLRDHUP;
    *watch = (struct shm_watch){source, owner};
    return epoll_ctl(dom->epfd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static int device_count(const char **why_p) {
    (void)why_p;
    return 1;
}

/* The boot and the network namespace: two containers on one machine that have networks of their own are two hosts. */
static hr_status find_host(struct shm_domain *dom, const char *forced, char detail[256]) {
    static const char path[] = "/proc/sys/kernel/random/boot_id";
    char text[128] = "";
    uint8_t digest[32];
    struct stat st;
    FILE *file = forced ? NULL : fopen(path, "re");
    int ok = forced || (file && fgets(text, 64, file) && stat("/proc/self/ns/net", &st) == 0);
    if (file) fclose(file);
    if (!ok) {
        snprintf(detail, 256, "cannot tell which host this is from %s: %s; set HRDMA_HOST_ID", path, strerror(errno));
        return HR_ERR_NO_DEVICE;
    }
    if (!forced) sprintf(text + strlen(text), " %llu", (unsigned long long)st.st_ino);
    hr_sha256(forced ? forced : text, strlen(forced ? forced : text), digest);
    memcpy(dom->host, digest, sizeof dom->host);
    return HR_OK;
}

struct options {
    char host[128];
    uint64_t ring;
    int cma;
};

static int option_take(struct options *o, const char *key, const char *value) {
    char *end;
    if (!strcmp(key, "host")) return snprintf(o->host, sizeof o->host, "%s", value) < (int)sizeof o->host && *value;
    if (!strcmp(key, "cma") && (!strcmp(value, "0") || !strcmp(value, "1"))) {
        o->cma = *value == '1';
        return 1;
    }
    if (strcmp(key, "ring")) return 0;
    o->ring = strtoull(value, &end, 10);
    return *value && !*end && o->ring >= SHM_MIN_RING && o->ring <= SHM_MAX_RING && !(o->ring & (o->ring - 1));
}

static hr_status options_parse(struct options *o, const char *text, char detail[256]) {
    char copy[512], *save = NULL;
    if (!text) return HR_OK;
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy) {
        snprintf(detail, 256, "options of shm are longer than %zu bytes", sizeof copy - 1);
        return HR_ERR_INVALID;
    }
    for (char *item = strtok_r(copy, ",", &save); item; item = strtok_r(NULL, ",", &save)) {
        char *value = strchr(item, '=');
        if (value) *value++ = 0;
        if (value && option_take(o, item, value)) continue;
        snprintf(
            detail, 256,
            "shm: cannot take option '%.80s=%.80s'; there are ring=BYTES (a power of 2, %d to %d), cma=0|1, host=TEXT",
            item, value ? value : "", SHM_MIN_RING, SHM_MAX_RING);
        return HR_ERR_INVALID;
    }
    return HR_OK;
}

/* Two rings for each pair of local peers: their sum has to stay small beside the memory. Between two cores a ring is
 * best where it is longer than their second-level caches: a line that comes round again has left them, and to write
 * one that another core still holds takes several times as long. */
static uint64_t ring_for(int local_peers, int crowded) {
    if (local_peers <= 3) return crowded ? 1 << 20 : 2 << 20;
    return local_peers <= 8 ? 512 << 10 : local_peers <= 32 ? 256 << 10 : SHM_MIN_RING;
}

/* So that several are on their way. */
static uint32_t message_for(uint64_t ring) {
    uint64_t n = ring / 8;
    return n < SHM_SHORT ? SHM_SHORT : n > SHM_LONG ? SHM_LONG : (uint32_t)n;
}

static void domain_close(struct hr_domain *domain) {
    struct shm_domain *dom = shm_domain(domain);
    while (dom->calls) hr_shm_call_drop(dom, dom->calls);
    hr_shm_board_close(&dom->board);
    if (dom->listenfd >= 0) close(dom->listenfd);
    if (dom->wakefd >= 0) close(dom->wakefd);
    if (dom->epfd >= 0) close(dom->epfd);
    free(dom->live);
    free(dom->regions);
    free(dom);
}

static hr_status open_events(struct shm_domain *dom, char detail[256]) {
    dom->epfd = epoll_create1(EPOLL_CLOEXEC);
    dom->wakefd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (dom->epfd >= 0 && dom->wakefd >= 0 && hr_shm_watch(dom, dom->wakefd, &dom->on_wake, SHM_ON_WAKE, dom))
        return hr_shm_listen(dom, detail);
    snprintf(detail, 256, "cannot make an event descriptor: %s; more are allowed by ulimit -n", strerror(errno));
    return HR_ERR_IO;
}

static hr_status domain_open(const struct hr_provider *self, const struct hr_domain_params *params,
                             struct hr_domain **domain_p, char detail[256]) {
    struct shm_domain *dom = calloc(1, sizeof *dom);
    int crowded = hr_crowded(params->local_peers);
    struct options o = {.ring = ring_for(params->local_peers, crowded), .cma = 1};
    hr_status status;

    if (!dom) return HR_ERR_NOMEM;
    dom->base = (struct hr_domain){
        .ops = self,
        .sink = params->sink,
        .owner = params->owner,
        .caps = {.flags = HR_CAP_READ | HR_CAP_WRITE | HR_CAP_ATOMIC | HR_CAP_MAP | HR_CAP_MAP_WRITE | HR_CAP_ANYMEM |
                          HR_CAP_FILLS | HR_CAP_LOCAL,
                 .eager_mapped = crowded ? EAGER_CROWDED : EAGER,
                 .eager_same = crowded ? EAGER_SAME : EAGER,
                 .segment = 512 << 10,
                 .piece = PIECE,
                 .window = 0},
    };
    dom->epfd = dom->wakefd = dom->listenfd = -1;
    dom->auth = params->auth;
    dom->self_id = params->self_id;
    status = options_parse(&o, params->options, detail);
    dom->ring_size = o.ring;
    dom->cma_allowed = o.cma;
    if (!crowded) dom->base.caps.flags |= HR_CAP_RELAYS;
    if (o.cma) dom->base.caps.flags |= HR_CAP_PUT;
    dom->base.caps.max_send = message_for(o.ring);
    dom->base.caps.eager_max = EAGER;
    if (status == HR_OK) status = find_host(dom, o.host[0] ? o.host : NULL, detail);
    if (status == HR_OK && (getrandom(dom->name, sizeof dom->name, 0) != sizeof dom->name || !hr_shm_probe_made())) {
        snprintf(detail, 256, "getrandom: %s", strerror(errno));
        status = HR_ERR_IO;
    }
    if (status == HR_OK) status = open_events(dom, detail);
    if (status != HR_OK) {
        domain_close(&dom->base);
        return status;
    }
    *domain_p = &dom->base;
    return HR_OK;
}

static size_t domain_address(struct hr_domain *domain, void *addr) {
    struct shm_domain *dom = shm_domain(domain);
    struct shm_address a = {.version = SHM_ADDRESS_VERSION};
    memcpy(a.name, dom->name, sizeof a.name);
    memcpy(a.host, dom->host, sizeof a.host);
    memcpy(addr, &a, sizeof a);
    return sizeof a;
}

static void domain_describe(struct hr_domain *domain, char *text, size_t size) {
    struct shm_domain *dom = shm_domain(domain);
    char cma[96];
    if (!dom->cma_allowed)
        snprintf(cma, sizeof cma, "no process_vm_readv (cma=0)");
    else if (dom->cma_yes + dom->cma_no == 0)
        snprintf(cma, sizeof cma, "process_vm_readv where the kernel permits it");
    else
        snprintf(cma, sizeof cma, "process_vm_readv permitted to %u of %u peers", dom->cma_yes,
                 dom->cma_yes + dom->cma_no);
    snprintf(text, size, "shared memory: rings of %llu KiB, registered memory mapped, %s",
             (unsigned long long)dom->ring_size >> 10, cma);
}

static hr_status ep_set_class(struct hr_ep *ep, int dscp, int priority) {
    (void)ep, (void)dscp, (void)priority;
    return HR_ERR_UNSUPPORTED;
}

/* What is in the ring is in memory that the peer has already: it is delivered even if this process ends now. */
static uint64_t ep_unsent(struct hr_ep *ep) {
    struct shm_ep *e = shm_ep(ep);
    return e->pushing ? e->push.left : 0;
}

const struct hr_provider hr_provider_shm = {
    .name = "shm",
    .device_count = device_count,
    .domain_open = domain_open,
    .domain_close = domain_close,
    .domain_address = domain_address,
    .domain_describe = domain_describe,
    .mem_register = hr_shm_mem_register,
    .mem_deregister = hr_shm_mem_deregister,
    .mem_quiet = hr_shm_mem_quiet,
    .mem_export = hr_shm_mem_export,
    .mem_import = hr_shm_mem_import,
    .mem_release = hr_shm_mem_release,
    .ep_create = hr_shm_ep_create,
    .ep_connect = hr_shm_ep_connect,
    .ep_abort = hr_shm_ep_abort,
    .ep_destroy = hr_shm_ep_destroy,
    .ep_set_class = ep_set_class,
    .ep_unsent = ep_unsent,
    .post_send = hr_shm_post_send,
    .post_write = hr_shm_post_write,
    .post_read = hr_shm_post_read,
    .post_atomic = hr_shm_post_atomic,
    .post_put = hr_shm_post_put,
    .cancel = hr_shm_cancel,
    .progress = hr_shm_progress,
    .event_fd = hr_shm_event_fd,
    .event_arm = hr_shm_event_arm,
    .event_disarm = hr_shm_event_disarm,
};
