/* test_arena.c - arenas: blocks, seals, huge pages, what is kept, look-up under changes, fork. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "check.h"
#include "core/arena_extents.h"
#include "core/arena_index.h"
#include "core/arena_pages.h"
#include "core/arena_room.h"
#include "hr/memory.h"

#define MIB ((size_t)1 << 20)

extern char **environ;

static uint32_t next_random(uint32_t *seed) {
    *seed = *seed * 1664525 + 1013904223;
    return *seed >> 8;
}

static struct hr_arena_info find(const void *addr) {
    struct hr_arena_info info = {0};
    CHECK(hr_arena_find(addr, 1, &info));
    return info;
}

static struct hr_arena_stats stats(void) {
    struct hr_arena_stats s;
    hr_arena_stats(&s);
    return s;
}

/* The treap against an array that says for each unit whose it is. */
TEST(extents_are_first_fit) {
    enum { UNITS = 512, STEPS = 20000 };
    struct hr_extents e;
    uint16_t owner[UNITS + 1] = {0}; /* start of its block + 1; 0 free */
    size_t used = 0, blocks = 0;
    uint32_t seed = 7;
    owner[UNITS] = UINT16_MAX;
    REQUIRE(hr_extents_init(&e, UNITS) == 0);
    for (int step = 0; step < STEPS; step++) {
        size_t longest = 0, run = 0, len = 1 + next_random(&seed) % 40, fit = SIZE_MAX;
        for (size_t i = 0; i < UNITS; i++) {
            run = owner[i] ? 0 : run + 1;
            if (run > longest) longest = run;
            if (fit == SIZE_MAX && run == len) fit = i + 1 - len;
        }
        CHECK_EQ(hr_extents_longest(&e), longest);
        CHECK_EQ(e.used, used);
        CHECK_EQ(e.blocks, blocks);
        size_t pick = next_random(&seed) % UNITS;
        if (next_random(&seed) % 2 || !owner[pick]) {
            CHECK_EQ(hr_extents_take(&e, len, len), fit);
            if (fit == SIZE_MAX) continue;
            for (size_t i = 0; i < len; i++) owner[fit + i] = (uint16_t)(fit + 1);
            used += len;
            blocks++;
        } else {
            size_t start = owner[pick] - 1u, end = pick;
            if (pick != start) CHECK_EQ(hr_extents_give(&e, pick), 0); /* the middle of a block is no block */
            while (owner[end] == start + 1) end++;
            CHECK_EQ(hr_extents_give(&e, start), end - start);
            CHECK_EQ(hr_extents_give(&e, start), 0);
            memset(owner + start, 0, (end - start) * sizeof *owner);
            used -= end - start;
            blocks--;
        }
    }
    for (size_t i = 0; i < UNITS; i++) hr_extents_give(&e, i);
    CHECK_EQ(hr_extents_longest(&e), UNITS);
    hr_extents_free(&e);
}

TEST(fresh_memory_is_zero_resident_and_aligned) {
    size_t len = 3 * MIB;
    uint8_t *block = hr_arena_alloc(len, 0), zero[4096] = {0};
    REQUIRE(block);
    struct hr_arena_info info = find(block);
    CHECK_EQ((uintptr_t)block % 64, 0);
    CHECK_EQ((uintptr_t)info.base % HR_HUGE_PAGE, 0);
    CHECK_EQ(info.size, 4 * MIB);
    for (size_t i = 0; i < len; i += sizeof zero) CHECK_MEM(block + i, zero, sizeof zero);
    uint8_t resident[4 * MIB / 4096];
    REQUIRE(mincore(info.base, info.size, resident) == 0);
    for (size_t i = 0; i < sizeof resident; i++) CHECK_EQ(resident[i] & 1, 1);
    hr_arena_free(block);
}

TEST(blocks_do_not_overlap) {
    enum { N = 200 };
    uint8_t *blocks[N];
    for (int i = 0; i < N; i++) {
        blocks[i] = hr_arena_alloc((size_t)i * 37, 0);
        REQUIRE(blocks[i]);
        CHECK_EQ((uintptr_t)blocks[i] % 64, 0);
        memset(blocks[i], i, (size_t)i * 37);
    }
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < i * 37; k++) CHECK_EQ(blocks[i][k], (uint8_t)i);
        for (int k = 0; k < i; k++) CHECK(blocks[i] != blocks[k]);
    }
    CHECK_EQ(find(blocks[0]).id, find(blocks[N - 1]).id);
    for (int i = 0; i < N; i++) hr_arena_free(blocks[i]);
    CHECK_EQ(stats().blocks, 0);
    CHECK_EQ(stats().bytes_used, 0);
}

TEST(huge_pages) {
    void *probe = mmap(NULL, 2 * HR_HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint8_t *aligned = (uint8_t *)(((uintptr_t)probe + HR_HUGE_PAGE - 1) / HR_HUGE_PAGE * HR_HUGE_PAGE);
    *aligned = 1;
    int can = madvise(aligned, HR_HUGE_PAGE, 25 /* MADV_COLLAPSE */) == 0;
    munmap(probe, 2 * HR_HUGE_PAGE);
    if (!can) SKIP("this kernel does not collapse shared memory into huge pages");
    struct hr_arena_stats before = stats();
    void *block = hr_arena_alloc(48 * MIB, 0);
    REQUIRE(block);
    struct hr_arena_stats after = stats();
    CHECK_EQ(after.bytes_mapped - before.bytes_mapped, 48 * MIB);
    CHECK(after.bytes_huge - before.bytes_huge >= 40 * MIB); /* a piece may fail under pressure */
    hr_arena_free(block);
}

/* Collapsing waits for all processors, and nothing ends that. */
TEST(small_pages_are_not_collapsed_and_are_their_own) {
    struct hr_arena_stats before = stats();
    uint8_t *scratch = hr_arena_alloc(3 * MIB, HR_ARENA_SMALL_PAGES);
    uint8_t *more = hr_arena_alloc(MIB / 2, HR_ARENA_SMALL_PAGES);
    REQUIRE(scratch && more);
    struct hr_arena_stats after = stats();
    CHECK_EQ(after.bytes_mapped - before.bytes_mapped, 4 * MIB);
    CHECK_EQ(after.bytes_huge, before.bytes_huge);
    CHECK_EQ(find(scratch).id, find(more).id);
    uint8_t *block = hr_arena_alloc(100, 0);
    CHECK(block && find(scratch).id != find(block).id);
    hr_arena_free(scratch);
    hr_arena_free(more);
    hr_arena_free(block);
}

TEST(peers_map_read_only) {
    uint8_t *block = hr_arena_alloc(100, 0);
    struct hr_arena_info info = find(block);
    strcpy((char *)block, "hello");
    uint8_t *peer = mmap(NULL, info.size, PROT_READ, MAP_SHARED, info.fd, 0);
    REQUIRE(peer != MAP_FAILED);
    CHECK_STR((char *)peer + (block - (uint8_t *)info.base), "hello");
    CHECK_EQ(mprotect(peer, info.size, PROT_READ | PROT_WRITE), -1);
    munmap(peer, info.size);
    CHECK(mmap(NULL, info.size, PROT_READ | PROT_WRITE, MAP_SHARED, info.fd, 0) == MAP_FAILED);
    CHECK_EQ(pwrite(info.fd, "x", 1, 0), -1);
    CHECK_EQ(fallocate(info.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
    CHECK_EQ(ftruncate(info.fd, 0), -1);
    CHECK_EQ(ftruncate(info.fd, 2 * (off_t)info.size), -1);
    CHECK_EQ(fcntl(info.fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
    CHECK(fcntl(info.fd, F_GETFD) & FD_CLOEXEC);
    hr_arena_free(block);
}

TEST(writable_arenas_are_apart) {
    uint8_t *block = hr_arena_alloc(100, HR_ARENA_WRITABLE_BY_PEERS), *other = hr_arena_alloc(100, 0);
    struct hr_arena_info info = find(block);
    CHECK_EQ(info.flags, HR_ARENA_WRITABLE_BY_PEERS);
    CHECK_EQ(find(other).flags, 0);
    uint8_t *peer = mmap(NULL, info.size, PROT_READ | PROT_WRITE, MAP_SHARED, info.fd, 0);
    REQUIRE(peer != MAP_FAILED);
    peer[block - (uint8_t *)info.base] = 42;
    CHECK_EQ(block[0], 42);
    munmap(peer, info.size);
    CHECK_EQ(ftruncate(info.fd, 0), -1);
    CHECK_EQ(fcntl(info.fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1); /* would spoil it for the other peers */
    hr_arena_free(block);
    hr_arena_free(other);
}

TEST(find_wants_the_whole_range) {
    struct hr_arena_info info = {.id = 99}, got;
    int local = 0;
    CHECK(!hr_arena_find(&local, sizeof local, &info));
    CHECK(!hr_arena_find(NULL, 0, &info));
    CHECK_EQ(info.id, 99); /* untouched on failure */
    uint8_t *block = hr_arena_alloc(1000, 0);
    info = find(block);
    uint8_t *base = info.base, *end = base + info.size;
    CHECK(hr_arena_find(base, info.size, &got));
    CHECK_EQ(got.base, base);
    CHECK(hr_arena_find(end - 1, 1, &got));
    CHECK(hr_arena_find(block, 0, &got));
    CHECK(!hr_arena_find(end - 1, 2, &got));
    CHECK(!hr_arena_find(end, 0, &got));
    CHECK(!hr_arena_find(base - 1, 2, &got));
    CHECK(!hr_arena_find(base, info.size + 1, &got));
    CHECK(!hr_arena_find(block, SIZE_MAX, &got));
    CHECK(hr_arena_alive(info.id));
    CHECK(!hr_arena_alive(0));
    CHECK(!hr_arena_alive(info.id + 1000));
    hr_arena_free(block);
}

TEST(a_big_block_has_its_own_arena_and_leaves_it_for_the_next) {
    uint8_t *small = hr_arena_alloc(100, 0), *big = hr_arena_alloc(33 * MIB, 0);
    REQUIRE(small && big);
    uint64_t id = find(big).id;
    CHECK(find(small).id != id);
    CHECK_EQ(find(big).size, 34 * MIB);
    memset(big, 1, 33 * MIB);
    hr_arena_free(big);
    CHECK(hr_arena_alive(id));
    CHECK_EQ(stats().blocks, 1);

    uint8_t *much_larger = hr_arena_alloc(50 * MIB, 0), *same = hr_arena_alloc(32 * MIB, 0);
    CHECK(find(much_larger).id != id);
    CHECK_EQ(find(same).id, id);
    uint8_t *again = hr_arena_alloc(33 * MIB, 0);
    CHECK(find(again).id > find(much_larger).id); /* ids are never given twice */
    hr_arena_free(much_larger);
    uint8_t *much_smaller = hr_arena_alloc(33 * MIB, 0);
    CHECK(find(much_smaller).size == 34 * MIB);
    hr_arena_free(small);
    hr_arena_free(same);
    hr_arena_free(again);
    hr_arena_free(much_smaller);
}

TEST(empty_arenas_are_given_back_beyond_a_bound) {
    enum { N = 10 };
    size_t host = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    size_t bound = host / 16 < 512 * MIB ? host / 16 : 512 * MIB;
    uint8_t *blocks[N];
    uint64_t ids[N];
    if (hr_arena_room() < 2048 * MIB) SKIP("less than 2 GiB of memory free");
    for (int i = 0; i < N; i++) {
        blocks[i] = hr_arena_alloc(100 * MIB, 0);
        REQUIRE(blocks[i]);
        ids[i] = find(blocks[i]).id;
    }
    for (int i = 0; i < N; i++) hr_arena_free(blocks[i]);
    CHECK(stats().bytes_mapped <= bound);
    CHECK(stats().bytes_mapped > bound - 200 * MIB);
    struct hr_arena_info info;
    CHECK(!hr_arena_alive(ids[0])); /* the one that had been empty longest */
    CHECK(!hr_arena_find(blocks[0], 1, &info));
    CHECK(hr_arena_alive(ids[N - 1]));
}

TEST(too_much_is_ENOMEM) {
    static const size_t sizes[] = {SIZE_MAX, SIZE_MAX / 2, (size_t)1 << 47, (size_t)1 << 42};
    void *kept = hr_arena_alloc(100, 0);
    for (int i = 0; i < 4; i++) {
        errno = 0;
        CHECK(!hr_arena_alloc(sizes[i], 0));
        CHECK_EQ(errno, ENOMEM);
    }
    CHECK_EQ(stats().arenas, 1); /* the failures left nothing, and had what was kept empty given back */
    hr_arena_free(kept);
}

TEST(no_descriptor_is_an_errno) {
    struct rlimit limit, none;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    none = limit;
    none.rlim_cur = 0;
    REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
    errno = 0;
    CHECK(!hr_arena_alloc(200 * MIB, 0));
    CHECK_EQ(errno, EMFILE);
    REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

TEST(a_child_reads_and_writes_what_it_was_left_and_allocates_its_own) {
    volatile uint8_t *block = hr_arena_alloc(4096, 0);
    uint64_t id = find((void *)block).id;
    block[0] = 7;
    pid_t child = fork();
    if (child == 0) {
        struct hr_arena_info info;
        int ok = block[0] == 7;
        block[1] = 8;
        ok = ok && !hr_arena_find((void *)block, 1, &info) && !hr_arena_alive(id) && stats().arenas == 0;
        uint8_t *own = hr_arena_alloc(10, 0); /* not in an arena of the parent's */
        ok = ok && own && hr_arena_find(own, 10, &info) && info.id > id && stats().arenas == 1;
        hr_arena_free((void *)block); /* is the parent's to free */
        hr_arena_free(own);
        ok = ok && stats().blocks == 0 && block[0] == 7;
        pid_t grandchild = fork();
        if (grandchild == 0) _exit(hr_arena_alloc(10, 0) && stats().blocks == 1 && block[0] == 7 ? 0 : 1);
        int end;
        ok = ok && waitpid(grandchild, &end, 0) == grandchild && end == 0;
        _exit(ok ? 0 : 1);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    CHECK_EQ(block[1], 8);
    CHECK_EQ(stats().blocks, 1);
    hr_arena_free((void *)block);
    CHECK_EQ(stats().blocks, 0);
}

/* In a process of its own, because it must die: not a fork, where free does nothing. */
TEST(free_of_what_is_no_block_aborts) {
    if (getenv("HR_TEST_FREE_TWICE")) {
        void *block = hr_arena_alloc(100, 0);
        hr_arena_free(block);
        hr_arena_free(block);
        _exit(0);
    }
    char *argv[] = {"test_arena", "free_of_what", NULL};
    posix_spawn_file_actions_t quiet;
    pid_t child;
    int status = 0;
    posix_spawn_file_actions_init(&quiet);
    posix_spawn_file_actions_addopen(&quiet, 2, "/dev/null", O_WRONLY, 0);
    setenv("HR_TEST_FREE_TWICE", "1", 1);
    REQUIRE(posix_spawn(&child, "/proc/self/exe", &quiet, NULL, argv, environ) == 0);
    unsetenv("HR_TEST_FREE_TWICE");
    posix_spawn_file_actions_destroy(&quiet);
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

static void *churn(void *arg) {
    enum { N = 32 };
    uint8_t *blocks[N] = {0};
    size_t lens[N] = {0};
    uint32_t seed = (uint32_t)(uintptr_t)arg;
    uint8_t mark = (uint8_t)(uintptr_t)arg;
    for (int step = 0; step < 3000; step++) {
        struct hr_arena_info info;
        uint32_t i = next_random(&seed) % N;
        if (blocks[i]) {
            CHECK(hr_arena_find(blocks[i], lens[i], &info) && hr_arena_alive(info.id));
            CHECK(blocks[i][0] == mark && blocks[i][lens[i] - 1] == mark);
            hr_arena_free(blocks[i]);
            blocks[i] = NULL;
        } else {
            lens[i] = 1 + next_random(&seed) % 100000;
            if (step % 500 == 0) lens[i] = 33 * MIB;
            blocks[i] = hr_arena_alloc(lens[i], 0);
            REQUIRE(blocks[i]);
            blocks[i][0] = blocks[i][lens[i] - 1] = mark;
        }
    }
    for (int i = 0; i < N; i++) hr_arena_free(blocks[i]);
    return NULL;
}

TEST(threads) {
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) REQUIRE(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    CHECK_EQ(stats().blocks, 0);
    CHECK_EQ(stats().bytes_used, 0);
}

/* Invented arenas at low addresses come and go while readers look: what they are told must be all of one arena. */
enum { INVENTED = 300 };
static volatile int stop;

static struct hr_arena_info invent(uint64_t slot, uint64_t generation) {
    return (struct hr_arena_info){.id = 1000000 + generation * INVENTED + slot,
                                  .fd = (int)slot,
                                  .base = (void *)((slot + 1) << 21),
                                  .size = (size_t)1 << 21,
                                  .flags = (uint32_t)generation};
}

static void *look(void *arg) {
    uint32_t seed = (uint32_t)(uintptr_t)arg;
    long found = 0;
    for (int left = 2000; left; left -= __atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        struct hr_arena_info info;
        uint64_t slot = next_random(&seed) % INVENTED;
        uintptr_t addr = ((slot + 1) << 21) + next_random(&seed) % MIB;
        if (!hr_arena_index_find(addr, addr + 10, &info)) continue;
        struct hr_arena_info want = invent(slot, info.flags);
        found++;
        CHECK(info.id == want.id && info.fd == want.fd && info.base == want.base && info.size == want.size);
        hr_arena_index_alive(info.id);
    }
    return (void *)found;
}

TEST(index_under_changes) {
    uint64_t generation[INVENTED] = {0};
    pthread_t readers[2];
    uint32_t seed = 3;
    stop = 0;
    for (uintptr_t i = 0; i < 2; i++) REQUIRE(pthread_create(&readers[i], NULL, look, (void *)(i + 1)) == 0);
    uint64_t last = 0;
    for (int step = 0; step < 20000; step++) { /* odd generations are there, even ones were removed */
        uint64_t slot = next_random(&seed) % INVENTED;
        if (generation[slot]++ % 2 == 0) {
            struct hr_arena_info info = invent(slot, generation[slot]);
            last = info.id;
            REQUIRE(hr_arena_index_reserve() == 0);
            hr_arena_index_add(&info, NULL);
            CHECK(hr_arena_index_alive(info.id));
        } else {
            uint64_t id = invent(slot, generation[slot] - 1).id;
            hr_arena_index_remove(id);
            CHECK(!hr_arena_index_alive(id));
        }
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 2; i++) {
        void *found;
        pthread_join(readers[i], &found);
        CHECK((long)found > 0);
    }
    CHECK(last != 0);
    for (uint64_t slot = 0; slot < INVENTED; slot++) {
        struct hr_arena_info info;
        uintptr_t addr = (slot + 1) << 21;
        CHECK_EQ(hr_arena_index_find(addr, addr + 1, &info), generation[slot] % 2);
        if (generation[slot] % 2) hr_arena_index_remove(invent(slot, generation[slot]).id);
    }
}

static void write_file(const char *folder, const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    for (char *p = path + 1; (p = strchr(p, '/')); *p++ = '/') {
        *p = 0;
        mkdir(path, 0700);
    }
    FILE *f = fopen(path, "w");
    REQUIRE(f);
    fputs(text, f);
    fclose(f);
}

TEST(room_is_what_host_and_groups_leave) {
    char root[] = "/tmp/hrdma-room-XXXXXX", command[64];
    REQUIRE(mkdtemp(root));
    CHECK_EQ(hr_arena_room_under(root, root), SIZE_MAX);
    write_file(root, "meminfo", "MemTotal: 9000 kB\nMemAvailable:    6000 kB\nSwapFree: 1000 kB\n");
    CHECK_EQ(hr_arena_room_under(root, root), 7000 * 1024);
    write_file(root, "self/cgroup", "1:cpu:/x\n0::/a/b\n");
    CHECK_EQ(hr_arena_room_under(root, root), 7000 * 1024);
    write_file(root, "a/b/memory.max", "max\n");
    write_file(root, "a/memory.max", "5000000\n");
    write_file(root, "a/memory.current", "4500000\n");
    write_file(root, "a/memory.stat", "anon 7\nfile_mapped 3\nfile 600000\nshmem 100000\n");
    CHECK_EQ(hr_arena_room_under(root, root), 1000000);
    write_file(root, "a/b/memory.max", "2000\n");
    write_file(root, "a/b/memory.current", "3000\n");
    CHECK_EQ(hr_arena_room_under(root, root), 0);
    write_file(root, "self/cgroup", "4:memory:/no/such/group\n"); /* version 1, seen from a container */
    write_file(root, "memory/memory.limit_in_bytes", "3000000\n");
    write_file(root, "memory/memory.usage_in_bytes", "1000000\n");
    CHECK_EQ(hr_arena_room_under(root, root), 2000000);
    write_file(root, "memory/memory.stat", "cache 1\ntotal_cache 500000\ntotal_shmem 200000\n");
    CHECK_EQ(hr_arena_room_under(root, root), 2300000);
    snprintf(command, sizeof command, "rm -r %s", root);
    CHECK_EQ(system(command), 0);
}

TEST(kept_memory_is_found_until_it_is_forgotten) {
    struct hr_arena_info info;
    static char memory[3][1 << 16];
    uint64_t gone = hr_memory_forgotten(), ids[3];
    for (int i = 0; i < 3; i++) ids[i] = hr_memory_keep(memory[i], sizeof memory[i]);
    CHECK(ids[0] && ids[0] < ids[1] && ids[1] < ids[2]);
    CHECK(hr_memory_find(memory[1] + 5, 100, &info));
    CHECK_EQ(info.id, ids[1]);
    CHECK(info.base == memory[1] && info.size == sizeof memory[1] && info.fd == -1 && info.flags == HR_MEMORY_KEPT);
    CHECK(!hr_memory_find(memory[1] + 5, sizeof memory[1], &info)); /* not across two */
    CHECK(!hr_arena_find(memory[1] + 5, 100, &info));               /* it is no arena */
    CHECK(hr_arena_alive(ids[1]));
    hr_memory_forget(ids[1]);
    hr_memory_forget(ids[1]);
    hr_memory_forget(0);
    CHECK(!hr_arena_alive(ids[1]) && !hr_memory_find(memory[1], 1, &info));
    CHECK_EQ(hr_memory_forgotten(), gone + 1);
    /* memory whose end nobody told: what lies there now is other memory */
    uint64_t wide = hr_memory_keep(memory[0] + 100, sizeof memory - 200);
    CHECK(!hr_arena_alive(ids[0]) && !hr_arena_alive(ids[2]) && hr_arena_alive(wide));
    CHECK(hr_memory_find(memory[2], 1, &info) && info.id == wide);
    CHECK_EQ(hr_memory_forgotten(), gone + 3);
    pid_t child = fork();
    if (!child) {
        int known = hr_memory_find(memory[2], 1, &info);
        hr_memory_forget(wide);
        _exit(known);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    hr_memory_forget(wide);
    CHECK(!hr_memory_find(memory[2], 1, &info));
}
