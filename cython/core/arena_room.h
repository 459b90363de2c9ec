/* arena_room.h - how much memory may still be taken before somebody is killed for it. */
#ifndef HR_ARENA_ROOM_H
#define HR_ARENA_ROOM_H

#include <stddef.h>

/* Bytes that this host and our control groups have left; SIZE_MAX if nothing says. Some 50 us. */
size_t hr_arena_room(void);

/* The same, from other roots than /proc and /sys/fs/cgroup: for tests. */
size_t hr_arena_room_under(const char *proc, const char *cgroup);

#endif
