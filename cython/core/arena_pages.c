/* arena_pages.c - memory for one arena: memfd, huge pages, prefault, seals. */

/*
 * Huge pages for shared memory are off by default (shmem_enabled is `never` almost everywhere), but MADV_COLLAPSE
 * (Linux 6.1) asks for them explicitly and is heeded. It copies the small pages that are there, so the cheap way is to
 * let it find next to none: one small page in each 2 MiB (a hole cannot be collapsed), then collapse. Per 256 MiB,
 * measured:
 *
 *     one page in each 2 MiB, collapse all   14 ms
 *     4 KiB pages, no attempt at huge ones  115 ms  (fallocate 55, populate 60)
 *     fallocate all, collapse all           113 ms to 890 ms
 *     fallocate, populate, collapse         600 ms
 *
 * So huge pages are also the fastest way to get memory, most of the time. But each MADV_COLLAPSE first has a kernel
 * thread run on every processor (lru_add_drain_all), and nothing ends that wait, not even SIGKILL: 0.1 ms, and on two
 * processors with more to do than they can, one in a thousand above 0.1 s, up to 2.3 s. Hence one call for all of an
 * arena, and none for what short calls with a deadline need of their own (HR_ARENA_SMALL_PAGES).
 *
 * What could not be collapsed (an older kernel, fragmented memory) is filled with small pages, or with huge ones by
 * MADV_HUGEPAGE where shmem_enabled is `advise`. The hugetlb pool is left alone: it was reserved for somebody.
 *
 * fallocate beyond the memory there is does not fail, it wakes the OOM killer: hence arena_room.h.
 */

#define _GNU_SOURCE
#include "core/arena_pages.h"

#include "core/arena_room.h"
#include "hr/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Kernel numbers that older C libraries lack. */
#ifndef MADV_POPULATE_WRITE
#    define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#    define MADV_COLLAPSE 25
#endif
#ifndef MFD_NOEXEC_SEAL
#    define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#    define F_SEAL_FUTURE_WRITE 0x0010
#endif

#define SMALL_PAGE 4096
#define COLLAPSE_TRIES 3    /* EAGAIN: a page was busy */
#define COLLAPSE_FAILURES 4 /* in a row: memory is fragmented, and each further attempt costs a compaction */

/* Where vm.memfd_noexec is 2 only this flag is let through; before Linux 6.3 it is unknown. */
static int create(void) {
    int fd = memfd_create("hrdma-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    return fd < 0 && errno == EINVAL ? memfd_create("hrdma-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING) : fd;
}

/* Maps size bytes at a huge page's boundary: peers and the kernel can then use one entry for 2 MiB. */
static void *map_aligned(int fd, size_t size) {
    uint8_t *area = mmap(NULL, size + HR_HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED) return NULL;
    size_t before = -(uintptr_t)area % HR_HUGE_PAGE;
    uint8_t *base = area + before;
    if (mmap(base, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        int rc = errno;
        munmap(area, size + HR_HUGE_PAGE);
        errno = rc;
        return NULL;
    }
    if (before) munmap(area, before);
    munmap(base + size, HR_HUGE_PAGE - before);
    return base;
}

static int allocate(int fd, size_t offset, size_t len) {
    while (fallocate(fd, 0, (off_t)offset, (off_t)len)) {
        if (errno != EINTR) return errno;
    }
    return 0;
}

/* One by one, as collapsing all has failed somewhere; returns how much is in huge pages. */
static size_t collapse_each(uint8_t *base, size_t size) {
    size_t huge = 0;
    int failures = 0;
    for (size_t at = 0; at < size && failures < COLLAPSE_FAILURES; at += HR_HUGE_PAGE) {
        int rc, tries = 1;
        while ((rc = madvise(base + at, HR_HUGE_PAGE, MADV_COLLAPSE)) && errno == EAGAIN && tries < COLLAPSE_TRIES)
            tries++;
        failures = rc ? failures + 1 : 0;
        if (!rc) huge += HR_HUGE_PAGE;
    }
    return huge;
}

/* As much in huge pages as the kernel gives without a struggle; *huge_p says how much. */
static int fill_huge(int fd, uint8_t *base, size_t size, size_t *huge_p) {
    for (size_t at = 0; at < size; at += HR_HUGE_PAGE) {
        int rc = allocate(fd, at, SMALL_PAGE);
        if (rc) return rc;
    }
    if (madvise(base, size, MADV_COLLAPSE) == 0)
        *huge_p = size;
    else if (errno != EINVAL) /* which says that this kernel does not know it, or not for this memory */
        *huge_p = collapse_each(base, size);
    return 0;
}

static int fill_rest(int fd, uint8_t *base, size_t size) {
    madvise(base, size, MADV_HUGEPAGE);
    /* Populating before fallocate: only a fault looks at MADV_HUGEPAGE. It fails where a fault would raise SIGBUS. */
    int populated = madvise(base, size, MADV_POPULATE_WRITE) == 0;
    int rc = allocate(fd, 0, size);
    if (rc) return rc;
    if (populated) return 0;
    for (size_t at = 0; at < size; at += SMALL_PAGE) ((volatile uint8_t *)base)[at] = 0; /* Linux before 5.14 */
    return 0;
}

/* A peer that holds the descriptor can neither resize the arena, nor punch holes in it or map it for writing. */
static int seal(int fd, int writable_by_peers) {
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (!writable_by_peers && fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) && errno != EINVAL) return errno;
    /* EINVAL: Linux before 5.1 lacks this seal; peers map read-only all the same, of their own accord */
    return fcntl(fd, F_ADD_SEALS, seals) ? errno : 0;
}

int hr_pages_map(size_t size, uint32_t flags, struct hr_pages *pages_p) {
    struct hr_pages pages = {.size = size};
    int rc;
    if (size > hr_arena_room()) return ENOMEM;
    pages.fd = create();
    if (pages.fd < 0) return errno;
    if (ftruncate(pages.fd, (off_t)size) || !(pages.base = map_aligned(pages.fd, size))) {
        rc = errno;
        close(pages.fd);
        return rc;
    }
    rc = flags & HR_ARENA_SMALL_PAGES ? 0 : fill_huge(pages.fd, pages.base, size, &pages.huge);
    if (!rc && pages.huge < size) rc = fill_rest(pages.fd, pages.base, size);
    if (!rc) rc = seal(pages.fd, flags & HR_ARENA_WRITABLE_BY_PEERS);
    if (rc) {
        hr_pages_unmap(&pages);
        return rc == ENOSPC ? ENOMEM : rc;
    }
    *pages_p = pages;
    return 0;
}

void hr_pages_unmap(struct hr_pages *pages) {
    munmap(pages->base, pages->size);
    close(pages->fd);
}
