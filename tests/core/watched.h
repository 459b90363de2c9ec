/* watched.h - loops over many bytes: the thread sanitizer hears of all of them at once instead of one by one.
 *
 *     UNWATCHED static void fill_bytes(uint8_t *p, size_t n) { for (...) p[i] = ...; }
 *     static void fill(uint8_t *p, size_t n) { fill_bytes(p, n); watched_write(p, n); }
 *
 * It sees the same races, in a small part of the time. Of memcpy and its kin it hears by itself: `ours_begin` and
 * `ours_end` are around those on memory that no other thread sees.
 */
#ifndef HR_TESTS_WATCHED_H
#define HR_TESTS_WATCHED_H

#include <stddef.h>
#include <stdint.h>

/* What says, element by element, what must come out: it would be most of a sanitizer's work, and is not what is tested.
 */
#define ORACLE __attribute__((no_sanitize("address", "undefined")))

#ifdef __SANITIZE_THREAD__
void __tsan_read_range(void *addr, long size);
void __tsan_write_range(void *addr, long size);
#    define UNWATCHED __attribute__((no_sanitize_thread, noinline, unused))
static inline void watched_read(const void *p, size_t n) { __tsan_read_range((void *)p, (long)n); }
static inline void watched_write(void *p, size_t n) { __tsan_write_range(p, (long)n); }
void AnnotateIgnoreReadsBegin(const char *file, int line), AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line), AnnotateIgnoreWritesEnd(const char *file, int line);
static inline void ours_begin(void) {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
static inline void ours_end(void) {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
#else
#    define UNWATCHED __attribute__((unused))
static inline void watched_read(const void *p, size_t n) { (void)p, (void)n; }
static inline void watched_write(void *p, size_t n) { (void)p, (void)n; }
static inline void ours_begin(void) {}
static inline void ours_end(void) {}
#endif

#endif
