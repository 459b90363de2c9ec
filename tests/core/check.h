/* check.h - the checks and the runner of the C tests.
 *
 *     #include "check.h"
 *     TEST(sum_wraps) { CHECK_EQ(add(255, 1), 0); }
 *
 * One such file is a program: ./test_x [PART-OF-A-NAME] runs its tests in the order of the text, ./test_x --list names
 * them. It prints "N passed", and exits with 1 if a check failed or no test has such a name. CHECK and its kin note a
 * failure and go on, so that one run shows all that is wrong; they may be used in any thread of the process, but a
 * forked child must tell its parent by exit status (check_failures() counts). REQUIRE ends the program: use it where
 * what follows would crash. SKIP leaves the test and says why. A test that takes longer than CHECK_TIMEOUT seconds
 * ends the program, naming the test.
 *
 * A program of several files defines CHECK_NO_MAIN before the include in all but one of them.
 */
#ifndef HR_TESTS_CHECK_H
#define HR_TESTS_CHECK_H

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef CHECK_TIMEOUT
#    define CHECK_TIMEOUT 120
#endif

struct check_test {
    const char *name;
    void (*run)(void);
    struct check_test *next;
};

/* Weak, so that the files of one program share them. */
__attribute__((weak)) struct check_test *check_first, **check_tail;
__attribute__((weak)) const char *check_current = "set-up";
__attribute__((weak)) const char *check_skipped;
__attribute__((weak)) atomic_int check_count;

static inline void check_add(struct check_test *test) {
    if (!check_tail) check_tail = &check_first;
    *check_tail = test;
    check_tail = &test->next;
}

/* Failures in the running test so far. */
static inline int check_failures(void) { return atomic_load(&check_count); }

/* The first failures are shown, all are counted: a wrong kernel fails for millions of elements. */
static inline int check_note(void) { return atomic_fetch_add(&check_count, 1) < 10; }

#define TEST(name)                                                  \
    static void test_##name(void);                                  \
    __attribute__((constructor)) static void add_##name(void) {     \
        static struct check_test test = {#name, test_##name, NULL}; \
        check_add(&test);                                           \
    }                                                               \
    static void test_##name(void)

/* What a failure says is put together out of line: these are in thousands of places, and compiled for each flavour. */
__attribute__((noinline, cold, unused)) static void check_failed(const char *file, int line, const char *cond) {
    if (check_note()) fprintf(stderr, "%s:%d: %s: failed: %s\n", file, line, check_current, cond);
}

__attribute__((noinline, cold, unused, noreturn)) static void check_ends(const char *file, int line, const char *cond) {
    fprintf(stderr, "%s:%d: %s: required: %s\n", file, line, check_current, cond);
    exit(1);
}

__attribute__((noinline, cold, unused)) static void check_differ(const char *file, int line, const char *a_text,
                                                                 long long a, const char *b_text, long long b) {
    if (check_note())
        fprintf(stderr, "%s:%d: %s: %s is %lld, %s is %lld\n", file, line, check_current, a_text, a, b_text, b);
}

__attribute__((noinline, unused)) static void check_str(const char *file, int line, const char *a_text, const char *a,
                                                        const char *b) {
    if (a && b && !strcmp(a, b)) return;
    if (check_note())
        fprintf(stderr, "%s:%d: %s: %s is \"%s\", expected \"%s\"\n", file, line, check_current, a_text,
                a ? a : "(null)", b ? b : "(null)");
}

__attribute__((noinline, unused)) static void check_mem(const char *file, int line, const char *a_text, const void *a,
                                                        const char *b_text, const void *b, size_t len) {
    const unsigned char *x = a, *y = b;
    size_t i = 0;
    if (!len || !memcmp(x, y, len) || !check_note()) return;
    while (x[i] == y[i]) i++;
    fprintf(stderr, "%s:%d: %s: %s and %s differ first at byte %zu of %zu: %02x, %02x\n", file, line, check_current,
            a_text, b_text, i, len, x[i], y[i]);
}

#define CHECK(cond)                                           \
    do {                                                      \
        if (!(cond)) check_failed(__FILE__, __LINE__, #cond); \
    } while (0)

#define REQUIRE(cond)                                       \
    do {                                                    \
        if (!(cond)) check_ends(__FILE__, __LINE__, #cond); \
    } while (0)

/* For integers, enums and pointers: shows both values. */
#define CHECK_EQ(a, b)                                                                      \
    do {                                                                                    \
        long long check_a = (long long)(a), check_b = (long long)(b);                       \
        if (check_a != check_b) check_differ(__FILE__, __LINE__, #a, check_a, #b, check_b); \
    } while (0)

#define CHECK_STR(a, b) check_str(__FILE__, __LINE__, #a, a, b)

/* Compares len bytes and shows the first that differs. */
#define CHECK_MEM(a, b, len) check_mem(__FILE__, __LINE__, #a, a, #b, b, len)

#define SKIP(why)              \
    do {                       \
        check_skipped = (why); \
        return;                \
    } while (0)

#ifndef CHECK_NO_MAIN

static void check_timeout(int sig) {
    static const char text[] = ": took longer than CHECK_TIMEOUT\n";
    (void)sig;
    if (write(2, check_current, strlen(check_current)) < 0 || write(2, text, sizeof text - 1) < 0) _exit(3);
    _exit(2);
}

int main(int argc, char **argv) {
    int passed = 0, failed = 0, skipped = 0;
    const char *filter = argc > 1 ? argv[1] : "";

    if (!strcmp(filter, "--list")) {
        for (struct check_test *t = check_first; t; t = t->next) puts(t->name);
        return 0;
    }
    signal(SIGALRM, check_timeout);
    for (struct check_test *t = check_first; t; t = t->next) {
        if (!strstr(t->name, filter)) continue;
        check_current = t->name;
        check_skipped = NULL;
        atomic_store(&check_count, 0);
        alarm(CHECK_TIMEOUT);
        t->run();
        alarm(0);
        if (check_failures()) {
            fprintf(stderr, "%s: %d checks failed\n", t->name, check_failures());
            failed++;
        } else if (check_skipped) {
            printf("%s: skipped: %s\n", t->name, check_skipped);
            skipped++;
        } else {
            passed++;
        }
        fflush(stdout);
    }
    if (!passed && !failed && !skipped) {
        fprintf(stderr, "no test has \"%s\" in its name\n", filter);
        return 1;
    }
    if (skipped) printf("%d skipped\n", skipped);
    if (failed) printf("%d failed\n", failed);
    printf("%d passed\n", passed);
    return failed != 0;
}

#endif
#endif
