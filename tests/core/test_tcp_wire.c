/* test_tcp_wire.c - the tcp provider against a peer made by hand: frames cut anywhere, garbage, lies. */

#include <arpa/inet.h>
#include <netinet/tcp.h>

#include "tcp_rig.h"

enum { REGION = 4096 };

/* A domain (node 1, passive) and a socket that speaks the protocol as node 2. */
struct bench {
    struct node n;
    struct conn c;
    int fd;
    struct hr_mem mem;
    struct hr_desc desc;
    uint64_t key;
};
/* The region lies between two guards that nobody may change. */
static uint8_t memory[3 * REGION] __attribute__((aligned(64)));
static uint8_t *const region = memory + REGION;

static int dial(const struct node *n) {
    struct sockaddr_in at = {.sin_family = AF_INET};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    REQUIRE(n->addr[10] == 4);
    memcpy(&at.sin_port, n->addr + 11, 2);
    memcpy(&at.sin_addr, n->addr + 13, 4);
    REQUIRE(!connect(fd, (void *)&at, sizeof at));
    REQUIRE(!setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    return fd;
}

static void put(struct bench *b, const void *bytes, size_t len) {
    CHECK_EQ(send(b->fd, bytes, len, MSG_NOSIGNAL), len);
    tcp->progress(b->n.domain, 8, NULL);
    tcp->progress(b->n.domain, 8, NULL);
}

/* Waits for exactly len bytes. */
static int get(struct bench *b, void *bytes, size_t len) {
    double end = rig_seconds() + 5;
    for (size_t have = 0; have < len && rig_seconds() < end;) {
        tcp->progress(b->n.domain, 8, NULL);
        ssize_t n = recv(b->fd, (char *)bytes + have, len - have, MSG_DONTWAIT);
        if (n > 0) have += (size_t)n;
        if (n == 0) return 0;
        if (have == len) return 1;
    }
    return len == 0;
}

static void bench_connect(struct bench *b) {
    struct hr_handshake hs;
    struct hr_tcp_open open = {HR_TCP_OPEN_MAGIC, HR_TCP_OPEN_VERSION, 0}, answer;
    int want_write;
    hr_status status;
    conn_start(&b->c, &b->n, 2, b->n.addr, b->n.addr_len, 0);
    b->fd = dial(&b->n);
    hr_handshake_start(&hs, &b->n.auth, 1, 2, 1);
    while ((status = hr_handshake_step(&hs, b->fd, &want_write)) == HR_AGAIN) tcp->progress(b->n.domain, 8, NULL);
    REQUIRE(status == HR_OK);
    put(b, &open, sizeof open);
    REQUIRE(get(b, &answer, sizeof answer) && memcmp(&open, &answer, sizeof open) == 0);
    RUN(&b->n, NULL, b->c.ups);
    REQUIRE(tcp->mem_register(b->n.domain, region, REGION,
                              HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_ATOMIC,
                              &b->mem) == HR_OK);
    b->key = b->mem.rkey;
}

static void bench_open(struct bench *b) {
    memset(b, 0, sizeof *b);
    node_open(&b->n, 1, "127.0.0.1", NULL);
    bench_connect(b);
}

static void bench_disconnect(struct bench *b) {
    tcp->mem_deregister(b->n.domain, &b->mem);
    tcp->ep_destroy(b->c.ep);
    close(b->fd);
}

static void bench_close(struct bench *b) {
    bench_disconnect(b);
    tcp->domain_close(b->n.domain);
}

static size_t frame(uint8_t *out, int type, int flags, const void *hdr, size_t hdr_len, const void *payload,
                    size_t len) {
    struct hr_tcp_frame f = {(uint8_t)type, (uint8_t)hdr_len, (uint16_t)flags, HR_TCP_GUARD, len};
    memcpy(out, &f, sizeof f);
    memcpy(out + sizeof f, hdr, hdr_len);
    if (payload) memcpy(out + sizeof f + hdr_len, payload, len);
    return sizeof f + hdr_len + (payload ? len : 0);
}

/* One of each frame that a peer may send unasked; 40 bytes of payload where there is one. */
static size_t one_of(struct bench *b, int type, uint8_t *out, const uint8_t *payload) {
    struct hr_tcp_write write = {b->key, 100, 77};
    struct hr_tcp_read read = {5, b->key, 100, 40};
    struct hr_tcp_atomic atomic = {6, b->key, 8, HR_ATOMIC_FETCH_ADD, 3, 0};
    switch (type) {
    case HR_TCP_MSG: return frame(out, type, 0, "a header of 24 bytes....", 24, payload, 40);
    case HR_TCP_WRITE: return frame(out, type, HR_TCP_NOTIFY, &write, sizeof write, payload, 40);
    case HR_TCP_READ: return frame(out, type, 0, &read, sizeof read, NULL, 0);
    default: return frame(out, type, 0, &atomic, sizeof atomic, NULL, 0);
    }
}

static void expect(struct bench *b, int type, const uint8_t *payload, int round) {
    struct {
        struct hr_tcp_frame f;
        struct hr_tcp_read_data data;
        uint8_t payload[40];
    } answer;
    struct {
        struct hr_tcp_frame f;
        struct hr_tcp_atomic_data data;
    } added;
    uint64_t counter;
    int before;
    switch (type) {
    case HR_TCP_MSG:
        RUN(&b->n, NULL, b->c.messages == round);
        CHECK_EQ(b->c.hdr_len, 24);
        CHECK_MEM(b->c.hdr, "a header of 24 bytes....", 24);
        CHECK_MEM(b->c.data, payload, 40);
        b->c.filled = 0;
        break;
    case HR_TCP_WRITE:
        RUN(&b->n, NULL, b->c.notifies == round);
        CHECK_EQ(b->c.value, 77);
        CHECK_EQ(b->c.nbytes, 40);
        CHECK_MEM(region + 100, payload, 40);
        break;
    case HR_TCP_READ:
        REQUIRE(get(b, &answer, sizeof answer));
        CHECK(answer.data.id == 5 && answer.data.status == HR_OK && answer.f.len == 40);
        CHECK_MEM(answer.payload, region + 100, 40);
        break;
    default:
        before = (round - 1) * 3;
        REQUIRE(get(b, &added, sizeof added));
        CHECK(added.data.id == 6 && added.data.status == HR_OK);
        CHECK_EQ(added.data.value, before);
        memcpy(&counter, region + 8, 8);
        CHECK_EQ(counter, before + 3);
    }
}

/* In two pieces cut at each byte, and then byte by byte. */
static void cut_everywhere(int type) {
    struct bench b;
    uint8_t bytes[256], payload[40], kept[4096];
    memset(memory, 0, sizeof memory);
    bench_open(&b);
    b.c.data = kept;
    int round = 0;
    for (size_t cut = 0;; cut++) {
        rig_fill(payload, sizeof payload, (uint32_t)cut);
        size_t len = one_of(&b, type, bytes, payload);
        if (cut == len) break;
        if (cut) put(&b, bytes, cut);
        if (type == HR_TCP_MSG) CHECK_EQ(b.c.messages, round);
        if (type == HR_TCP_WRITE) CHECK_EQ(b.c.notifies, round);
        put(&b, bytes + cut, len - cut);
        expect(&b, type, payload, ++round);
    }
    size_t len = one_of(&b, type, bytes, payload);
    for (size_t i = 0; i < len; i++) put(&b, bytes + i, 1);
    expect(&b, type, payload, ++round);
    CHECK_EQ(b.c.losses, 0);
    bench_close(&b);
}

TEST(messages_cut_everywhere) { cut_everywhere(HR_TCP_MSG); }
TEST(writes_cut_everywhere) { cut_everywhere(HR_TCP_WRITE); }
TEST(reads_cut_everywhere) { cut_everywhere(HR_TCP_READ); }
TEST(atomics_cut_everywhere) { cut_everywhere(HR_TCP_ATOMIC); }

/* Several messages in one read from the socket: none but the first begins at a multiple of 8. */
TEST(headers_are_aligned) {
    struct bench b;
    uint8_t bytes[512], kept[64];
    size_t len = 0;
    bench_open(&b);
    b.c.data = kept;
    for (int i = 0; i < 7; i++) len += frame(bytes + len, HR_TCP_MSG, 0, "12345678abcdefgh", 16, "xyz", 3);
    put(&b, bytes, len);
    RUN(&b.n, NULL, b.c.messages == 7); /* the callback looks at the address */
    CHECK_MEM(kept, "xyzxyzxyzxyzxyzxyzxyz", 21);
    CHECK_MEM(b.c.hdr, "12345678abcdefgh", 16);
    bench_close(&b);
}

/* The answer to a read of the domain's, cut everywhere, in two READ_DATA frames. */
TEST(answers_cut_everywhere) {
    struct bench b;
    uint8_t bytes[256], payload[40], local[40];
    struct hr_rmem rmem = {.rkey = 1234, .addr = 1000, .len = 500};
    struct {
        struct hr_tcp_frame f;
        struct hr_tcp_read read;
    } asked;
    bench_open(&b);
    int round = 0;
    for (size_t cut = 1, len = 0; cut == 1 || cut < len; cut++) {
        struct hr_rma rma = {.local = local, .len = 40, .remote = &rmem, .offset = 17};
        rig_fill(payload, sizeof payload, (uint32_t)cut);
        memset(local, 0, sizeof local);
        CHECK_EQ(tcp->post_read(b.c.ep, &rma), HR_INPROGRESS);
        REQUIRE(get(&b, &asked, sizeof asked));
        CHECK(asked.read.key == 1234 && asked.read.offset == 1017 && asked.read.nbytes == 40);
        struct hr_tcp_read_data data = {asked.read.id, HR_OK};
        len = frame(bytes, HR_TCP_READ_DATA, 0, &data, sizeof data, payload, 15);
        len += frame(bytes + len, HR_TCP_READ_DATA, 0, &data, sizeof data, payload + 15, 25);
        put(&b, bytes, cut);
        CHECK_EQ(b.c.dones, round);
        put(&b, bytes + cut, len - cut);
        round++;
        RUN(&b.n, NULL, b.c.dones == round);
        CHECK_EQ(b.c.done_status, HR_OK);
        CHECK_MEM(local, payload, 40);
    }
    CHECK_EQ(b.c.losses, 0);
    bench_close(&b);
}

/* Bytes of strangers, before the handshake is through. */
TEST(garbage_instead_of_a_handshake) {
    static const char *const texts[] = {"", "GET / HTTP/1.1\r\n\r\n", "hrdm", "\x16\x03\x01",
                                        "hrdm\x01\0\0\0aaaaaaaaaaaaaaaa"};
    struct bench b;
    bench_open(&b);
    int before = rig_fds();
    rig_strangers.n = 0;
    uint32_t seed = 1;
    for (int i = 0; i < 200; i++) {
        uint8_t bytes[300];
        size_t len = (size_t)(i * 7) % sizeof bytes;
        for (size_t k = 0; k < len; k++) bytes[k] = (uint8_t)((seed = seed * 1664525 + 1013904223) >> 24);
        if (i % 4 == 0) memcpy(bytes, texts[i / 4 % 5], strlen(texts[i / 4 % 5]));
        int fd = dial(&b.n);
        if (len) CHECK(send(fd, bytes, len, MSG_NOSIGNAL) == (ssize_t)len);
        rig_pump(&b.n, NULL, 0);
        close(fd);
        rig_pump(&b.n, NULL, 0);
    }
    RUN(&b.n, NULL, rig_fds() == before);
    CHECK_EQ(((struct hr_tcp_domain *)b.n.domain)->door.half_open, 0);
    CHECK_EQ(b.c.losses, 0);
    CHECK_EQ(rig_strangers.n, 1);
    CHECK(strstr(rig_strangers.text, "127.0.0.1:") && strstr(rig_strangers.text, "does not speak this protocol"));
    bench_close(&b);
}

/* What is not a frame, or an answer to nothing, ends this endpoint and no other. */
static void refused(size_t (*make)(struct bench *, uint8_t *)) {
    struct bench b;
    uint8_t bytes[8192];
    bench_open(&b);
    size_t len = make(&b, bytes);
    send(b.fd, bytes, len, MSG_NOSIGNAL);
    RUN(&b.n, NULL, b.c.losses);
    CHECK_EQ(b.c.loss, HR_ERR_PROTOCOL);
    CHECK(strstr(b.c.detail, "127.0.0.1"));
    CHECK_EQ(b.c.messages + b.c.dones + b.c.notifies, 0);
    bench_close(&b);
}

static size_t no_guard(struct bench *b, uint8_t *out) {
    size_t len = one_of(b, HR_TCP_WRITE, out, region);
    out[5] ^= 1;
    return len;
}
static size_t no_type(struct bench *b, uint8_t *out) {
    size_t len = one_of(b, HR_TCP_WRITE, out, region);
    out[0] = HR_TCP_TYPES;
    return len;
}
static size_t too_long(struct bench *b, uint8_t *out) {
    (void)b;
    size_t len = frame(out, HR_TCP_MSG, 0, "12345678", 8, NULL, 0);
    struct hr_tcp_frame f = {HR_TCP_MSG, 8, 0, HR_TCP_GUARD, HR_TCP_MAX_SEND + 1};
    memcpy(out, &f, sizeof f);
    return len;
}
static size_t odd_header(struct bench *b, uint8_t *out) {
    (void)b;
    return frame(out, HR_TCP_MSG, 0, "123456789abc", 12, NULL, 0);
}
static size_t long_header(struct bench *b, uint8_t *out) {
    (void)b;
    return frame(out, HR_TCP_MSG, 0, region, HR_MAX_HDR + 8, NULL, 0);
}
static size_t data_unasked(struct bench *b, uint8_t *out) {
    struct hr_tcp_read_data data = {9, HR_OK};
    (void)b;
    return frame(out, HR_TCP_READ_DATA, 0, &data, sizeof data, region, 8);
}
static size_t data_for_zero(struct bench *b, uint8_t *out) {
    struct hr_tcp_atomic_data data = {0, HR_OK, 5};
    (void)b;
    return frame(out, HR_TCP_ATOMIC_DATA, 0, &data, sizeof data, NULL, 0);
}
static size_t more_data_than_asked(struct bench *b, uint8_t *out) {
    struct hr_rmem rmem = {.rkey = 1, .len = 100};
    struct hr_rma rma = {.local = region, .len = 8, .remote = &rmem};
    struct hr_tcp_read_data data = {1, HR_OK};
    CHECK_EQ(tcp->post_read(b->c.ep, &rma), HR_INPROGRESS);
    return frame(out, HR_TCP_READ_DATA, 0, &data, sizeof data, region + 100, 9);
}

TEST(what_cannot_be_is_refused) {
    refused(no_guard);
    refused(no_type);
    refused(too_long);
    refused(odd_header);
    refused(long_header);
    refused(data_unasked);
    refused(data_for_zero);
    refused(more_data_than_asked);
}

TEST(more_reads_than_allowed) {
    struct bench b;
    uint8_t bytes[256];
    int small = 4096;
    memset(memory, 0, sizeof memory);
    bench_open(&b);
    setsockopt(((struct hr_tcp_ep *)b.c.ep)->source.fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    /* Nobody reads the answers: they pile up, and at most HR_TCP_READS of them may. */
    struct hr_tcp_read read = {1, b.key, 0, REGION};
    size_t len = frame(bytes, HR_TCP_READ, 0, &read, sizeof read, NULL, 0);
    for (int i = 0; i < 4000 && !b.c.losses; i++) {
        if (send(b.fd, bytes, len, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) break;
        tcp->progress(b.n.domain, 8, NULL);
    }
    RUN(&b.n, NULL, b.c.losses);
    CHECK_EQ(b.c.loss, HR_ERR_PROTOCOL);
    bench_close(&b);
}

/* Keys that were made up and ranges outside: nothing changes, the connection goes on. */
TEST(writes_to_nowhere) {
    struct bench b;
    uint8_t bytes[512], payload[200], before[sizeof memory];
    bench_open(&b);
    rig_fill(memory, sizeof memory, 3);
    memcpy(before, memory, sizeof memory);
    memset(payload, 0xee, sizeof payload);
    const struct hr_tcp_write writes[] = {{b.key + 1, 0, 1},        {b.key ^ 1ull << 32, 0, 1},  {0, 0, 1},
                                          {b.key, REGION - 199, 1}, {b.key, UINT64_MAX - 10, 1}, {b.key, REGION + 1, 1},
                                          {UINT64_MAX, 0, 1},       {b.key | 0xffffff, 0, 1}};
    for (size_t i = 0; i < sizeof writes / sizeof *writes; i++) {
        size_t len = frame(bytes, HR_TCP_WRITE, HR_TCP_NOTIFY, &writes[i], sizeof writes[i], payload, sizeof payload);
        len += frame(bytes + len, HR_TCP_MSG, 0, "12345678", 8, NULL, 0);
        put(&b, bytes, len);
        RUN(&b.n, NULL, b.c.messages == (int)i + 1);
    }
    CHECK_MEM(memory, before, sizeof memory);
    CHECK_EQ(b.c.notifies + b.c.losses, 0);
    bench_close(&b);
}

/* Valid streams with bytes changed at random: whatever comes of it, memory outside the region stays as it is. */
TEST(fuzz) {
    struct bench b;
    uint32_t seed = 12345;
    int lost = 0;
    memset(memory, 0x77, sizeof memory);
    memset(&b, 0, sizeof b);
    node_open(&b.n, 1, "127.0.0.1", NULL);
    for (int i = 0; i < 300; i++) {
        uint8_t bytes[4096], payload[40] = {0};
        size_t len = 0;
        bench_connect(&b);
        while (len < sizeof bytes - 256)
            len += one_of(&b, 1 + (int)((seed = seed * 1664525 + 1013904223) >> 24) % 3, bytes + len, payload);
        for (int k = 0; k < 1 + i % 4; k++) {
            seed = seed * 1664525 + 1013904223;
            bytes[(seed >> 8) % len] ^= (uint8_t)(1 + seed % 255);
        }
        for (size_t at = 0; at < len && !b.c.losses;) {
            size_t part = 1 + (seed = seed * 1664525 + 1013904223) % 1500;
            if (part > len - at) part = len - at;
            if (send(b.fd, bytes + at, part, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) break;
            tcp->progress(b.n.domain, 64, NULL);
            at += part;
        }
        rig_pump(&b.n, NULL, 0);
        rig_pump(&b.n, NULL, 0);
        lost += b.c.losses;
        bench_disconnect(&b);
    }
    tcp->domain_close(b.n.domain);
    CHECK(lost > 10); /* the fuzz does hit frames */
    for (int i = 0; i < REGION; i++) CHECK(memory[i] == 0x77 && memory[2 * REGION + i] == 0x77);
}
