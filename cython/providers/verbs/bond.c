/* bond.c - several rails as one domain: opening and closing, events on their way to the engine, progress, sleeping. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "providers/verbs/bond.h"

enum { LOOK_EVERY = 32 };
#define SECOND (1000 * HR_VERBS_MS)

/* Count, and per rail length, version, count, and addresses of family, port and 16 bytes: see address.c. */
_Static_assert(2 + HR_BOND_RAILS * (1 + 2 + HR_BOND_ADDRESSES * (1 + 2 + 16)) <= HR_MAX_ADDR, "fit into an address");

/* ---- what the rails tell ---- */

static struct hr_bond_lane *lane_of(const struct hr_ep *ep) { return ep->ctx; }

static void on_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    hr_bond_on_recv(lane_of(ep), hdr, hdr_len, payload, len);
}

static void on_done(struct hr_ep *ep, void *cookie, hr_status status) {
    struct hr_bond_lane *lane = lane_of(ep);
    struct hr_ep *base = &lane->bond->base;
    if (lane->bond->plain)
        base->domain->sink->done(base, cookie, status);
    else
        hr_bond_on_done(lane, cookie, status);
}

/* Among bonds notices are messages: the immediate data of a write would be told apart from them by lane only. */
static void on_notify(struct hr_ep *ep, uint64_t value, size_t nbytes) {
    struct hr_bond_ep *bond = lane_of(ep)->bond;
    if (bond->plain)
        bond->base.domain->sink->notify(&bond->base, value, nbytes);
    else
        hr_bond_fail(bond, HR_ERR_PROTOCOL, "the peer sent a notice that cannot be");
}

static void on_state(struct hr_ep *ep, hr_status status, const char *detail) {
    hr_bond_on_state(lane_of(ep), status, detail);
}

static void on_stranger(struct hr_domain *rail, const char *detail) {
    struct hr_domain *base = &((struct hr_bond *)rail->owner)->base;
    if (base->sink->stranger) base->sink->stranger(base, detail);
}

static const struct hr_sink rail_sink = {on_recv, on_done, on_notify, on_state, NULL, on_stranger};

/* ---- progress ---- */

void hr_bond_pending(struct hr_bond_ep *ep) {
    struct hr_bond *bond = hr_bond_of(&ep->base);
    if (hr_list_empty(&ep->pending)) hr_list_push(&bond->pending, &ep->pending);
    bond->again = 1;
    for (int i = 0; i < bond->n && !bond->in_progress; i++) /* somebody may be asleep who was told of nothing */
        if (bond->rails[i]) eventfd_write(bond->rails[i]->wake.fd, 1);
}

void hr_bond_room_again(struct hr_bond_ep *ep) {
    if (ep->refused) hr_bond_of(&ep->base)->again = 1;
    ep->refused = 0;
}

static void tick_set(struct hr_bond *bond, int64_t every) {
    if (every == bond->tick) return;
    struct timespec period = {.tv_sec = every / SECOND, .tv_nsec = every % SECOND};
    struct itimerspec spec = {.it_interval = period, .it_value = period};
    timerfd_settime(bond->timer, 0, &spec, NULL);
    bond->tick = every;
}

void hr_bond_tick_start(struct hr_bond *bond) { tick_set(bond, HR_BOND_TICK); }

static void tick(struct hr_bond *bond) {
    uint64_t count;
    int64_t now = hr_now(), next = INT64_MAX;
    if (read(bond->timer, &count, sizeof count) < 0) return;
    for (struct hr_link *l = bond->eps.next; l != &bond->eps; l = l->next) {
        int64_t due = hr_bond_tick(hr_container(l, struct hr_bond_ep, link), now);
        if (due < next) next = due;
    }
    tick_set(bond, next == INT64_MAX ? 0 : next - now > HR_BOND_TICK ? next - now : HR_BOND_TICK);
}

/* Each that is on the list now is served once; one that is put back waits for the next call. */
static int run_pending(struct hr_bond *bond, int budget) {
    struct hr_link *last = bond->pending.prev;
    int n = 0, end = hr_list_empty(&bond->pending);
    while (!end && n < budget && !hr_list_empty(&bond->pending)) {
        struct hr_link *l = bond->pending.next;
        end = l == last;
        n += hr_bond_run(hr_container(l, struct hr_bond_ep, pending), budget - n);
    }
    if (!end) bond->again = 1;
    return n;
}

static int progress(struct hr_domain *domain, int budget, struct hr_ep *hint) {
    struct hr_bond *bond = (struct hr_bond *)domain;
    int n = 0;
    (void)hint;
    bond->in_progress = 1;
    bond->again = 0;
    int first = (int)(bond->turn++ % (unsigned)bond->n); /* none is starved by the others */
    int all = bond->look || bond->on_spare || bond->turn % LOOK_EVERY == 0;
    for (int i = 0; i < bond->n && n < budget; i++) {
        int k = (first + i) % bond->n;
        struct hr_verbs_domain *rail = k == HR_BOND_SPARE && !all ? NULL : bond->rails[k]; /* to ask it costs more */
        if (rail) n += hr_verbs_progress(&rail->base, budget - n, NULL);
    }
    if (n < budget) n += run_pending(bond, budget - n);
    if (bond->look || bond->turn % LOOK_EVERY == 0) {
        bond->look = 0;
        if (bond->tick) tick(bond);
    }
    bond->in_progress = 0;
    return n;
}

/* ---- sleeping ---- */

static int event_fd(struct hr_domain *domain) { return ((struct hr_bond *)domain)->epfd; }

static hr_status event_arm(struct hr_domain *domain) {
    struct hr_bond *bond = (struct hr_bond *)domain;
    bond->look = 1;
    if (bond->again) {
        bond->again = 0; /* said once: what could not be done yet is tried again when a rail tells of something */
        return HR_AGAIN;
    }
    for (int i = 0; i < bond->n; i++)
        if (bond->rails[i] && hr_verbs_event_arm(&bond->rails[i]->base) != HR_OK) return HR_AGAIN;
    return HR_OK;
}

static void event_disarm(struct hr_domain *domain) {
    struct hr_bond *bond = (struct hr_bond *)domain;
    bond->look = 1;
    for (int i = 0; i < bond->n; i++)
        if (bond->rails[i]) hr_verbs_event_disarm(&bond->rails[i]->base);
}

/* ---- the domain ---- */

static void domain_close(struct hr_domain *domain) {
    struct hr_bond *bond = (struct hr_bond *)domain;
    for (int i = 0; i < bond->n; i++)
        if (bond->rails[i]) bond->rails[i]->base.ops->domain_close(&bond->rails[i]->base);
    if (bond->timer >= 0) close(bond->timer);
    if (bond->epfd >= 0) close(bond->epfd);
    free(bond);
}

static size_t domain_address(struct hr_domain *domain, void *addr) {
    struct hr_bond *bond = (struct hr_bond *)domain;
    memcpy(addr, bond->address, bond->address_len);
    return bond->address_len;
}

static void domain_describe(struct hr_domain *domain, char *text, size_t size) {
    struct hr_bond *bond = (struct hr_bond *)domain;
    int rails = bond->opened, shown = 0, ready = 0;
    for (struct hr_link *l = bond->eps.next; l != &bond->eps; l = l->next)
        ready |= hr_bond_lane_up(hr_container(l, struct hr_bond_ep, link), HR_BOND_SPARE);
    size_t at = (size_t)snprintf(text, size, "%d rail%s", rails, rails == 1 ? "" : "s");
    if (bond->counts.lost && at < size)
        at += (size_t)snprintf(text + at, size - at, " (%llu times lost, %llu used again)",
                               (unsigned long long)bond->counts.lost, (unsigned long long)bond->counts.back);
    if (bond->n > HR_BOND_SPARE && at < size)
        at += (size_t)snprintf(text + at, size - at, ", tcp %s (%llu times)",
                               bond->on_spare ? "instead"
                               : ready        ? "stands by"
                                              : "allowed",
                               (unsigned long long)bond->counts.fell);
    for (int i = 0; i < HR_VERBS_RAILS && at < size; i++) {
        char one[HR_ABOUT / HR_VERBS_RAILS];
        if (!bond->rails[i]) continue;
        bond->rails[i]->base.ops->domain_describe(&bond->rails[i]->base, one, sizeof one);
        at += (size_t)snprintf(text + at, size - at, "%s%.*s", shown++ ? "; " : ": ", (int)(size / (size_t)rails) - 12,
                               one);
    }
}

static const struct hr_provider bond_ops = {
    .name = "verbs",
    .device_count = hr_verbs_device_count,
    .domain_close = domain_close,
    .domain_address = domain_address,
    .domain_describe = domain_describe,
    .mem_register = hr_bond_mem_register,
    .mem_deregister = hr_bond_mem_deregister,
    .mem_quiet = hr_bond_mem_quiet,
    .mem_export = hr_bond_mem_export,
    .mem_import = hr_bond_mem_import,
    .mem_release = hr_bond_mem_release,
    .ep_create = hr_bond_ep_create,
    .ep_connect = hr_bond_ep_connect,
    .ep_abort = hr_bond_ep_abort,
    .ep_destroy = hr_bond_ep_destroy,
    .ep_set_class = hr_bond_ep_set_class,
    .ep_unsent = hr_bond_ep_unsent,
    .post_send = hr_bond_post_send,
    .post_write = hr_bond_post_write,
    .post_read = hr_bond_post_read,
    .post_atomic = hr_bond_post_atomic,
    .post_put = hr_cannot_put,
    .cancel = hr_bond_cancel,
    .progress = progress,
    .event_fd = event_fd,
    .event_arm = event_arm,
    .event_disarm = event_disarm,
};

/* All caps of a domain on one device, but that it can do only what all devices can, and that what goes by several
 * arrives in any order. */
static hr_status open_rail(struct hr_bond *bond, int i, const struct hr_domain_params *params,
                           const struct hr_verbs_options *options, const struct hr_verbs_found *found,
                           char detail[256]) {
    struct hr_caps *caps = &bond->base.caps;
    hr_status status =
        hr_verbs_domain_open(&hr_provider_verbs, params, options, found, HR_BOND_ADDRESSES, &bond->rails[i], detail);
    if (status != HR_OK) return status;
    uint32_t flags = (bond->n ? caps->flags : UINT32_MAX) & ~(uint32_t)HR_CAP_CONFIRMS;
    *caps = bond->rails[i]->base.caps;
    caps->flags &= flags;
    bond->n = i + 1;
    bond->opened += i < HR_VERBS_RAILS;
    return HR_OK;
}

/* Those that do not open are left, and keep their number: the peer's rail of the same number has no other to meet. */
static hr_status open_rails(struct hr_bond *bond, const struct hr_domain_params *params,
                            const struct hr_verbs_options *options, const struct hr_verbs_found *found, int n,
                            char detail[256]) {
    struct hr_domain_params inner = *params;
    struct hr_verbs_options one = *options;
    struct hr_verbs_found spare;
    char without[256] = "";
    hr_status worst = HR_ERR_NO_DEVICE;
    inner.sink = &rail_sink;
    inner.owner = bond;
    for (int i = 0; i < n; i++) {
        char name[61], why[256] = "";
        if (!found[i].ctx) continue;
        if (i) one.inject.wc_error = 0; /* one rail fails by plan, and the others take over */
        snprintf(name, sizeof name, "%.60s", found[i].ctx->device->name);
        int first = !bond->n;
        hr_status status = open_rail(bond, i, &inner, &one, &found[i], why);
        if (status == HR_OK && (first || hr_verbs_nearer(&found[i], &found[bond->nearest]))) bond->nearest = i;
        if (status == HR_OK) continue;
        worst = status;
        snprintf(detail, 256, "%s", why);
        hr_verbs_leave(bond->base.left, name, why);
    }
    if (!bond->n || !options->fallback) return bond->n ? HR_OK : worst;
    one.inject = (struct hr_verbs_inject){.budget = 0};
    one.silence = 0; /* that of TCP is its own */
    hr_status status = hr_verbs_device_spare(&options->wish, found, n, &spare, without);
    if (status == HR_OK) status = open_rail(bond, HR_BOND_SPARE, &inner, &one, &spare, without);
    if (status != HR_OK) hr_verbs_leave(bond->base.left, "tcp", without);
    return HR_OK;
}

hr_status hr_bond_open(const struct hr_domain_params *params, const struct hr_verbs_options *options,
                       const struct hr_verbs_found *found, int n, const char left[HR_LEFT], struct hr_domain **domain_p,
                       char detail[256]) {
    struct hr_bond *bond = calloc(1, sizeof *bond);
    if (!bond) {
        for (int i = 0; i < n; i++)
            if (found[i].ctx) found[i].verbs->close_device(found[i].ctx);
        snprintf(detail, 256, "out of memory");
        return HR_ERR_NOMEM;
    }
    bond->base = (struct hr_domain){.ops = &bond_ops, .sink = params->sink, .owner = params->owner};
    memcpy(bond->base.left, left, HR_LEFT);
    hr_list_init(&bond->eps);
    hr_list_init(&bond->pending);
    if (!options->ack_timeout) bond->silence = options->silence;
    bond->epfd = epoll_create1(EPOLL_CLOEXEC);
    bond->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    hr_status status = open_rails(bond, params, options, found, n, detail);
    struct epoll_event event = {.events = EPOLLIN};
    int bad = bond->epfd < 0 || bond->timer < 0 || epoll_ctl(bond->epfd, EPOLL_CTL_ADD, bond->timer, &event);
    for (int i = 0; i < bond->n; i++)
        bad |= bond->rails[i] && epoll_ctl(bond->epfd, EPOLL_CTL_ADD, bond->rails[i]->poll.fd, &event);
    if (status == HR_OK && bad) {
        snprintf(detail, 256, "cannot set up the verbs domain: %s (open files: ulimit -n)", strerror(errno));
        status = HR_ERR_NOMEM;
    }
    if (status != HR_OK) {
        domain_close(&bond->base);
        return status;
    }
    bond->address_len = hr_verbs_addresses_write(bond->rails, bond->n, bond->address);
    *domain_p = &bond->base;
    return HR_OK;
}
