/* test_mrcache.c - the registration cache over a provider that counts, fails on demand and knows what is registered. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "check.h"
#include "core/mrcache.h"
#include "hr/memory.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

#define LIVE 1024

/* The provider: mem_register notes the range; limits and barriers are set by the tests. */
struct fake {
    struct hr_domain domain;
    pthread_mutex_t lock;
    int registered, deregistered, failed;
    uint64_t bytes, limit; /* HR_ERR_NOMEM above */
    size_t refuse_above;   /* HR_ERR_IO for a longer range */
    uintptr_t begin, end;  /* of the last registration */
    pthread_barrier_t *meet;
    void (*meanwhile)(struct fake *fake); /* called in the middle of a registration */
    struct hr_mrcache *cache;
    void *addr;
    struct hr_mem live[LIVE]; /* what is registered, as far as there is room */
};

static hr_status fake_register(struct hr_domain *domain, void *addr, size_t len, uint32_t access,
                               struct hr_mem *mem_p) {
    struct fake *fake = (struct fake *)domain;
    hr_status status = HR_OK;
    if (fake->meanwhile) fake->meanwhile(fake);
    pthread_mutex_lock(&fake->lock);
    if (fake->refuse_above && len > fake->refuse_above)
        status = HR_ERR_IO;
    else if (fake->bytes + len > fake->limit)
        status = HR_ERR_NOMEM;
    if (status == HR_OK) {
        fake->registered++;
        fake->bytes += len;
        fake->begin = (uintptr_t)addr;
        fake->end = fake->begin + len;
        int i = 0;
        while (i < LIVE - 1 && fake->live[i].len) i++;
        *mem_p = fake->live[i] = (struct hr_mem){.addr = addr, .len = len, .access = access, .key = 1};
    } else {
        fake->failed++;
    }
    pthread_mutex_unlock(&fake->lock);
    if (fake->meet) pthread_barrier_wait(fake->meet);
    return status;
}

static void fake_deregister(struct hr_domain *domain, struct hr_mem *mem) {
    struct fake *fake = (struct fake *)domain;
    pthread_mutex_lock(&fake->lock);
    CHECK_EQ(mem->key, 1); /* twice would find 0 */
    mem->key = 0;
    int i = 0;
    while (i < LIVE - 1 &&
           (fake->live[i].addr != mem->addr || fake->live[i].len != mem->len || fake->live[i].access != mem->access))
        i++;
    fake->live[i].len = 0;
    fake->deregistered++;
    fake->bytes -= mem->len;
    pthread_mutex_unlock(&fake->lock);
}

static const struct hr_provider fake_provider = {
    .name = "fake", .mem_register = fake_register, .mem_deregister = fake_deregister};

static char detail[256];

static struct hr_mrcache *start(struct fake *fake, uint64_t max_bytes, uint32_t max_entries) {
    struct hr_mrcache *cache;
    memset(fake, 0, sizeof *fake);
    fake->domain.ops = &fake_provider;
    fake->limit = UINT64_MAX;
    pthread_mutex_init(&fake->lock, NULL);
    REQUIRE(hr_mrcache_new(&fake->domain, max_bytes, max_entries, &cache) == HR_OK);
    return cache;
}

static void finish(struct fake *fake, struct hr_mrcache *cache) {
    hr_mrcache_free(cache);
    CHECK_EQ(fake->registered, fake->deregistered);
    CHECK_EQ(fake->bytes, 0);
}

static struct hr_mr *get(struct hr_mrcache *cache, uintptr_t addr, size_t len, uint32_t access) {
    struct hr_mr *mr = NULL;
    char text[256];
    REQUIRE(hr_mrcache_get(cache, (void *)addr, len, access, &mr, text) == HR_OK);
    CHECK((uintptr_t)mr->mem.addr <= addr && (uintptr_t)mr->mem.addr + mr->mem.len >= addr + len);
    CHECK_EQ(mr->mem.access & access, access);
    return mr;
}

static void touch(struct hr_mrcache *cache, uintptr_t addr, size_t len) {
    hr_mrcache_put(cache, get(cache, addr, len, HR_ACCESS_LOCAL));
}

static struct hr_mrcache_stats stats(struct hr_mrcache *cache) {
    struct hr_mrcache_stats s;
    hr_mrcache_stats(cache, &s);
    return s;
}

static uint32_t next_random(uint32_t *seed) {
    *seed = *seed * 1664525 + 1013904223;
    return *seed >> 8;
}

#define BASE ((uintptr_t)1 << 40) /* nothing is mapped there, and nothing looks */

TEST(the_second_time_is_a_hit) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    touch(cache, BASE + 100, MIB);
    CHECK_EQ(fake.begin, BASE); /* whole pages */
    CHECK_EQ(fake.end, BASE + MIB + 4 * KIB);
    touch(cache, BASE + 100, MIB);
    touch(cache, BASE + MIB / 2, 10);
    touch(cache, BASE, 1);
    CHECK_EQ(fake.registered, 1);
    CHECK_EQ(stats(cache).hits, 3);
    CHECK_EQ(stats(cache).misses, 1);
    CHECK_EQ(stats(cache).entries, 1);
    CHECK_EQ(stats(cache).bytes, MIB + 4 * KIB);
    touch(cache, BASE + MIB, 8 * KIB); /* sticks out */
    CHECK_EQ(fake.registered, 2);
    finish(&fake, cache);
}

TEST(more_access_is_a_miss_less_is_a_hit) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    touch(cache, BASE, MIB);
    hr_mrcache_put(cache, get(cache, BASE, MIB, HR_ACCESS_REMOTE_READ));
    CHECK_EQ(fake.registered, 2);
    CHECK_EQ(fake.deregistered, 1); /* the local one is of no more use */
    touch(cache, BASE, MIB);
    CHECK_EQ(fake.registered, 2);
    finish(&fake, cache);
}

TEST(overlapping_registrations_merge) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    struct hr_mr *busy = get(cache, BASE, MIB, HR_ACCESS_LOCAL);
    touch(cache, BASE + 2 * MIB, MIB);
    touch(cache, BASE + 10 * MIB, MIB); /* not touched by what follows */
    touch(cache, BASE + MIB / 2, 2 * MIB);
    CHECK_EQ(fake.begin, BASE);
    CHECK_EQ(fake.end, BASE + 3 * MIB);
    CHECK_EQ(fake.registered, 4);
    CHECK_EQ(fake.deregistered, 1); /* the other old one has a user */
    hr_mrcache_put(cache, busy);
    CHECK_EQ(fake.deregistered, 2);
    CHECK_EQ(stats(cache).entries, 2);
    touch(cache, BASE, 3 * MIB);
    CHECK_EQ(fake.registered, 4);
    finish(&fake, cache);
}

TEST(a_union_that_cannot_be_registered_is_left) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    touch(cache, BASE, MIB);
    fake.refuse_above = MIB;
    touch(cache, BASE + MIB / 2, MIB);
    CHECK_EQ(fake.begin, BASE + MIB / 2);
    CHECK_EQ(fake.failed, 1);
    CHECK_EQ(fake.deregistered, 0);
    touch(cache, BASE, MIB);
    touch(cache, BASE + MIB / 2, MIB);
    CHECK_EQ(fake.registered, 2);
    finish(&fake, cache);
}

TEST(registrations_stay_under_4_GiB) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, UINT64_MAX, 100);
    struct hr_mr *mr = NULL;
    for (uintptr_t at = 0; at < 10 * GIB; at += GIB / 2) {
        touch(cache, BASE + at, GIB);
        CHECK(fake.end - fake.begin <= 2 * GIB);
    }
    for (uintptr_t at = 0; at < 10 * GIB; at += GIB / 2) touch(cache, BASE + at, GIB);
    CHECK_EQ(stats(cache).hits, 20 + (20 - fake.registered));
    CHECK_EQ(hr_mrcache_get(cache, (void *)BASE, GIB + 1, 0, &mr, detail), HR_ERR_INVALID);
    CHECK(strstr(detail, "1073741825") != NULL);
    CHECK_EQ(hr_mrcache_get(cache, (void *)BASE, 0, 0, &mr, detail), HR_ERR_INVALID);
    CHECK_EQ(hr_mrcache_get(cache, (void *)(UINTPTR_MAX - 10), 5, 0, &mr, detail), HR_ERR_INVALID);
    CHECK(!mr);
    finish(&fake, cache);
}

/* Against a search through all that the provider holds. */
TEST(whatever_covers_is_found) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, UINT64_MAX, UINT32_MAX);
    uint32_t seed = 5;
    int covered = 0;
    for (int step = 0; step < 20000; step++) {
        uintptr_t addr = BASE + next_random(&seed) % 4096 * 4 * KIB;
        size_t len = (1 + next_random(&seed) % 8) * 4 * KIB;
        uint32_t access = next_random(&seed) % 2;
        if (next_random(&seed) % 100 == 0) fake.refuse_above = fake.refuse_above ? 0 : 32 * KIB; /* no merging */
        size_t gone = next_random(&seed) % 8 ? 0 : 16 * len;
        int found = 0;
        hr_mrcache_invalidate(cache, (void *)addr, gone);
        for (int i = 0; i < LIVE; i++) {
            const struct hr_mem *m = &fake.live[i];
            uintptr_t begin = (uintptr_t)m->addr;
            CHECK(!m->len || begin >= addr + gone || begin + m->len <= addr || !gone);
            if (begin <= addr && addr + len <= begin + m->len && (m->access & access) == access) found = 1;
        }
        hr_mrcache_put(cache, get(cache, addr, len, access));
        covered += found;
        CHECK_EQ(stats(cache).hits, covered);
    }
    CHECK(covered > 1000 && fake.registered > 1000);
    finish(&fake, cache);
}

TEST(the_least_recently_used_goes_first) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, 3 * MIB, 100);
    for (uintptr_t i = 0; i < 3; i++) touch(cache, BASE + 10 * i * MIB, MIB);
    touch(cache, BASE, MIB);            /* now the second is the oldest */
    touch(cache, BASE + 30 * MIB, MIB); /* drives it out */
    CHECK_EQ(stats(cache).evictions, 1);
    CHECK_EQ(stats(cache).bytes, 3 * MIB);
    touch(cache, BASE, MIB);
    touch(cache, BASE + 20 * MIB, MIB);
    CHECK_EQ(fake.registered, 4);
    touch(cache, BASE + 10 * MIB, MIB);
    CHECK_EQ(fake.registered, 5);
    finish(&fake, cache);
}

TEST(entries_are_bounded_but_users_are_served) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 2);
    struct hr_mr *mrs[5];
    for (uintptr_t i = 0; i < 5; i++) mrs[i] = get(cache, BASE + 10 * i * MIB, MIB, HR_ACCESS_LOCAL);
    CHECK_EQ(stats(cache).entries, 5);
    CHECK_EQ(stats(cache).evictions, 0);
    for (int i = 0; i < 5; i++) hr_mrcache_put(cache, mrs[i]);
    CHECK_EQ(stats(cache).entries, 2);
    CHECK_EQ(fake.deregistered, 3);
    finish(&fake, cache);
}

TEST(no_bound_keeps_nothing) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, 0, 100);
    for (int i = 0; i < 3; i++) touch(cache, BASE, MIB);
    CHECK_EQ(fake.registered, 3);
    CHECK_EQ(fake.deregistered, 3);
    finish(&fake, cache);
}

TEST(over_the_limit_idle_ones_make_room) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    fake.limit = 4 * MIB;
    struct hr_mr *busy = get(cache, BASE, MIB, HR_ACCESS_LOCAL), *mr = NULL;
    for (uintptr_t i = 1; i < 4; i++) touch(cache, BASE + 10 * i * MIB, MIB);
    touch(cache, BASE + 40 * MIB, 2 * MIB);
    CHECK_EQ(stats(cache).evictions, 2);
    CHECK_EQ(fake.failed, 1);
    CHECK_EQ(hr_mrcache_get(cache, (void *)(BASE + 50 * MIB), 4 * MIB, 0, &mr, detail), HR_ERR_NOMEM);
    CHECK(!mr);
    CHECK(strstr(detail, "cannot register 4194304 bytes at 0x10003200000") != NULL);
    CHECK_EQ(stats(cache).entries, 1); /* everything idle was given up for it */
    hr_mrcache_put(cache, busy);
    finish(&fake, cache);
}

TEST(the_memlock_limit_is_named) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    struct hr_mr *mr;
    struct rlimit limit, small;
    REQUIRE(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    small = limit;
    small.rlim_cur = 64 * KIB;
    REQUIRE(setrlimit(RLIMIT_MEMLOCK, &small) == 0);
    fake.limit = 0;
    CHECK_EQ(hr_mrcache_get(cache, (void *)BASE, 10, 0, &mr, detail), HR_ERR_NOMEM);
    CHECK(strstr(detail, "limited to 64 KiB") && strstr(detail, "ulimit -l unlimited"));
    REQUIRE(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    fake.limit = UINT64_MAX;
    fake.refuse_above = 1;
    CHECK_EQ(hr_mrcache_get(cache, (void *)BASE, 10, 0, &mr, detail), HR_ERR_IO);
    CHECK(strstr(detail, "ulimit") == NULL);
    finish(&fake, cache);
}

TEST(invalidate) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    touch(cache, BASE, MIB);
    struct hr_mr *busy = get(cache, BASE + 2 * MIB, MIB, HR_ACCESS_LOCAL);
    touch(cache, BASE + 4 * MIB, MIB);
    touch(cache, BASE + 6 * MIB, MIB);
    hr_mrcache_invalidate(cache, (void *)(BASE + MIB), MIB);
    hr_mrcache_invalidate(cache, (void *)(BASE + 5 * MIB), 0);
    CHECK_EQ(fake.deregistered, 0); /* neighbours */
    hr_mrcache_invalidate(cache, (void *)(BASE + MIB - 1), 3 * MIB + 2);
    CHECK_EQ(fake.deregistered, 2); /* the first and the third; the second is in use */
    struct hr_mr *again = get(cache, BASE + 2 * MIB, MIB, HR_ACCESS_LOCAL);
    CHECK(again != busy);
    hr_mrcache_put(cache, busy);
    CHECK_EQ(fake.deregistered, 3);
    hr_mrcache_put(cache, again);
    touch(cache, BASE + 6 * MIB, MIB);
    CHECK_EQ(fake.registered, 5);
    finish(&fake, cache);
}

static void invalidate_it(struct fake *fake) {
    fake->meanwhile = NULL;
    hr_mrcache_invalidate(fake->cache, fake->addr, 1);
}

TEST(invalidate_during_registration) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    fake.cache = cache;
    fake.addr = (void *)BASE;
    fake.meanwhile = invalidate_it;
    touch(cache, BASE, MIB); /* served, and not kept */
    CHECK_EQ(fake.deregistered, 1);
    touch(cache, BASE, MIB);
    CHECK_EQ(fake.registered, 2);
    finish(&fake, cache);
}

TEST(what_a_peer_may_write_is_private) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    touch(cache, BASE, MIB);
    struct hr_mr *a = get(cache, BASE + 100, 1000, HR_ACCESS_REMOTE_WRITE);
    CHECK_EQ(fake.begin, BASE + 100); /* not a byte beside */
    CHECK_EQ(fake.end, BASE + 1100);
    struct hr_mr *b = get(cache, BASE + 100, 1000, HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_ATOMIC);
    CHECK(a != b);
    hr_mrcache_put(cache, a);
    CHECK_EQ(fake.deregistered, 1); /* at once: a peer that was given up must not write later */
    hr_mrcache_put(cache, b);
    CHECK_EQ(fake.deregistered, 2);
    finish(&fake, cache);
}

TEST(a_block_brings_its_arena) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    uint8_t *a = hr_arena_alloc(1000, 0), *b = hr_arena_alloc(100000, 0);
    struct hr_arena_info info;
    REQUIRE(a && b && hr_arena_find(a, 1, &info));
    touch(cache, (uintptr_t)a, 1000);
    CHECK_EQ(fake.begin, (uintptr_t)info.base);
    CHECK_EQ(fake.end - fake.begin, info.size);
    touch(cache, (uintptr_t)b, 100000);
    CHECK_EQ(fake.registered, 1);
    hr_mrcache_invalidate(cache, a, 1);
    fake.refuse_above = MIB; /* the arena is too much for the device */
    touch(cache, (uintptr_t)b, 100000);
    CHECK(fake.end - fake.begin < 110 * KIB);
    hr_arena_free(a);
    hr_arena_free(b);
    finish(&fake, cache);
}

/* Addresses are used again: arena, then other memory in its place, then an arena there. */
TEST(memory_that_changed_hands) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, 4 * GIB, 100);
    size_t len = 600 * MIB; /* more than is kept empty */
    uint8_t *block = hr_arena_alloc(len, 0);
    if (!block) SKIP("less than 600 MiB of memory free");
    touch(cache, (uintptr_t)block, len);
    hr_arena_free(block);
    touch(cache, BASE, 10); /* any miss */
    CHECK_EQ(fake.deregistered, 1);

    block = hr_arena_alloc(len, 0);
    REQUIRE(block);
    struct hr_mr *busy = get(cache, (uintptr_t)block, len, HR_ACCESS_LOCAL); /* a careless user */
    hr_arena_free(block);
    void *other = mmap(block, MIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    REQUIRE(other == block);
    struct hr_mr *mr = get(cache, (uintptr_t)other, 10, HR_ACCESS_LOCAL);
    CHECK(mr != busy);
    CHECK_EQ(mr->mem.len, 4 * KIB);
    hr_mrcache_put(cache, mr);
    hr_mrcache_put(cache, busy);
    CHECK_EQ(fake.deregistered, 2);
    munmap(other, MIB);
    finish(&fake, cache);
}

TEST(free_takes_what_was_not_put) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    get(cache, BASE, MIB, HR_ACCESS_LOCAL);
    get(cache, BASE + 100, 10, HR_ACCESS_REMOTE_WRITE);
    touch(cache, BASE + 10 * MIB, MIB);
    finish(&fake, cache);
    CHECK_EQ(fake.deregistered, 3);
}

struct thread {
    struct hr_mrcache *cache;
    struct hr_mr *mr;
    uint32_t seed;
};

static void *get_one(void *arg) {
    struct thread *t = arg;
    t->mr = get(t->cache, BASE, MIB, HR_ACCESS_LOCAL);
    return NULL;
}

/* Both register, because neither waits; one registration is kept. */
TEST(two_misses_at_once) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, GIB, 100);
    struct thread t[2] = {{cache, NULL, 0}, {cache, NULL, 0}};
    pthread_t threads[2];
    pthread_barrier_t meet;
    pthread_barrier_init(&meet, NULL, 2);
    fake.meet = &meet;
    for (int i = 0; i < 2; i++) REQUIRE(pthread_create(&threads[i], NULL, get_one, &t[i]) == 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&meet);
    CHECK(t[0].mr == t[1].mr);
    CHECK_EQ(fake.registered, 2);
    CHECK_EQ(fake.deregistered, 1);
    CHECK_EQ(stats(cache).entries, 1);
    for (int i = 0; i < 2; i++) hr_mrcache_put(cache, t[i].mr);
    CHECK_EQ(fake.deregistered, 1);
    finish(&fake, cache);
}

static void *churn(void *arg) {
    struct thread *t = arg;
    struct hr_mr *held[8] = {0};
    for (int step = 0; step < 5000; step++) {
        struct hr_mr **slot = &held[next_random(&t->seed) % 8], *mr = NULL;
        uintptr_t addr = BASE + next_random(&t->seed) % (256 * KIB);
        size_t len = 1 + next_random(&t->seed) % (64 * KIB);
        uint32_t access = next_random(&t->seed) % 8 ? next_random(&t->seed) % 2 : HR_ACCESS_REMOTE_WRITE;
        char text[256];
        if (step % 64 == 0) hr_mrcache_invalidate(t->cache, (void *)addr, len);
        if (*slot) {
            CHECK_EQ((*slot)->mem.key, 1); /* still registered */
            hr_mrcache_put(t->cache, *slot);
            *slot = NULL;
        } else if (hr_mrcache_get(t->cache, (void *)addr, len, access, &mr, text) == HR_OK) {
            uintptr_t begin = (uintptr_t)mr->mem.addr;
            CHECK(begin <= addr && addr + len <= begin + mr->mem.len && (mr->mem.access & access) == access);
            *slot = mr;
        }
    }
    for (int i = 0; i < 8; i++) {
        if (held[i]) hr_mrcache_put(t->cache, held[i]);
    }
    return NULL;
}

TEST(threads) {
    struct fake fake;
    struct hr_mrcache *cache = start(&fake, 512 * KIB, 20);
    fake.limit = 3 * MIB; /* reached now and then */
    struct thread t[4];
    pthread_t threads[4];
    for (uint32_t i = 0; i < 4; i++) {
        t[i] = (struct thread){cache, NULL, i};
        REQUIRE(pthread_create(&threads[i], NULL, churn, &t[i]) == 0);
    }
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    struct hr_mrcache_stats s = stats(cache);
    CHECK(s.hits > 100 && s.misses > 100 && s.evictions > 0);
    CHECK(s.bytes <= 512 * KIB && s.entries <= 20);
    CHECK_EQ(s.bytes, fake.bytes);
    CHECK_EQ(s.entries, fake.registered - fake.deregistered);
    finish(&fake, cache);
}
