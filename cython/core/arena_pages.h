/* arena_pages.h - the memory under one arena: a sealed memfd, resident, in huge pages where that can be had. */
#ifndef HR_ARENA_PAGES_H
#define HR_ARENA_PAGES_H

#include <stddef.h>
#include <stdint.h>

#define HR_HUGE_PAGE ((size_t)2 << 20)

struct hr_pages {
    int fd;
    void *base; /* aligned to HR_HUGE_PAGE */
    size_t size;
    size_t huge; /* bytes known to be in huge pages */
};

/* size: a multiple of HR_HUGE_PAGE; flags: HR_ARENA_*. 0, or an errno with nothing left behind. */
int hr_pages_map(size_t size, uint32_t flags, struct hr_pages *pages_p);
void hr_pages_unmap(struct hr_pages *pages);

#endif
