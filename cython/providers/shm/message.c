/* message.c - messages through the ring: what a small one costs is decided here. */

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "hr/clock.h"
#include "hr/reduce.h"
#include "providers/shm/shm.h"

void hr_shm_lose(struct shm_ep *e, hr_status status, const char *format, ...) {
    va_list args;
    if (e->lost || e->state == SHM_LOST || e->state == SHM_ABORTED) return;
    va_start(args, format);
    vsnprintf(e->text, sizeof e->text, format, args);
    va_end(args);
    e->lost = status;
    e->special = 1;
    hr_shm_attend(shm_ep_domain(e));
    /* A hang-up stays readable for ever. What lies in the socket can still be read. */
    if (e->sock >= 0) epoll_ctl(shm_ep_domain(e)->epfd, EPOLL_CTL_DEL, e->sock, NULL);
    if (e->pidfd >= 0) epoll_ctl(shm_ep_domain(e)->epfd, EPOLL_CTL_DEL, e->pidfd, NULL);
}

void hr_shm_report(struct shm_ep *e) {
    struct shm_domain *dom = shm_ep_domain(e);
    e->state = SHM_LOST;
    e->special = 0;
    if (e->counted) {
        e->counted = 0;
        dom->connecting--;
    }
    dom->base.sink->state(&e->base, e->lost, e->text);
}

/* A write that fails is none of the sender's concern: EAGAIN means that the event is up anyway, and a peer that is gone
 * is found by other means. */
void hr_shm_wake(struct shm_ep *e) {
    static const uint64_t one = 1;
    while (write(e->peer_wakefd, &one, sizeof one) < 0 && errno == EINTR) continue;
}

hr_status hr_shm_room(struct shm_ep *e, uint64_t n) {
    for (int looks = 0;; looks++) {
        if (!ring_tx_look(&e->tx)) {
            hr_shm_lose(e, HR_ERR_PROTOCOL, "process %d damaged the ring: it says that it has read what was never sent",
                        (int)e->pid);
            return HR_AGAIN;
        }
        if (ring_tx_fits(&e->tx, n)) {
            if (n >= e->blocked) e->blocked = 0;
            return HR_OK;
        }
        if (looks == 1 || !shm_ep_domain(e)->armed) break;
        atomic_store(&e->tx.ctl->want, 1); /* another thread sleeps already: raise its flag, then look once more */
    }
    e->blocked = n;
    return HR_AGAIN;
}

/* All that can keep an endpoint from sending; the usual case is none of it. */
static hr_status may_send(struct shm_ep *e, uint64_t n) {
    hr_status status;
    if (e->state == SHM_LOST || e->state == SHM_ABORTED) return e->lost ? e->lost : HR_ERR_PEER_LOST;
    if (e->lost) return HR_AGAIN;
    if (e->state != SHM_UP) return HR_ERR_INVALID;
    if (e->pushing == SHM_PUSHING && (status = hr_shm_push(e)) != HR_OK) return status;
    if (ring_tx_fits(&e->tx, n + SHM_RESERVE)) return HR_OK;
    return hr_shm_room(e, n + SHM_RESERVE);
}

/*
 * The ring's lines are in the consumer's cache since the turn before, and each store has to get its line from there.
 * How long that takes depends on where the two processors are, which for a virtual machine changes while it runs. Zen
 * 4, per byte of 64 KiB, and then for the message as a whole, one way:
 *
 *     a cache in common          0.02 ns    2.4 us    past the cache 8.5 us
 *     none                       0.15 ns     10 us                     8 us
 *     none, for seconds, often   0.6 ns      40 us                     8 us
 *
 * So where it takes longer than memory would, payloads are written past the cache for a while, then tried again.
 */
#define FAR_MIN (32u << 10)
#define FAR_BYTES 4 /* in a nanosecond; slower is far. Payload that comes from memory is twice as fast */
#define FAR_ROW 3   /* one alone may have been interrupted */
#define FAR_NS (20 * 1000 * 1000)

void hr_shm_wrote(struct shm_ep *e, size_t len, int64_t start, int64_t end) {
    e->far = (uint64_t)(end - start) * FAR_BYTES > len ? e->far + 1 : 0;
    if (e->far < FAR_ROW) return;
    e->far_until = end + FAR_NS;
    e->far = FAR_ROW - 1; /* the first that is tried again decides */
}

/*
 * What is made in the ring is stored there vector by vector, and each waits for its line; a long copy's stores (`rep
 * movsb`) do not. Zen 5, GB/s, 16 KiB at a time: 40 and 26 where the two share a cache, 7 and 27 where they do not. So
 * each payload is made the faster way, and now and then the other.
 */
#define MADE_TRIAL 64
#define MADE_GAIN 0.8 /* of the time: less is worth no change */

static int made_elsewhere(struct shm_ep *e) {
    int faster = e->made[1] < MADE_GAIN * e->made[0];
    return e->nmade++ % MADE_TRIAL == MADE_TRIAL - 1 ? !faster : faster;
}

/* One that was interrupted counts little. */
static void made(struct shm_ep *e, int way, double ns) {
    double *known = &e->made[way];
    if (*known > 0 && ns > 4 * *known) ns = 4 * *known;
    *known += *known > 0 ? (ns - *known) / 4 : ns;
}

static void make_payload(struct shm_ep *e, uint8_t *to, const struct hr_msg *msg) {
    int64_t start = msg->len < FAR_MIN ? 0 : hr_now();
    int far = start && start < e->far_until, way = far || (start && made_elsewhere(e));
    msg->fill(msg->cookie, way ? NULL : to);
    if (way) hr_copy(to, msg->payload, msg->len, far ? HR_STORE_UNREAD : HR_STORE_SHARED);
    if (start && !far) made(e, way, (double)(hr_now() - start) / (double)msg->len);
}

static void put_payload(struct shm_ep *e, uint8_t *to, const struct hr_msg *msg) {
    size_t len = msg->len;
    int64_t start = len < FAR_MIN ? 0 : hr_now();
    int far = start && start < e->far_until;
    hr_copy(to, msg->payload, len, far ? HR_STORE_UNREAD : HR_STORE_SHARED);
    if (start && !far) hr_shm_wrote(e, len, start, hr_now());
}

static inline hr_status has_room(struct shm_ep *e, uint64_t n) {
    int usual = e->state == SHM_UP && !e->special && ring_tx_fits(&e->tx, n + SHM_RESERVE);
    return __builtin_expect(usual, 1) ? HR_OK : may_send(e, n);
}

hr_status hr_shm_post_send(struct hr_ep *ep, const struct hr_msg *msg) {
    struct shm_ep *e = shm_ep(ep);
    size_t hdr_len = msg->hdr_len, len = msg->len;
    uint64_t n, shown;
    int show = msg->same && len >= SHM_SHOWN;
    hr_status status;
    uint8_t *at;

    if (hdr_len < 8 || hdr_len > HR_MAX_HDR || hdr_len % 8 || len > shm_ep_domain(e)->base.caps.max_send)
        return HR_ERR_INVALID;
    n = ring_record(hdr_len, show ? sizeof shown : len);
    if ((status = has_room(e, n)) != HR_OK) return status;
    if (show && !hr_shm_board_put(e, msg, &shown)) {
        show = 0;
        n = ring_record(hdr_len, len);
        if ((status = has_room(e, n)) != HR_OK) return status;
    }
    at = ring_tx_at(&e->tx);
    for (size_t i = 0; i < hdr_len; i += 8) memcpy(at + i, (const uint8_t *)msg->hdr + i, 8);
    if (show) {
        memcpy(at + hdr_len, &shown, sizeof shown);
        if (e->shown == e->taken) e->from = shown;
        e->shown = ring_lines(shown + len);
    } else if (len == 8 && !msg->fill)
        memcpy(at + hdr_len, msg->payload, 8);
    else if (len && msg->fill)
        make_payload(e, at + ring_payload(hdr_len, len), msg);
    else if (len)
        put_payload(e, at + ring_payload(hdr_len, len), msg);
    if (ring_tx_publish(&e->tx, ring_word(show ? RING_SHOWN : RING_MSG, hdr_len, len), n)) hr_shm_wake(e);
    return HR_OK;
}

static int deliver_shown(struct shm_ep *e, const uint8_t *hdr, size_t hdr_len, size_t len) {
    const uint8_t *payload;
    uint64_t at;
    memcpy(&at, hdr + hdr_len, sizeof at);
    payload = hr_shm_board_at(e, at, len);
    if (!payload) return 0;
    ring_rx_fetch(payload, len);
    shm_ep_domain(e)->base.sink->recv(&e->base, hdr, hdr_len, payload, len);
    e->read = ring_lines(at + len);
    if (e->read - e->said >= SHM_BOARD / 4) hr_shm_board_say(e);
    return 1;
}

/* A record of any kind; 0: it makes no sense. */
static inline int deliver(struct shm_ep *e, uint64_t word) {
    size_t hdr_len = ring_word_hdr_len(word), len = ring_word_len(word), held = ring_word_held(word);
    const uint8_t *at = ring_rx_at(&e->rx), *payload;

    if (!ring_word_marked(word) || hdr_len < 8 || hdr_len > HR_MAX_HDR || hdr_len % 8 || len > e->longest) return 0;
    payload = at + ring_payload(hdr_len, held);
    ring_rx_fetch(at, hdr_len + held);
    if (ring_word_kind(word) == RING_MSG)
        shm_ep_domain(e)->base.sink->recv(&e->base, at, hdr_len, payload, len);
    else if (ring_word_kind(word) == RING_SHOWN ? !deliver_shown(e, at, hdr_len, len)
                                                : !hr_shm_on_remote(e, ring_word_kind(word), at, hdr_len, payload, len))
        return 0;
    ring_tx_again(&e->tx);
    if (ring_rx_consume(&e->rx, ring_record(hdr_len, held))) hr_shm_wake(e);
    return 1;
}

/* Only when the ring is empty: a peer that died has its last records delivered first. */
static int poll_special(struct shm_ep *e) {
    if (!e->lost) return hr_shm_poll_push(e);
    hr_shm_report(e);
    return 1;
}

/* After so much in one pass whoever waits for just that leaves before the next payload, which its receive would find
 * unexpected, and copied once more. What has none, as answers, goes with it. */
#define ENOUGH (4u << 10)

int hr_shm_ep_poll(struct shm_ep *e, int budget) {
    int n = 0, more = 0;
    uint64_t got = 0, word;

    if (e->state != SHM_UP || (e->lost && e->lost != HR_ERR_PEER_LOST)) goto special;
    while (n < budget && (word = ring_rx_word(&e->rx))) {
        if (got >= ENOUGH && ring_word_len(word)) {
            more = 1;
            break;
        }
        if (!deliver(e, word)) {
            if (e->lost && e->lost != HR_ERR_PEER_LOST) break; /* it is known why */
            e->lost = HR_OK;                                   /* dead or not: what it sent is the better reason */
            hr_shm_lose(e, HR_ERR_PROTOCOL, "process %d damaged the ring: record word %016llx at %llu", (int)e->pid,
                        (unsigned long long)word, (unsigned long long)e->rx.pos);
            break;
        }
        got += ring_word_len(word);
        n++;
    }
special:
    if (__builtin_expect(e->special, 0) && n < budget && e->state == SHM_UP && !(more && e->lost)) n += poll_special(e);
    return n;
}
