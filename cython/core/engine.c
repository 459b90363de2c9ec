/* engine.c - opens and closes an engine, its domains and its connections; counters. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "core/engine.h"

#define SPIN_NS 200000
#define SPIN_SHARED_NS 100000
#define QUIET_NS 2000000

extern const struct hr_provider hr_provider_fault;

/* "name:options;name:options": the options of one, or NULL. */
static char *options_of(const char *all, const char *name) {
    size_t n = strlen(name);
    while (all && *all) {
        const char *end = strchr(all, ';');
        size_t len = end ? (size_t)(end - all) : strlen(all);
        if (len > n && all[n] == ':' && !strncmp(all, name, n)) return strndup(all + n + 1, len - n - 1);
        all = end ? end + 1 : NULL;
    }
    return NULL;
}

/* "tcp:1": rail 1 of provider tcp. */
struct rail_name {
    char provider[32];
    int rail; /* -1: not a name */
};

static struct rail_name parse_name(const char *name) {
    struct rail_name found = {.rail = -1};
    size_t n = strcspn(name, ":");
    if (n >= sizeof found.provider) return found;
    memcpy(found.provider, name, n);
    if (!name[n])
        found.rail = 0;
    else if (name[n + 1] > '0' && name[n + 1] < '0' + HR_MAX_RAILS && !name[n + 2])
        found.rail = name[n + 1] - '0';
    return found;
}

/* "nic0,nic1": the interface of one rail, or NULL. */
static char *nic_of(const char *rails, int rail) {
    for (; rail && rails; rail--) rails = strchr(rails, ',') ? strchr(rails, ',') + 1 : NULL;
    return rails ? strndup(rails, strcspn(rails, ",")) : NULL;
}

static hr_status open_domain(struct hr_engine *engine, const char *name, char detail[256]) {
    struct rail_name parsed = parse_name(name);
    const struct hr_provider *provider = hr_provider_find(parsed.provider), *inner = NULL;
    char *options = options_of(engine->config.options, parsed.provider),
         *fault = options_of(engine->config.fault, parsed.provider),
         *device = options_of(engine->config.devices, parsed.provider),
         *rails = options_of(engine->config.rails, parsed.provider), *nic = NULL;
    struct hr_domain *domain = NULL;
    hr_status status;
    if (!provider || parsed.rail < 0) {
        snprintf(detail, 256, "no provider is called '%s'", name);
        status = HR_ERR_NO_DEVICE;
        goto out;
    }
    nic = nic_of(rails, parsed.rail);
    if (rails && !nic) {
        snprintf(detail, 256, "no interface is named for '%s' in '%.100s': name one for each rail, with commas between",
                 name, rails);
        status = HR_ERR_INVALID;
        goto out;
    }
    if (engine->ndomains == HR_MAX_DOMAINS) {
        snprintf(detail, 256, "no place for '%s': %d domains are open; name fewer providers or rails", name,
                 HR_MAX_DOMAINS);
        status = HR_ERR_INVALID;
        goto out;
    }
    if (fault) {
        inner = provider;
        provider = &hr_provider_fault;
    }
    struct hr_domain_params params = {.self_id = engine->config.self_id,
                                      .ifname = nic ? nic : engine->config.ifname,
                                      .device = device,
                                      .auth = &engine->auth,
                                      .sink = &hr_engine_sink,
                                      .owner = engine,
                                      .local_peers = engine->config.local_peers,
                                      .options = fault ? fault : options,
                                      .inner = inner};
    status = provider->domain_open(provider, &params, &domain, detail);
    if (status != HR_OK) goto out;
    int i = engine->ndomains++;
    engine->domains[i] = domain;
    engine->names[i] = strdup(name);
    if (*domain->left) hr_remark_add(engine, HR_REMARK_LEFT, NULL, domain->left);
    int fd = domain->ops->event_fd(domain);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    if (fd >= 0 && epoll_ctl(engine->epfd, EPOLL_CTL_ADD, fd, &event)) {
        snprintf(detail, 256, "epoll_ctl: %s", strerror(errno));
        status = HR_ERR_NOMEM;
    }
out:
    free(options);
    free(device);
    free(fault);
    free(rails);
    free(nic);
    return status;
}

static void engine_free(struct hr_engine *engine) {
    while (!hr_list_empty(&engine->conns)) hr_conn_free(hr_container(engine->conns.next, struct hr_conn, link));
    hr_match_close(engine);
    for (int d = 0; d < engine->ndomains; d++) {
        engine->domains[d]->ops->domain_close(engine->domains[d]);
        free(engine->names[d]);
    }
    for (uint32_t i = 0; i < engine->nxfers; i++) free(engine->xfers[i]);
    free(engine->xfers);
    free(engine->retired);
    hr_ledger_close(engine);
    int fds[] = {engine->epfd, engine->kickfd, engine->bgfd, engine->donefd, engine->remarkfd};
    for (int i = 0; i < 5; i++)
        if (fds[i] >= 0) close(fds[i]);
    pthread_mutex_destroy(&engine->mutex);
    free(engine);
}

hr_status hr_engine_open(const struct hr_config *config, struct hr_engine **engine_p, char detail[256]) {
    struct hr_engine *engine = calloc(1, sizeof *engine);
    hr_status status = HR_ERR_NOMEM;
    snprintf(detail, 256, "no memory");
    if (!engine) return status;
    engine->config = *config;
    engine->auth = config->auth;
    pthread_mutex_init(&engine->mutex, NULL);
    struct hr_link *heads[] = {&engine->conns, &engine->active,  &engine->owing, &engine->dead,
                               &engine->comms, &engine->waiters, &engine->ready};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) hr_list_init(heads[i]);
    for (int i = 0; i < HR_PRIORITIES; i++) hr_list_init(&engine->work[i]);
    for (int i = 0; i < HR_MATCH_CHAINS; i++) hr_list_init(&engine->unexpected[i]);
    for (int i = 0; i < HR_SPARES; i++) hr_list_init(&engine->spare[i]);
    engine->epfd = epoll_create1(EPOLL_CLOEXEC);
    engine->kickfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    engine->bgfd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    engine->donefd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    engine->remarkfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = engine->kickfd};
    if (engine->epfd < 0 || engine->kickfd < 0 || engine->bgfd < 0 || engine->donefd < 0 || engine->remarkfd < 0 ||
        epoll_ctl(engine->epfd, EPOLL_CTL_ADD, engine->kickfd, &event)) {
        snprintf(detail, 256, "cannot make event descriptors: %s", strerror(errno));
        goto fail;
    }
    hr_engine_set_locality(engine, 1, 1, 0);
    char *names = strdup(config->providers), *save = NULL;
    status = open_domain(engine, "loop", detail);
    for (char *name = strtok_r(names, ",", &save); name && status == HR_OK; name = strtok_r(NULL, ",", &save))
        if (strcmp(name, "loop")) status = open_domain(engine, name, detail);
    free(names);
    engine->config.options = engine->config.devices = engine->config.fault = engine->config.providers =
        engine->config.ifname = engine->config.rails = NULL; /* the caller's */
    if (status == HR_OK) status = hr_bg_start(engine);
    if (status != HR_OK) goto fail;
    *engine_p = engine;
    return HR_OK;
fail:
    engine_free(engine);
    return status;
}

void hr_engine_set_locality(struct hr_engine *engine, int local_ranks, int cores, int turns) {
    hr_lock(engine);
    engine->turns.on = turns;
    engine->yield = local_ranks > cores;
    engine->spin_ns = engine->config.spin_us >= 0 ? engine->config.spin_us * 1000
                      : engine->yield             ? SPIN_SHARED_NS
                                                  : SPIN_NS;
    engine->spin_now = engine->spin_ns;
    hr_unlock(engine);
}

/* *arg: whether it must have been delivered, too. */
static int all_quiet(struct hr_engine *engine, void *arg) {
    for (struct hr_link *l = engine->conns.next; l != &engine->conns; l = l->next)
        if (!hr_conn_idle(hr_container(l, struct hr_conn, link), *(int *)arg)) return 0;
    return 1;
}

/* Not all that is waited for makes an event, the confirmation by a peer's host for one. */
static void wait_quiet(struct hr_engine *engine, int delivered, int64_t deadline) {
    int64_t now;
    while (!all_quiet(engine, &delivered) && (now = hr_now()) < deadline)
        hr_drive_until(engine, all_quiet, &delivered, deadline - now < QUIET_NS ? deadline : now + QUIET_NS);
}

/* On all streams but the first, which has the control messages. Called again where one had no room. */
static int all_said_bye(struct hr_engine *engine, void *unused) {
    int all = 1;
    (void)unused;
    for (struct hr_link *l = engine->conns.next; l != &engine->conns; l = l->next) {
        struct hr_conn *conn = hr_container(l, struct hr_conn, link);
        for (; conn->state == HR_CONN_UP && conn->said_bye + 1 < conn->nlanes; conn->said_bye++) {
            struct hr_hdr h = {.kind = HR_MSG_BYE};
            struct hr_msg msg = {.hdr = &h, .hdr_len = sizeof h};
            struct hr_ep *ep = conn->lanes[conn->said_bye + 1].ep;
            if (ep->domain->ops->post_send(ep, &msg) != HR_AGAIN) continue; /* of an error the endpoint tells itself */
            all = 0;
            break;
        }
    }
    return all;
}

void hr_engine_close(struct hr_engine *engine, int64_t deadline) {
    hr_lock(engine);
    wait_quiet(engine, 0, deadline);
    while (!hr_list_empty(&engine->comms)) {
        struct hr_comm *comm = hr_container(engine->comms.next, struct hr_comm, link);
        hr_comm_break_locked(comm, HR_ERR_BROKEN, comm->rank, HR_PHASE_CLOSE, NULL, "the engine was closed", 0);
        hr_comm_free(comm);
    }
    hr_drive_until(engine, all_said_bye, NULL, deadline);
    for (struct hr_link *l = engine->conns.next; l != &engine->conns; l = l->next) {
        struct hr_hdr h = {.kind = HR_MSG_BYE};
        hr_conn_send_ctl(hr_container(l, struct hr_conn, link), &h, sizeof h);
    }
    hr_settle(engine);
    wait_quiet(engine, 1, deadline);
    hr_unlock(engine);
    hr_bg_stop(engine);
    engine_free(engine);
}

/* --- domains and connections
 * ---------------------------------------------------------------------------------------------------- */

int hr_engine_domain(struct hr_engine *engine, int i, const char **name_p, void *addr, size_t *addr_len_p,
                     struct hr_caps *caps_p, char text[HR_ABOUT]) {
    if (i < 0 || i >= engine->ndomains) return 0;
    struct hr_domain *domain = engine->domains[i];
    hr_lock(engine);
    *name_p = engine->names[i];
    *addr_len_p = domain->ops->domain_address(domain, addr);
    *caps_p = domain->caps;
    text[0] = 0;
    domain->ops->domain_describe(domain, text, HR_ABOUT);
    hr_unlock(engine);
    return 1;
}

/* The more urgent a DSCP is, the higher are its first three bits. */
static int urgency(int dscp) { return 7 - (dscp >> 3); }

/* Its domain's, or that of its channel. */
static struct hr_class class_of(const struct hr_conn *conn, int d) {
    int dscp = (int)conn->channel - 1;
    if (!conn->channel) return conn->engine->classes[d];
    return (struct hr_class){1, (uint8_t)dscp, (uint8_t)urgency(dscp)};
}

static hr_status add_lane(struct hr_conn *conn, int d, const void *addr, size_t len, int active) {
    struct hr_domain *domain = conn->engine->domains[d];
    struct hr_class class = class_of(conn, d);
    int i = 0;
    while (i <= HR_MAX_LANES && conn->lanes[i].ep) i++;
    if (i > HR_MAX_LANES) return HR_ERR_INVALID;
    struct hr_lane *lane = &conn->lanes[i];
    lane->conn = conn;
    hr_status status = domain->ops->ep_create(domain, conn->peer_id, lane, &lane->ep);
    if (status != HR_OK) return status;
    lane->ep->channel = conn->channel;
    if (class.set) domain->ops->ep_set_class(lane->ep, class.dscp, class.priority);
    status = domain->ops->ep_connect(lane->ep, addr, len, active);
    if (status == HR_OK) return status;
    domain->ops->ep_destroy(lane->ep);
    lane->ep = NULL;
    return status;
}

hr_status hr_connect(struct hr_engine *engine, uint64_t peer_id, const char *provider, const void *addr, size_t len,
                     int active) {
    return hr_connect_classed(engine, peer_id, provider, addr, len, active, HR_NO_CLASS);
}

hr_status hr_connect_classed(struct hr_engine *engine, uint64_t peer_id, const char *provider, const void *addr,
                             size_t len, int active, int dscp) {
    struct rail_name parsed = parse_name(provider);
    int self = peer_id == engine->config.self_id, d = 0;
    hr_status status = HR_ERR_NOMEM;
    if (dscp < HR_NO_CLASS || dscp > 63) return HR_ERR_INVALID;
    hr_lock(engine);
    while (d < engine->ndomains && strcmp(engine->names[d], provider)) d++;
    struct hr_conn *first = hr_conn_find(engine, peer_id, HR_CHANNEL(dscp)), *conn = NULL;
    int out_of_turn = parsed.rail > (first ? first->nrails : 0) || (dscp >= 0 && !hr_conn_find(engine, peer_id, 0));
    int in_vain = d < engine->ndomains && dscp >= 0 && engine->domains[d]->caps.flags & HR_CAP_LOCAL;
    if (d < engine->ndomains && !out_of_turn && !in_vain)
        conn = hr_conn_get(engine, peer_id, HR_CHANNEL(dscp), parsed.rail);
    if (d == engine->ndomains || out_of_turn ||
        (conn && conn->nlanes && (self || conn->caps != &engine->domains[d]->caps)))
        status = HR_ERR_INVALID;
    else if (in_vain)
        status = HR_ERR_UNSUPPORTED;
    else if (conn && (conn->first->state == HR_CONN_LOST || conn->first->state == HR_CONN_CLOSED))
        status = conn->first->why;
    else if (conn) {
        conn->provider = hr_provider_find(parsed.provider);
        conn->caps = &engine->domains[d]->caps;
        if (!conn->nlanes) conn->credit = (int64_t)hr_credit_max(conn);
        status = conn->nlanes == HR_MAX_LANES ? HR_ERR_INVALID : add_lane(conn, d, addr, len, self ? 0 : active);
        if (status == HR_OK && self) status = add_lane(conn, d, addr, len, 1);
        if (status == HR_OK) {
            conn->state = HR_CONN_CONNECTING;
            conn->nlanes++;
            engine->domain_conns[d]++;
        }
    }
    hr_settle(engine);
    hr_unlock(engine);
    return status;
}

struct awaited {
    uint32_t channel;
    struct hr_conn *bad;
};

/* Those of a class that were settled are another call's, whatever has become of them. */
static int all_connected(struct hr_engine *engine, void *arg) {
    struct awaited *awaited = arg;
    awaited->bad = NULL;
    for (struct hr_link *l = engine->conns.next; l != &engine->conns; l = l->next) {
        struct hr_conn *conn = hr_container(l, struct hr_conn, link);
        if (conn->state == HR_CONN_UP || conn->channel != awaited->channel || conn->settled) continue;
        awaited->bad = conn;
        if (conn->state != HR_CONN_CONNECTING) return 1;
    }
    return !awaited->bad;
}

hr_status hr_connect_wait(struct hr_engine *engine, int64_t deadline, uint64_t *peer_p, char detail[256]) {
    return hr_connect_wait_classed(engine, HR_NO_CLASS, deadline, peer_p, detail);
}

hr_status hr_connect_wait_classed(struct hr_engine *engine, int dscp, int64_t deadline, uint64_t *peer_p,
                                  char detail[256]) {
    struct awaited awaited = {.channel = HR_CHANNEL(dscp)};
    hr_lock(engine);
    hr_status status = hr_drive_until(engine, all_connected, &awaited, deadline);
    struct hr_conn *bad = awaited.bad;
    if (bad) {
        *peer_p = bad->peer_id;
        if (bad->state == HR_CONN_CONNECTING)
            snprintf(detail, 256, "no answer over %s before the deadline", bad->provider->name);
        else {
            status = bad->why;
            snprintf(detail, 256, "%s", bad->detail);
        }
    }
    hr_unlock(engine);
    return status;
}

/* Every connection of a channel over a provider. HR_ERR_UNSUPPORTED: there is none, or one has not got it. */
static hr_status stamp(struct hr_engine *engine, const char *provider, uint32_t channel, int dscp, int answers,
                       int priority) {
    hr_status status = HR_OK;
    int count = 0;
    for (struct hr_link *l = engine->conns.next; l != &engine->conns; l = l->next) {
        struct hr_conn *conn = hr_container(l, struct hr_conn, link);
        if (conn->channel != channel || !conn->provider || strcmp(conn->provider->name, provider)) continue;
        if (channel && !conn->settled && conn->state != HR_CONN_UP) status = HR_ERR_UNSUPPORTED;
        if (!conn->nlanes || conn->state == HR_CONN_LOST) continue;
        for (int i = 0; i < conn->nlanes; i++, count++) {
            struct hr_ep *ep = conn->lanes[i].ep;
            hr_status one = ep->domain->ops->ep_set_class(ep, i == 0 && conn->nlanes > 1 ? answers : dscp, priority);
            if (one != HR_OK) status = one;
        }
    }
    return count ? status : HR_ERR_UNSUPPORTED;
}

hr_status hr_set_class(struct hr_engine *engine, const char *provider, int dscp, int answers, int priority) {
    if (dscp < 0 || dscp > 63 || answers < 0 || answers > 63 || priority < 0 || priority > 7) return HR_ERR_INVALID;
    hr_lock(engine);
    for (int d = 0; d < engine->ndomains; d++)
        if (!strcmp(parse_name(engine->names[d]).provider, provider))
            engine->classes[d] = (struct hr_class){1, (uint8_t)dscp, (uint8_t)priority};
    hr_status status = stamp(engine, provider, 0, dscp, answers, priority);
    hr_unlock(engine);
    return status;
}

hr_status hr_class_taken(struct hr_engine *engine, const char *provider, int dscp) {
    if (dscp < 0 || dscp > 63) return HR_ERR_INVALID;
    hr_lock(engine);
    hr_status status = stamp(engine, provider, HR_CHANNEL(dscp), dscp, dscp, urgency(dscp));
    hr_unlock(engine);
    return status;
}

void hr_class_settle(struct hr_engine *engine, int dscp) {
    hr_lock(engine);
    for (struct hr_link *l = engine->conns.next; l != &engine->conns; l = l->next) {
        struct hr_conn *conn = hr_container(l, struct hr_conn, link);
        if (conn->channel && conn->channel == HR_CHANNEL(dscp) && conn->state == HR_CONN_UP) conn->settled = 1;
    }
    hr_unlock(engine);
}

static int has_a_comm(struct hr_engine *engine, const struct hr_conn *conn) {
    for (struct hr_link *l = engine->comms.next; l != &engine->comms; l = l->next) {
        struct hr_comm *comm = hr_container(l, struct hr_comm, link);
        for (int i = 0; i < comm->size; i++)
            if (comm->conns[i] == conn->first) return 1;
    }
    return 0;
}

void hr_class_forget(struct hr_engine *engine, int dscp) {
    hr_lock(engine);
    hr_conns_bury(engine);
    for (struct hr_link *l = engine->conns.next, *next; l != &engine->conns; l = next) {
        struct hr_conn *conn = hr_container(l, struct hr_conn, link);
        next = l->next;
        if (!conn->channel || conn->channel != HR_CHANNEL(dscp) || conn->settled) continue;
        if (has_a_comm(engine, conn)) continue; /* another thread's, for which it stands */
        for (int d = 0; conn->nlanes && d < engine->ndomains; d++)
            if (conn->lanes[0].ep->domain == engine->domains[d]) engine->domain_conns[d] -= (uint32_t)conn->nlanes;
        hr_conn_free(conn);
    }
    hr_settle(engine);
    hr_unlock(engine);
}

void hr_peer_lost(struct hr_engine *engine, uint64_t peer_id, hr_status why, const char *detail) {
    hr_lock(engine);
    for (struct hr_link *l = engine->conns.next; l != &engine->conns; l = l->next) {
        struct hr_conn *conn = hr_container(l, struct hr_conn, link);
        if (conn->peer_id == peer_id) hr_conn_lost(conn, hr_is_error(why) ? why : HR_ERR_PEER_LOST, detail);
    }
    hr_settle(engine);
    hr_unlock(engine);
}

/* --- counters
 * ----------------------------------------------------------------------------------------------------------------------
 */

int hr_engine_counters(struct hr_engine *engine, struct hr_counter *counters, int n) {
    const struct hr_counter all[] = {
        {"messages_eager", engine->count_eager},        {"transfers_pulled", engine->count_pull},
        {"transfers_pushed", engine->count_push},       {"transfers_segments", engine->count_seg},
        {"transfers_lent", engine->count_lent},         {"messages_unexpected", engine->count_unexpected},
        {"transfers_returned", engine->count_returned}, {"transfers_shared", engine->count_shared},
        {"messages_fused", engine->count_fused},        {"runs_aside", engine->count_aside},
        {"frames_stale", engine->count_stale},          {"sleeps", engine->count_sleeps},
    };
    int have = (int)(sizeof all / sizeof *all);
    for (int i = 0; i < n && i < have; i++) counters[i] = all[i];
    return have;
}

int hr_peer_stats(struct hr_engine *engine, uint64_t peer_id, struct hr_peer_stats *stats_p) {
    hr_lock(engine);
    struct hr_conn *conn = hr_conn_find(engine, peer_id, 0);
    if (conn)
        *stats_p = (struct hr_peer_stats){
            .provider = conn->provider ? conn->provider->name : "", .connected = 1, .rails = conn->nrails};
    for (struct hr_link *l = engine->conns.next; conn && l != &engine->conns; l = l->next) {
        struct hr_conn *rail = hr_container(l, struct hr_conn, link);
        if (rail->index != conn->index) continue;
        stats_p->tx_bytes += rail->tx_bytes;
        stats_p->rx_bytes += rail->rx_bytes;
        stats_p->tx_msgs += rail->tx_msgs;
        stats_p->rx_msgs += rail->rx_msgs;
        stats_p->rate += rail->rate;
        stats_p->fell += rail->fell;
        if (rail->carrier) stats_p->carrier = rail->carrier;
        if (rail->busy_ns > stats_p->busy_ns) stats_p->busy_ns = rail->busy_ns;
        if (rail->state != HR_CONN_UP && (!rail->channel || rail->settled)) stats_p->connected = 0;
    }
    hr_unlock(engine);
    return conn != NULL;
}
