/* arena_index.h - from an address or an id to the arena, without a lock for those who ask. */
#ifndef HR_ARENA_INDEX_H
#define HR_ARENA_INDEX_H

#include "hr/memory.h"

struct hr_arena;

/* Changes: one at a time, under the arenas' lock. reserve makes room for one more and may fail (-1); add cannot. */
int hr_arena_index_reserve(void);
void hr_arena_index_add(const struct hr_arena_info *info, struct hr_arena *arena);
void hr_arena_index_remove(uint64_t id);
/* Under the lock too: the arena in which addr lies, or NULL. */
struct hr_arena *hr_arena_index_owner(const void *addr);

/* Under the lock too: kept memory that overlaps this; 0: none does. */
uint64_t hr_arena_index_kept(uintptr_t begin, uintptr_t end);

/* Of a forked child, in which nothing else runs: knows no arena, whatever was being changed. */
void hr_arena_index_restart(void);

/* From any thread, without a lock. */
int hr_arena_index_find(uintptr_t begin, uintptr_t end, struct hr_arena_info *info_p);
int hr_arena_index_alive(uint64_t id);

#endif
