/* test_shelf.c - small objects that one lays out and others read: what is found is right, whoever overtakes whom. */
#include <pthread.h>

#include "check.h"
#include "hr/clock.h"
#include "hr/shelf.h"

#define NAMES 64
#define MEMBERS 3
#define PUTS 6400

static struct hr_shelf *shelf_new(void) {
    void *memory = NULL;
    REQUIRE(posix_memalign(&memory, 64, HR_SHELF_BYTES) == 0);
    memset(memory, 0, HR_SHELF_BYTES);
    return memory;
}

static int put(struct hr_shelf *shelf, const char *name, const void *content, size_t nbytes) {
    return hr_shelf_put(shelf, name, strlen(name), "meta", 4, content, nbytes);
}

static int found(const struct hr_shelf *shelf, const char *name, char *content) {
    struct hr_shelf_record record;
    char meta[4];
    return hr_shelf_find(shelf, name, strlen(name), &record) && hr_shelf_read(shelf, &record, meta, content) &&
           record.meta == 4 && memcmp(meta, "meta", 4) == 0;
}

TEST(what_is_laid_out_is_found_until_it_is_taken_away) {
    struct hr_shelf *shelf = shelf_new();
    char content[8] = "";
    CHECK(!found(shelf, "a", content));
    CHECK(put(shelf, "a", "first", 6) && put(shelf, "b", "other", 6));
    CHECK(found(shelf, "a", content) && strcmp(content, "first") == 0);
    CHECK(put(shelf, "a", "again", 6) && found(shelf, "a", content) && strcmp(content, "again") == 0);
    CHECK(!found(shelf, "aa", content) && !found(shelf, "", content));
    hr_shelf_remove(shelf, "a", 1);
    CHECK(!found(shelf, "a", content) && found(shelf, "b", content));
    hr_shelf_clear(shelf);
    CHECK(!found(shelf, "b", content) && put(shelf, "b", "third", 6) && found(shelf, "b", content));
    CHECK(put(shelf, "", "", 0) && found(shelf, "", content));
    free(shelf);
}

TEST(what_is_too_large_takes_the_place_of_what_was_there) {
    struct hr_shelf *shelf = shelf_new();
    char *large = calloc(1, HR_SHELF_LARGEST + 1), content[8];
    REQUIRE(large);
    CHECK(put(shelf, "a", "first", 6));
    CHECK(!put(shelf, "a", large, HR_SHELF_LARGEST + 1) && !found(shelf, "a", content));
    CHECK(put(shelf, "a", large, HR_SHELF_LARGEST - 5));
    free(large);
    free(shelf);
}

TEST(the_ring_forgets_the_oldest) {
    struct hr_shelf *shelf = shelf_new();
    char content[4096] = "", name[16];
    for (int i = 0; i < 4000; i++) {
        snprintf(name, sizeof(name), "%d", i);
        memset(content, i, sizeof(content));
        CHECK(put(shelf, name, content, sizeof(content)));
        CHECK(found(shelf, name, content) && content[0] == (char)i && content[4095] == (char)i);
    }
    CHECK(!found(shelf, "0", content) && !found(shelf, "2000", content));
    int left = 0;
    for (int i = 3500; i < 4000; i++) {
        snprintf(name, sizeof(name), "%d", i);
        left += found(shelf, name, content) && content[0] == (char)i;
    }
    CHECK(left > 450); /* but for some whose place another took */
    free(shelf);
}

TEST(it_holds_for_a_while_and_for_those_who_know_the_writer) {
    struct hr_shelf *shelf = shelf_new();
    CHECK(!hr_shelf_holds(shelf, 0));
    hr_shelf_hold(shelf, 7, hr_now() + 60000000000);
    CHECK(hr_shelf_holds(shelf, 7) && !hr_shelf_holds(shelf, 8));
    hr_shelf_hold(shelf, 7, hr_now());
    CHECK(!hr_shelf_holds(shelf, 7));
    CHECK_EQ(hr_shelf_heard(shelf, 3), 0);
    hr_shelf_hear(shelf, 3, 9);
    CHECK_EQ(hr_shelf_heard(shelf, 3), 9);
    CHECK_EQ(hr_shelf_heard(shelf, 2), 0);
    free(shelf);
}

static atomic_int over;

/* A content says which name it is of, how long it is, and is the same in each byte. */
static void *read_on(void *shelf) {
    static char contents[MEMBERS][8192];
    static _Atomic int members;
    char *content = contents[members++ % MEMBERS], name[16];
    long hits = 0;
    for (int i = 0, left = NAMES; left > 0; i++, left -= over) {
        struct hr_shelf_record record;
        char meta[4];
        snprintf(name, sizeof(name), "n%d", i % NAMES);
        if (!hr_shelf_find(shelf, name, strlen(name), &record)) continue;
        REQUIRE(record.meta == 4 && record.content <= sizeof(contents[0]));
        if (!hr_shelf_read(shelf, &record, meta, content)) continue;
        hits++;
        CHECK_EQ(memcmp(meta, "meta", 4), 0);
        CHECK_EQ(record.content % NAMES, (size_t)(i % NAMES));
        for (size_t k = 1; k < record.content; k++)
            if (content[k] != content[0]) {
                CHECK_EQ(content[k], content[0]);
                break;
            }
    }
    return (void *)hits;
}

TEST(readers_in_threads_never_see_halves) {
    struct hr_shelf *shelf = shelf_new();
    pthread_t threads[MEMBERS];
    static char content[8192];
    for (int i = 0; i < MEMBERS; i++) REQUIRE(pthread_create(threads + i, NULL, read_on, shelf) == 0);
    for (int i = 0; i < PUTS; i++) {
        char name[16];
        snprintf(name, sizeof(name), "n%d", i % NAMES);
        memset(content, i, sizeof(content));
        CHECK(put(shelf, name, content, (size_t)(i % NAMES + NAMES * (i / NAMES % 120))));
        if (i % 97 == 0) hr_shelf_remove(shelf, name, strlen(name));
        if (i % 5000 == 0) hr_shelf_clear(shelf);
    }
    over = 1;
    long hits = 0;
    for (int i = 0; i < MEMBERS; i++) {
        void *its = NULL;
        pthread_join(threads[i], &its);
        hits += (long)its;
    }
    CHECK(hits > 0);
    free(shelf);
}
