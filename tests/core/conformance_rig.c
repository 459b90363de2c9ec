/* conformance_rig.c - sides, endpoints, their callbacks and how they are driven. */

#include "conformance.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <time.h>

struct settings settings;

int64_t rig_now(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

/* ---- callbacks ---- */

static struct end *callback(struct hr_ep *ep) {
    struct end *end = ep->ctx;
    struct side *owner = ep->domain->owner;
    CHECK(owner->in_progress); /* never from post_*, ep_connect or ep_abort */
    CHECK(!end->aborted);
    CHECK(end->ep == ep);
    owner->callbacks++;
    return end;
}

static void on_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct end *end = callback(ep);
    uint64_t first, seq;

    CHECK(end->connected && !end->losses);
    CHECK_EQ((uintptr_t)hdr % 8, 0);
    memcpy(&first, hdr, sizeof first);
    seq = first >> 32;
    if (end->gaps && seq > end->next_rx) end->next_rx = seq;
    if (!end->any_order) CHECK_EQ(seq, end->next_rx);
    end->next_rx = seq + 1;
    CHECK_EQ(hdr_len, test_hdr_len(seq));
    CHECK_EQ(len, first & UINT32_MAX);
    filled((const char *)hdr + 8, hdr_len - 8, seq);
    filled(payload, len, ~seq);
    end->bytes_rx += len;
    if (end->on_recv) end->on_recv(end, seq);
}

static void on_done(struct hr_ep *ep, void *cookie, hr_status status) {
    struct end *end = callback(ep);
    struct op *op = cookie;
    CHECK_EQ(op->state, OP_OPEN); /* exactly once, and only after HR_INPROGRESS */
    op->state = OP_ENDED;
    op->status = status;
    end->ended++;
}

static void on_notify(struct hr_ep *ep, uint64_t value, size_t nbytes) {
    struct end *end = callback(ep);
    CHECK(end->connected && !end->losses);
    end->notifies++;
    end->notify_value = value;
    end->notify_bytes = nbytes;
    if (end->on_notify) end->on_notify(end, value, nbytes);
}

static void on_state(struct hr_ep *ep, hr_status status, const char *detail) {
    struct end *end = callback(ep);
    (void)detail;
    if (status == HR_OK) {
        CHECK(!end->connected && !end->losses);
        end->connected = 1;
        return;
    }
    CHECK(hr_is_peer_error(status));
    end->losses++;
    end->loss = status;
    CHECK_EQ(end->losses, 1);
}

static const struct hr_sink sink = {on_recv, on_done, on_notify, on_state, NULL, NULL};

/* ---- driving ---- */

static int drive(struct side *side) {
    int n, again = 0;
    if (side->paused) return 0;
    if (side->work) again = side->work(side);
    side->callbacks = 0;
    side->in_progress = 1;
    n = side->domain->ops->progress(side->domain, BUDGET, side->hint);
    side->in_progress = 0;
    side->passes++;
    CHECK(side->callbacks <= BUDGET);
    CHECK(n > 0 || !side->callbacks);
    return n > 0 || again;
}

/* Sleeps as an engine does. Called with the lock, which is given up meanwhile. */
static void side_sleep(struct side *side) {
    struct pollfd fds[2] = {{.fd = side->kick, .events = POLLIN}, {.events = POLLIN}};
    int ready, watched = !side->paused && side->domain->ops->event_fd(side->domain) >= 0;
    int timeout = watched || side->paused ? 1000 : 1;
    uint64_t count;

    if (watched) {
        if (side->domain->ops->event_arm(side->domain) == HR_AGAIN) return;
        fds[1].fd = side->domain->ops->event_fd(side->domain);
    }
    pthread_mutex_unlock(&side->lock);
    ready = poll(fds, 1 + watched, timeout);
    pthread_mutex_lock(&side->lock);
    if (fds[0].revents && read(side->kick, &count, sizeof count) < 0) side->kick = -1;
    if (!watched) return;
    /* Nothing for a second, and now there is: the wake-up was lost. */
    if (ready == 0 && poll(&fds[1], 1, 0) == 0 && !side->paused && !side->stop && drive(side)) side->lost_wakeups++;
    side->domain->ops->event_disarm(side->domain);
}

static void *side_thread(void *arg) {
    struct side *side = arg;
    pthread_mutex_lock(&side->lock);
    while (!side->stop) {
        if (!drive(side)) side_sleep(side);
        pthread_mutex_unlock(&side->lock);
        do {
            sched_yield();
        } while (atomic_load(&side->wanted)); /* a busy side would take the lock again before the check wakes up */
        pthread_mutex_lock(&side->lock);
    }
    pthread_mutex_unlock(&side->lock);
    return NULL;
}

void side_take(struct side *side) {
    atomic_store(&side->wanted, 1);
    pthread_mutex_lock(&side->lock);
    atomic_store(&side->wanted, 0);
}

void side_kick(struct side *side) {
    uint64_t one = 1;
    if (side->kick >= 0 && write(side->kick, &one, sizeof one) != sizeof one) abort();
}

/* One thread drives both sides. What has not come after so many turns comes by the clock, if at all: others may have
 * the processor. Not after each of them: providers look at some things once in many. */
static void pump_both(struct rig *rig) {
    int any = drive(&rig->side[0]);
    if (rig->side[1].domain != rig->side[0].domain) any |= drive(&rig->side[1]);
    rig->idle_turns = any ? 0 : rig->idle_turns + 1;
    if (rig->idle_turns > IDLE_TURNS && rig->idle_turns % 64 == 0) usleep(500);
}

void rig_pump(struct rig *rig) {
    if (!rig->threads) {
        pump_both(rig);
        return;
    }
    pthread_mutex_unlock(&rig->side[1].lock);
    pthread_mutex_unlock(&rig->side[0].lock);
    usleep(100);
    side_take(&rig->side[0]);
    side_take(&rig->side[1]);
}

void rig_pump_for(struct rig *rig, int ms) {
    int64_t end = rig_now() + (int64_t)ms * 1000000;
    while (rig_now() < end) rig_pump(rig);
}

/* ---- opening ---- */

hr_status side_open(struct side *side, const char *options, char detail[256]) {
    struct hr_domain_params params = {
        .self_id = side->id,
        .ifname = settings.ifname,
        .device = settings.device,
        .auth = &side->auth,
        .sink = &sink,
        .owner = side,
        .local_peers = 2,
        .options = options,
        .inner = settings.inner,
    };
    hr_status status;
    detail[0] = 0;
    side->domain = NULL;
    status = settings.provider->domain_open(settings.provider, &params, &side->domain, detail);
    if (status == HR_OK) side->addr_len = side->domain->ops->domain_address(side->domain, side->addr);
    return status;
}

static void side_start(struct side *side) {
    side->kick = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_mutex_init(&side->lock, NULL);
    pthread_mutex_lock(&side->lock);
    REQUIRE(pthread_create(&side->thread, NULL, side_thread, side) == 0);
}

void rig_open(struct rig *rig, const struct rig_setup *setup) {
    char detail[256];
    memset(rig, 0, sizeof *rig);
    rig->threads = settings.threads && !setup->self;
    for (int i = 0; i < 2; i++) {
        struct side *side = &rig->side[i];
        const char *token = setup->token[i] ? setup->token[i] : "conformance";
        side->id = setup->self ? 100 : 100 + (uint64_t)i;
        side->kick = -1;
        hr_auth_init(&side->auth, token, strlen(token), 0, setup->epoch[i]);
        if (i && setup->self) {
            side->domain = rig->side[0].domain;
            memcpy(side->addr, rig->side[0].addr, sizeof side->addr);
            side->addr_len = rig->side[0].addr_len;
        } else if (side_open(side, settings.options, detail) != HR_OK) {
            fprintf(stderr, "cannot open %s: %s\n", settings.provider->name, detail);
            exit(1);
        }
    }
    for (int i = 0; i < 2 && rig->threads; i++) side_start(&rig->side[i]);
}

void rig_close(struct rig *rig) {
    for (int i = 0; i < 2 && rig->threads; i++) {
        struct side *side = &rig->side[i];
        side->stop = 1;
        side_kick(side);
        pthread_mutex_unlock(&side->lock);
        pthread_join(side->thread, NULL);
        pthread_mutex_destroy(&side->lock);
        close(side->kick);
        CHECK_EQ(side->lost_wakeups, 0);
    }
    for (int i = 0; i < 2; i++) {
        struct side *side = &rig->side[i];
        if (!side->domain) continue;
        for (int e = 0; e < side->nends; e++) end_destroy(&side->ends[e]);
    }
    for (int i = 0; i < 2; i++) {
        struct side *side = &rig->side[i];
        if (!side->domain || (i && side->domain == rig->side[0].domain)) continue;
        count_faults(side->domain);
        side->domain->ops->domain_close(side->domain);
    }
    op_free_all();
}

/* ---- endpoints ---- */

struct end *end_new(struct side *side, uint64_t peer_id) {
    struct end *end = &side->ends[side->nends];
    REQUIRE(side->nends < MAX_ENDS);
    end->side = side;
    REQUIRE(side->domain->ops->ep_create(side->domain, peer_id, end, &end->ep) == HR_OK);
    CHECK(end->ep->ctx == end);
    CHECK(end->ep->domain == side->domain);
    CHECK_EQ(end->ep->peer_id, peer_id);
    side->nends++;
    return end;
}

hr_status end_connect(struct end *end, const struct side *to, int active) {
    return end->side->domain->ops->ep_connect(end->ep, to->addr, to->addr_len, active);
}

void end_abort(struct end *end) {
    end->aborted = 1;
    end->side->domain->ops->ep_abort(end->ep);
}

void end_destroy(struct end *end) {
    if (!end->ep) return;
    end->aborted = 1;
    if (end->side->hint == end->ep) end->side->hint = NULL;
    end->side->domain->ops->ep_destroy(end->ep);
    end->ep = NULL;
}

static void pair_wait(struct rig *rig, struct end *a, struct end *b) { WAIT(*rig, a->connected && b->connected); }

int rig_pair(struct rig *rig, struct end **a_p, struct end **b_p) {
    struct end *a = end_new(&rig->side[0], rig->side[1].id);
    struct end *b = end_new(&rig->side[1], rig->side[0].id);
    CHECK(!hr_is_error(end_connect(b, &rig->side[0], 0)));
    CHECK(!hr_is_error(end_connect(a, &rig->side[1], 1)));
    pair_wait(rig, a, b);
    *a_p = a;
    *b_p = b;
    return a->connected && b->connected;
}
