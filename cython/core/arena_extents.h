/* arena_extents.h - which parts of an arena are blocks and which are free. */
#ifndef HR_ARENA_EXTENTS_H
#define HR_ARENA_EXTENTS_H

#include <stddef.h>
#include <stdint.h>

struct hr_extent;

struct hr_extents {
    struct hr_extent *root;
    uint32_t seed;
    uint64_t blocks, used;
};

/* One free extent of len bytes. 0, or -1 without memory. */
int hr_extents_init(struct hr_extents *e, size_t len);
void hr_extents_free(struct hr_extents *e);

/* The longest block that hr_extents_take would find room for. */
size_t hr_extents_longest(const struct hr_extents *e);
/* Cuts len bytes off the first free extent that has them: its offset, or SIZE_MAX (no such extent, or no memory for
 * the bookkeeping). The first `asked` of them are in use. */
size_t hr_extents_take(struct hr_extents *e, size_t len, size_t asked);
/* Whether what is in use of a block ends here. */
int hr_extents_ends(const struct hr_extents *e, size_t end);
/* Frees the block that begins at offset and joins it with free neighbours: its length, or 0 if none begins there. */
size_t hr_extents_give(struct hr_extents *e, size_t offset);

#endif
