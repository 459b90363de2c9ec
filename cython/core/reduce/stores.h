/* stores.h - whether memory that other cores hold copies of is written through the cache or past it. */
#ifndef HR_REDUCE_STORES_H
#define HR_REDUCE_STORES_H

/*
 * A store to a line of which another core has a copy waits until that copy is gone. What this costs depends on where
 * the two cores are, and changes while a program runs (a virtual machine's processors move): 7 or 28 ns a line were
 * measured, beside 2 to write past the cache, which takes the copies away in bulk. But what was written past the cache
 * is read slower afterwards, by everybody, so that it is worth it only where plain stores are slow. Hence plain stores
 * are timed now and then, for each class of lengths, as long runs do not stay in the caches that short ones fight over.
 */

#include <stddef.h>
#include <stdint.h>

#define HR_STORES_PIECE ((size_t)16 << 10)

enum hr_stores_way { HR_STORES_THROUGH, HR_STORES_TIMED /* through, and tell how long it took */, HR_STORES_PAST };

/* How the next piece of a run of len bytes is to be written. */
enum hr_stores_way hr_stores_way(size_t len);
/* One that was to be timed took ns for n bytes out of nsrc sources. */
void hr_stores_took(size_t len, size_t n, int nsrc, int64_t ns);
/* For tests: forgets all, as in a new process. */
void hr_stores_forget(void);

#endif
