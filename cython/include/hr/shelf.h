/* shelf.h - small objects in shared memory: one process lays them out, others read them at any time without asking it.
 */
#ifndef HR_SHELF_H
#define HR_SHELF_H

/*
 * A ring of records and a table of where they are, by a hash of the name. It forgets: a record that the ring comes
 * round to, or whose place in the table another name takes, is gone. So what is found is right, and what is not may
 * still exist.
 *
 *     slots   | . | 41 | . | 17 | ...             words from the beginning of time
 *     ring    ... [17: name, meta, content] [41: name, meta, content] ...
 *                 ^ tail: what begins before holds no more       ^ head
 *
 * Whoever reads takes no lock and may be overtaken: the tail moves before a word is written over, and is looked at
 * again after the last was read. Words are atomic, so that what is torn is noticed, never used.
 *
 * What is laid out holds until a moment that the writer puts off again and again, and only for those who know it by the
 * number that it has: a writer that stands still, or has another number by now, may not know any more what is true.
 */

#include <stddef.h>
#include <stdint.h>

#define HR_SHELF_BYTES (((size_t)4 << 20) + ((size_t)128 << 10)) /* of memory that is zero at first */
#define HR_SHELF_PLACES 256 /* readers of whom it is said how far they were heard */
#define HR_SHELF_LARGEST ((size_t)256 << 10)

struct hr_shelf;

struct hr_shelf_record {
    uint64_t at;
    size_t meta_at, meta, content_at, content; /* words of the ring, bytes */
};

/* The writer, in one thread. */

/* Lays an object out in place of the one of this name; 0 where it is too large, and then there is none. */
int hr_shelf_put(struct hr_shelf *shelf, const void *name, size_t length, const void *meta, size_t nmeta,
                 const void *content, size_t ncontent);
void hr_shelf_remove(struct hr_shelf *shelf, const void *name, size_t length);
void hr_shelf_clear(struct hr_shelf *shelf);
/* What is there holds until then (hr_now), for those who know the writer by this number. */
void hr_shelf_hold(struct hr_shelf *shelf, uint64_t home, int64_t until);
/* What the reader at this place has said is known up to this number. */
void hr_shelf_hear(struct hr_shelf *shelf, int place, uint64_t number);

/* Readers, in any thread. */

/* Whether what was read until now held. */
int hr_shelf_holds(const struct hr_shelf *shelf, uint64_t home);
int hr_shelf_find(const struct hr_shelf *shelf, const void *name, size_t length, struct hr_shelf_record *record_p);
/* Copies it; 0 where it was written over meanwhile. */
int hr_shelf_read(const struct hr_shelf *shelf, const struct hr_shelf_record *record, void *meta, void *content);
uint64_t hr_shelf_heard(const struct hr_shelf *shelf, int place);

#endif
