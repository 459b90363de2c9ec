/* conformance_message.c - messages: whole, in order, bounded, fair, and taken back. */

#include "conformance.h"

TEST(messages_of_all_sizes) {
    RIG(rig);
    PAIR(rig, a, b);
    size_t max = rig.side[0].domain->caps.max_send;
    struct op *op = op_new(max);
    uint64_t n = 0;
    for (size_t size = 0; size <= max; size = size < 130 ? size + 1 : size * 3 / 2) {
        for (int way = 0; way < 2; way++) {
            struct end *from = way ? b : a, *to = way ? a : b;
            for (int off = -1; off <= 1; off++) {
                size_t len = size + (size_t)off;
                hr_status status;
                if (len > max) continue;
                WAIT(rig, (status = end_send(from, len, op)) != HR_AGAIN);
                CHECK(status == HR_OK || status == HR_INPROGRESS);
                WAIT(rig, op->state != OP_OPEN);
                WAIT(rig, to->next_rx == from->next_tx);
            }
        }
        n++;
    }
    CHECK_EQ(end_send(a, max, op) < 0, 0);
    WAIT(rig, op->state != OP_OPEN && b->next_rx == a->next_tx);
    CHECK(n > 140);
}

TEST(message_that_is_too_large) {
    RIG(rig);
    PAIR(rig, a, b);
    struct op *op = op_new((size_t)rig.side[0].domain->caps.max_send + 1);
    CHECK_EQ(end_send(a, op->cap, op), HR_ERR_INVALID);
    CHECK_EQ(end_send(a, 9, op), HR_OK); /* only that request failed */
    WAIT(rig, b->next_rx == 1);
}

/* ---- streams ---- */

enum { SLOTS = 32, STREAM = 5000 };

struct stream {
    struct end *end;
    struct op *ops[SLOTS];
    uint64_t count, random;
    size_t max;
};

static void stream_init(struct stream *s, struct end *end, uint64_t count, size_t max) {
    *s = (struct stream){.end = end, .count = count, .max = max, .random = 88172645463325252u + end->side->id};
    for (int i = 0; i < SLOTS; i++) s->ops[i] = op_new(max);
}

static size_t next_size(struct stream *s) {
    s->random ^= s->random << 13;
    s->random ^= s->random >> 7;
    s->random ^= s->random << 17;
    /* Mostly small, sometimes as large as can be. */
    return s->random % (s->random % 16 && s->max > 300 ? 300 : s->max + 1);
}

/* Posts as much as is taken; returns whether more could be posted at once. */
static int stream_work(struct side *side) {
    struct stream *s = side->arg;
    for (int i = 0; i < SLOTS && s->end->next_tx < s->count; i++) {
        uint64_t random = s->random;
        hr_status status;
        if (s->ops[i]->state == OP_OPEN) continue;
        if (s->ops[i]->state == OP_ENDED) CHECK_EQ(s->ops[i]->status, HR_OK);
        status = end_send(s->end, next_size(s), s->ops[i]);
        if (status == HR_AGAIN) { /* the same message next time */
            s->random = random;
            return 0;
        }
        CHECK(!hr_is_error(status));
    }
    return s->end->next_tx < s->count && s->ops[0]->state != OP_OPEN;
}

static int stream_idle(const struct stream *s) {
    for (int i = 0; i < SLOTS; i++)
        if (s->ops[i]->state == OP_OPEN || (s->ops[i]->state == OP_ENDED && s->ops[i]->status != HR_OK)) return 0;
    return 1;
}

static void stream_start(struct stream *s) {
    s->end->side->arg = s;
    s->end->side->work = stream_work;
    side_kick(s->end->side);
}

TEST(streams_both_ways_in_order) {
    struct stream sa, sb;
    RIG(rig);
    PAIR(rig, a, b);
    stream_init(&sa, a, STREAM, rig.side[0].domain->caps.max_send);
    stream_init(&sb, b, STREAM, rig.side[1].domain->caps.max_send);
    stream_start(&sa);
    stream_start(&sb);
    WAIT(rig, a->next_rx == STREAM && b->next_rx == STREAM);
    WAIT(rig, stream_idle(&sa) && stream_idle(&sb)); /* done came once for each that was in progress */
    rig.side[0].work = rig.side[1].work = NULL;
}

TEST(a_peer_that_does_not_look) {
    struct stream s;
    RIG(rig);
    PAIR(rig, a, b);
    const uint64_t bound = 256 << 20; /* no provider may take that much from a sender on behalf of a peer that sleeps */
    size_t size = 4096;
    uint64_t taken;
    struct op *ops[1024];
    int n = 0;

    for (int i = 0; i < 1024; i++) ops[i] = op_new(size);
    rig.side[1].paused = 1;
    for (int idle = 0; idle < 50 && a->next_tx * size < bound;) {
        while (n < 1024 && ops[n]->state == OP_OPEN) n++;
        if (n == 1024) n = 0;
        if (ops[n]->state != OP_OPEN && end_send(a, size, ops[n]) != HR_AGAIN) {
            idle = 0;
            continue;
        }
        idle++;
        rig_pump(&rig);
    }
    CHECK(a->next_tx * size < bound);
    CHECK(a->next_tx > 0);
    taken = a->next_tx;
    rig.side[1].paused = 0;
    side_kick(&rig.side[1]);
    WAIT(rig, b->next_rx == taken);
    for (int i = 0; i < 1024; i++) WAIT(rig, ops[i]->state != OP_OPEN);
    stream_init(&s, a, taken + 500, size);
    stream_start(&s);
    WAIT(rig, b->next_rx == taken + 500);
    rig.side[0].work = NULL;
}

/* A callback may post on any endpoint. */
static void echo(struct end *end, uint64_t seq) {
    struct op *op = end->arg;
    (void)seq;
    if (op->state == OP_OPEN || end_send(end, 24, op) == HR_AGAIN) CHECK(!"room for one message in a ping-pong");
}

TEST(posting_from_a_callback) {
    RIG(rig);
    PAIR(rig, a, b);
    a->arg = op_new(24);
    b->arg = op_new(24);
    a->on_recv = b->on_recv = echo;
    CHECK_EQ(end_send(a, 24, op_new(24)), HR_OK);
    WAIT(rig, a->next_rx > 2000);
    a->on_recv = b->on_recv = NULL;
}

/* ---- what was accepted ---- */

TEST(unsent_returns_to_nothing) {
    struct stream s;
    RIG(rig);
    PAIR(rig, a, b);
    stream_init(&s, a, 200, rig.side[0].domain->caps.max_send);
    stream_start(&s);
    WAIT(rig, b->next_rx == 200);
    rig.side[0].work = NULL;
    WAIT(rig, a->side->domain->ops->ep_unsent(a->ep) == 0);
}

TEST(cancel) {
    RIG(rig);
    PAIR(rig, a, b);
    enum { N = 512 };
    struct op *ops[N], *last = op_new(8);
    size_t size = rig.side[0].domain->caps.max_send;
    int open[N], nopen = 0, canceled = 0;

    if (size > 65536) size = 65536;
    b->gaps = 1;
    rig.side[1].paused = 1;
    for (int i = 0, idle = 0; i < N && idle < 50;) {
        ops[i] = op_new(size);
        switch (end_send(a, size, ops[i])) {
        case HR_INPROGRESS: open[nopen++] = i; break;
        case HR_AGAIN: idle++, rig_pump(&rig); continue;
        default: break;
        }
        i++;
    }
    for (int i = 0; i < nopen; i += 2) {
        struct op *op = ops[open[i]];
        hr_status status;
        if (op->state != OP_OPEN) continue;
        status = a->side->domain->ops->cancel(a->ep, op);
        CHECK(status == HR_OK || status == HR_ERR_UNSUPPORTED);
        if (status != HR_OK) continue;
        op->state = OP_FREE;         /* a done from now on is noted as one too many */
        memset(op->buf, 0xdd, size); /* and what still leaves must leave from elsewhere */
        canceled++;
    }
    rig.side[1].paused = 0;
    side_kick(&rig.side[1]);
    for (int i = 0; i < nopen; i++) WAIT(rig, ops[open[i]]->state != OP_OPEN);
    WAIT(rig, end_send(a, 8, last) != HR_AGAIN);
    WAIT(rig, b->next_rx == a->next_tx && last->state != OP_OPEN);
    if (!canceled) SKIP("nothing stayed in progress that could be canceled");
}

/* ---- fairness ---- */

TEST(a_busy_hint_does_not_starve_others) {
    enum { N = 8 };
    struct stream s;
    RIG(rig);
    struct end *a[N], *b[N];
    struct op *op = op_new(16);
    for (int i = 0; i < N; i++)
        if (!rig_pair(&rig, &a[i], &b[i])) return;
    stream_init(&s, a[0], UINT32_MAX, 256);
    stream_start(&s);
    rig.side[1].hint = b[0]->ep;
    WAIT(rig, b[0]->next_rx > 1000);
    for (int round = 1; round <= 20; round++) {
        uint64_t passes = rig.side[1].passes;
        for (int i = 1; i < N; i++) WAIT(rig, end_send(a[i], 16, op) == HR_OK);
        for (int i = 1; i < N; i++) WAIT(rig, b[i]->next_rx == (uint64_t)round);
        CHECK(rig.threads || rig.side[1].passes - passes < 2000);
    }
    rig.side[0].work = NULL;
}
