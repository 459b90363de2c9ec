/* test_fault.c - every kind of fault does what it says, is counted, and is the same again with the same seed. */

#include <poll.h>
#include <sys/wait.h>
#include <time.h>

#include "check.h"
#include "hr/auth.h"
#include "hr/fault.h"

enum { MAX_LOG = 40000 };

/* Two domains, a with faults and b without, and what b and a were told. */
struct pair {
    struct hr_domain *a, *b;
    struct hr_ep *ea, *eb;
    int connected, lost_a, lost_b;
    uint32_t log[MAX_LOG]; /* sequence numbers in order of arrival */
    uint32_t len[MAX_LOG];
    int arrived, done, done_io;
};

static struct hr_auth auth;

static void on_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct pair *pair = ep->ctx;
    (void)payload;
    CHECK_EQ(hdr_len, 8);
    if (pair->arrived == MAX_LOG) return;
    memcpy(&pair->log[pair->arrived], hdr, 4);
    pair->len[pair->arrived++] = (uint32_t)len;
}
static void on_done(struct hr_ep *ep, void *cookie, hr_status status) {
    struct pair *pair = ep->ctx;
    (void)cookie;
    pair->done++;
    if (status == HR_ERR_IO) pair->done_io++;
}
static void on_notify(struct hr_ep *ep, uint64_t value, size_t nbytes) { (void)ep, (void)value, (void)nbytes; }
static void on_state(struct hr_ep *ep, hr_status status, const char *detail) {
    struct pair *pair = ep->ctx;
    (void)detail;
    if (status == HR_OK) pair->connected++;
    if (status != HR_OK) CHECK_EQ(status, HR_ERR_PEER_LOST);
    if (status != HR_OK) (*(ep == pair->ea ? &pair->lost_a : &pair->lost_b))++;
}
static const struct hr_sink sink = {on_recv, on_done, on_notify, on_state, NULL, NULL};

static hr_status domain_open(const char *provider, const char *inner, const char *options, uint64_t id,
                             struct hr_domain **domain_p, char detail[256]) {
    struct hr_domain_params params = {.self_id = id, .auth = &auth, .sink = &sink, .options = options};
    const struct hr_provider *ops = hr_provider_find(provider);
    if (inner) params.inner = hr_provider_find(inner);
    detail[0] = 0;
    return ops->domain_open(ops, &params, domain_p, detail);
}

static int64_t now(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static void pump(struct pair *pair) {
    pair->a->ops->progress(pair->a, 64, pair->ea);
    pair->b->ops->progress(pair->b, 64, pair->eb);
}
static void pump_for(struct pair *pair, int ms) {
    int64_t end = now() + ms * 1000000ll;
    while (now() < end) pump(pair);
    for (int turns = 0; turns < 100; turns++) pump(pair); /* it may have slept until then */
}

static struct pair *pair_open(const char *options) {
    struct pair *pair = calloc(1, sizeof *pair);
    uint8_t addr[2][HR_MAX_ADDR];
    size_t len[2];
    char detail[256];
    REQUIRE(pair);
    REQUIRE(domain_open("fault", "loop", options, 1, &pair->a, detail) == HR_OK);
    REQUIRE(domain_open("loop", NULL, NULL, 2, &pair->b, detail) == HR_OK);
    len[0] = pair->a->ops->domain_address(pair->a, addr[0]);
    len[1] = pair->b->ops->domain_address(pair->b, addr[1]);
    REQUIRE(pair->a->ops->ep_create(pair->a, 2, pair, &pair->ea) == HR_OK);
    REQUIRE(pair->b->ops->ep_create(pair->b, 1, pair, &pair->eb) == HR_OK);
    REQUIRE(pair->a->ops->ep_connect(pair->ea, addr[1], len[1], 1) == HR_OK);
    REQUIRE(pair->b->ops->ep_connect(pair->eb, addr[0], len[0], 0) == HR_OK);
    for (int i = 0; i < 10; i++) pump(pair);
    REQUIRE(pair->connected == 2);
    return pair;
}

static void pair_close(struct pair *pair) {
    if (pair->ea) pair->a->ops->ep_destroy(pair->ea);
    pair->b->ops->ep_destroy(pair->eb);
    pair->a->ops->domain_close(pair->a);
    pair->b->ops->domain_close(pair->b);
    free(pair);
}

static char payload[1000];

static hr_status send(struct pair *pair, uint64_t seq, size_t len) {
    struct hr_msg msg = {.hdr = &seq, .hdr_len = 8, .payload = payload, .len = len, .cookie = pair};
    return pair->a->ops->post_send(pair->ea, &msg);
}
static void send_many(struct pair *pair, int n) {
    for (int i = 0; i < n; i++) {
        hr_status status;
        while ((status = send(pair, (uint64_t)i, 100)) == HR_AGAIN) pump(pair);
        CHECK(status == HR_OK || status == HR_INPROGRESS || status == HR_ERR_IO);
    }
    pump_for(pair, 20);
}

static uint64_t count(struct pair *pair, const char *kind) {
    const char *names[HR_FAULT_KINDS];
    uint64_t values[HR_FAULT_KINDS];
    CHECK_EQ(hr_fault_counts(pair->a, names, values, HR_FAULT_KINDS), HR_FAULT_KINDS);
    for (int i = 0; i < HR_FAULT_KINDS; i++)
        if (strcmp(names[i], kind) == 0) return values[i];
    CHECK(!"such a kind");
    return 0;
}

/* ---- options ---- */

TEST(options_that_are_wrong_are_named) {
    static const char *const wrong[][2] = {
        {"frobnicate=1", "frobnicate"}, {"drop", "drop"},          {"drop=2", "drop=2"},
        {"drop=x", "drop=x"},           {"drop=nan", "drop=nan"},  {"error=-0.1", "error=-0.1"},
        {"delay=0.1", "delay=0.1"},     {"delay=0.1:5", "0.1:5"},  {"delay=0.1:xms", "0.1:xms"},
        {"kill=7", "kill=7"},           {"kill=after:", "after:"}, {"stop=process:7", "stop=process:7"},
        {"ops=send+jump", "ops=jump"},  {"seed=-1", "seed=-1"},    {"budget=1.5", "budget=1.5"},
        {"drop=0.6,error=0.6", "1.2"},  {"seed=1,drop=", "drop="},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct hr_domain *domain = NULL;
        char detail[256];
        CHECK_EQ(domain_open("fault", "loop", wrong[i][0], 1, &domain, detail), HR_ERR_INVALID);
        if (!strstr(detail, wrong[i][1])) CHECK_STR(detail, wrong[i][1]);
        CHECK(!domain);
    }
}

TEST(it_needs_something_to_wrap) {
    struct hr_domain *domain;
    char detail[256];
    const char *why = NULL;
    CHECK_EQ(domain_open("fault", NULL, NULL, 1, &domain, detail), HR_ERR_INVALID);
    CHECK(strstr(detail, "wrap"));
    CHECK_EQ(hr_provider_find("fault")->device_count(&why), 0);
    CHECK(why);
    CHECK(!hr_provider_find("no such provider"));
    for (int i = 0; hr_providers[i]; i++)
        CHECK(strcmp(hr_providers[i]->name, "fault") != 0); /* never chosen by itself */
}

TEST(no_options_no_faults) {
    struct pair *pair = pair_open("");
    const char *name;
    uint64_t value;
    char text[64];
    send_many(pair, 5000);
    CHECK_EQ(pair->arrived, 5000);
    for (int i = 0; i < 5000; i++) CHECK_EQ(pair->log[i], i);
    CHECK_EQ(count(pair, "drop") + count(pair, "error") + count(pair, "delay"), 0);
    CHECK_EQ(hr_fault_counts(pair->b, &name, &value, 1), 0);
    pair->a->ops->domain_describe(pair->a, text, sizeof text);
    CHECK(strncmp(text, "fault(loop: ", 12) == 0);
    pair_close(pair);
}

/* ---- faults by chance ---- */

TEST(drop) {
    struct pair *pair = pair_open("seed=3,drop=0.1");
    uint64_t dropped, before = hr_faults_fired();
    send_many(pair, 20000);
    dropped = count(pair, "drop");
    CHECK_EQ(hr_faults_fired() - before, dropped);
    CHECK_EQ((uint64_t)pair->arrived + dropped, 20000);
    CHECK(dropped > 1800 && dropped < 2200); /* 2000, standard deviation 42 */
    pair_close(pair);
}

TEST(a_seed_is_a_course_of_events) {
    struct pair *runs[3];
    static const char *const options[3] = {"seed=5,drop=0.2", "seed=5,drop=0.2", "seed=6,drop=0.2"};
    for (int i = 0; i < 3; i++) {
        runs[i] = pair_open(options[i]);
        send_many(runs[i], 1000);
    }
    CHECK_EQ(runs[0]->arrived, runs[1]->arrived);
    CHECK(memcmp(runs[0]->log, runs[1]->log, sizeof runs[0]->log) == 0);
    CHECK(memcmp(runs[0]->log, runs[2]->log, sizeof runs[0]->log) != 0);
    for (int i = 0; i < 3; i++) pair_close(runs[i]);
}

TEST(delay_keeps_the_order) {
    struct pair *pair = pair_open("delay=0.5:1ms");
    int64_t start = now();
    send_many(pair, 100);
    while (pair->arrived < 100 && now() - start < 5000000000) pump(pair);
    CHECK_EQ(pair->arrived, 100);
    for (int i = 0; i < 100; i++) CHECK_EQ(pair->log[i], i);
    CHECK(count(pair, "delay") > 20);
    pair_close(pair);
}

TEST(delay_takes_its_time_and_wakes) {
    struct pair *pair = pair_open("delay=1:30ms");
    struct pollfd fd = {.events = POLLIN};
    int64_t start = now();
    fd.fd = pair->a->ops->event_fd(pair->a);
    CHECK_EQ(send(pair, 0, 10), HR_INPROGRESS);
    CHECK_EQ(pair->a->ops->ep_unsent(pair->ea), 18);
    pump(pair);
    CHECK_EQ(pair->arrived, 0);
    CHECK_EQ(pair->a->ops->event_arm(pair->a), HR_OK);
    CHECK_EQ(poll(&fd, 1, 5000), 1);
    CHECK(now() - start >= 30000000);
    pair->a->ops->event_disarm(pair->a);
    CHECK_EQ(poll(&fd, 1, 0), 0);
    pump(pair);
    pump(pair);
    CHECK_EQ(pair->arrived, 1);
    CHECK_EQ(pair->done, 1);
    /* Posted while somebody sleeps: the timer is set for him. */
    CHECK_EQ(pair->a->ops->event_arm(pair->a), HR_OK);
    CHECK_EQ(send(pair, 1, 10), HR_INPROGRESS);
    CHECK_EQ(poll(&fd, 1, 5000), 1);
    pair_close(pair);
}

TEST(reorder_swaps_neighbours) {
    struct pair *pair = pair_open("seed=2,reorder=0.1");
    uint64_t swaps = 0;
    send_many(pair, 2000);
    CHECK_EQ(pair->arrived, 2000);
    for (int i = 0; i < pair->arrived; i++) {
        if (pair->log[i] == (uint32_t)i) continue;
        CHECK_EQ(pair->log[i], i + 1);
        CHECK_EQ(pair->log[i + 1], i);
        swaps++;
        i++;
    }
    CHECK(swaps > 50);
    CHECK_EQ(swaps, count(pair, "reorder"));
    pair_close(pair);
}

TEST(reorder_without_a_successor_is_none) {
    struct pair *pair = pair_open("reorder=1");
    int64_t start = now();
    CHECK_EQ(send(pair, 0, 10), HR_INPROGRESS);
    while (!pair->arrived && now() - start < 5000000000) pump(pair);
    CHECK_EQ(pair->arrived, 1);
    CHECK_EQ(count(pair, "reorder"), 0);
    pair_close(pair);
}

TEST(truncate) {
    struct pair *pair = pair_open("truncate=0.25");
    uint64_t cut = 0;
    send_many(pair, 2000);
    CHECK_EQ(pair->arrived, 2000);
    for (int i = 0; i < pair->arrived; i++) {
        CHECK(pair->len[i] == 100 || pair->len[i] == 50);
        cut += pair->len[i] == 50;
    }
    CHECK(cut > 300);
    CHECK_EQ(cut, count(pair, "truncate"));
    pair_close(pair);
}

TEST(error_by_return_and_by_done) {
    struct pair *pair = pair_open("error=0.2");
    uint64_t returned = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        hr_status status = send(pair, i, 10);
        CHECK(status == HR_OK || status == HR_ERR_IO || status == HR_INPROGRESS);
        returned += status == HR_ERR_IO;
        pump(pair);
    }
    pump_for(pair, 5);
    CHECK(returned > 50 && pair->done_io > 50);
    CHECK_EQ(pair->done, pair->done_io);
    CHECK_EQ(returned + (uint64_t)pair->done_io, count(pair, "error"));
    CHECK_EQ((uint64_t)pair->arrived + count(pair, "error"), 1000);
    pair_close(pair);
}

TEST(budget_bounds_the_faults) {
    struct pair *pair = pair_open("drop=0.5,budget=7");
    send_many(pair, 1000);
    CHECK_EQ(count(pair, "drop"), 7);
    CHECK_EQ(pair->arrived, 993);
    pair_close(pair);
}

/* ---- reads, ops and cancel ---- */

TEST(a_dropped_read_never_ends_and_can_be_canceled) {
    struct pair *pair = pair_open("drop=1,ops=read");
    static char memory[4096], local[4096];
    struct hr_mem reg;
    struct hr_desc desc;
    struct hr_rmem rmem;
    struct hr_rma rma = {.local = local, .len = sizeof local, .remote = &rmem, .cookie = local};
    CHECK_EQ(send(pair, 0, 100), HR_OK); /* ops: messages are spared */
    REQUIRE(pair->b->ops->mem_register(pair->b, memory, sizeof memory, HR_ACCESS_REMOTE_READ, &reg) == HR_OK);
    REQUIRE(pair->b->ops->mem_export(pair->eb, &reg, memory, sizeof memory, &desc) == HR_OK);
    REQUIRE(pair->a->ops->mem_import(pair->ea, &desc, &rmem) == HR_OK);
    memset(memory, 7, sizeof memory);
    CHECK_EQ(pair->a->ops->post_read(pair->ea, &rma), HR_INPROGRESS);
    pump_for(pair, 20);
    CHECK_EQ(pair->done, 0);
    CHECK_EQ(pair->arrived, 1);
    CHECK_EQ(pair->a->ops->cancel(pair->ea, local), HR_OK);
    CHECK_EQ(pair->a->ops->cancel(pair->ea, local), HR_ERR_UNSUPPORTED); /* nothing left here: the inner one's answer */
    CHECK_EQ(local[0], 0);
    CHECK_EQ(count(pair, "drop"), 1);
    pair->a->ops->mem_release(pair->ea, &rmem);
    pair->b->ops->mem_deregister(pair->b, &reg);
    pair_close(pair);
}

TEST(what_is_held_has_a_bound_and_abort_forgets_it) {
    struct pair *pair = pair_open("delay=1:20ms");
    int n = 0;
    while (send(pair, (uint64_t)n, 100) == HR_INPROGRESS && n < 10000) n++;
    CHECK(n > 8 && n < 1000);
    pair->a->ops->ep_abort(pair->ea);
    pump_for(pair, 40);
    CHECK_EQ(pair->done, 0);
    CHECK_EQ(pair->arrived, 0);
    CHECK_EQ(pair->lost_a, 0);
    CHECK_EQ(pair->lost_b, 1);
    pair_close(pair);
}

TEST(quiet_is_told_without_asking) {
    struct hr_mem mem = {0};
    for (int lies = 0; lies < 2; lies++) {
        struct pair *pair = pair_open(lies ? "drop=1,ops=quiet" : "drop=1,budget=1");
        CHECK_EQ(pair->a->ops->mem_quiet(pair->ea, &mem), HR_OK);
        CHECK_EQ(count(pair, "drop"), lies);
        CHECK_EQ(send(pair, 0, 10), HR_OK); /* only what was named is hit, and quiet only when it was */
        CHECK_EQ(count(pair, "drop"), 1);
        pump(pair);
        CHECK_EQ(pair->arrived, lies);
        pair_close(pair);
    }
}

/* ---- kill and stop ---- */

TEST(kill_aborts_the_endpoint) {
    struct pair *pair = pair_open("kill=after:10");
    for (uint64_t i = 0; i < 10; i++) CHECK_EQ(send(pair, i, 10), HR_OK);
    CHECK_EQ(send(pair, 10, 10), HR_AGAIN);
    CHECK_EQ(pair->lost_a, 0); /* never from inside post */
    pump(pair);
    CHECK_EQ(pair->lost_a, 1);
    pump(pair);
    CHECK_EQ(pair->lost_b, 1);
    CHECK_EQ(pair->arrived, 10);
    CHECK_EQ(send(pair, 11, 10), HR_ERR_PEER_LOST);
    CHECK_EQ(count(pair, "kill"), 1);
    pair_close(pair);
}

TEST(kill_of_the_process) {
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        struct pair *pair = pair_open("kill=process:3");
        for (uint64_t i = 0; i < 3; i++)
            if (send(pair, i, 10) != HR_OK) _exit(1);
        send(pair, 3, 10);
        _exit(2);
    }
    REQUIRE(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST(stop_of_the_process) {
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        struct pair *pair = pair_open("stop=after:3");
        for (uint64_t i = 0; i < 5; i++)
            if (send(pair, i, 10) != HR_OK) _exit(1);
        _exit(count(pair, "stop") == 1 && !check_failures() ? 0 : 2);
    }
    REQUIRE(pid > 0 && waitpid(pid, &status, WUNTRACED) == pid);
    CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    kill(pid, SIGCONT);
    REQUIRE(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
