/* far.h - whether stores to memory that peers read go past the cache.
 *
 * Where cores share no cache a store to what a peer has read waits for it, and takes four times as long as else, one
 * past the cache half as long as that; where they do it is the other way round. A process is not told which it is, and
 * under a virtual machine it changes, so it is learned from copies. Zen 4, copies of 512 KiB and sums of four operands,
 * ns for a byte: 0.05 and 0.11 where they share one, 0.22 and 0.39 where they do not. (Rings learn it likewise, from
 * what is written to them: providers/shm/message.c. They hold it after pauses too, as messages come singly.)
 */
#ifndef HR_CORE_FAR_H
#define HR_CORE_FAR_H

#include <stdint.h>

#define HR_FAR_MIN (64u << 10)        /* bytes of a copy from which it is learned */
#define HR_FAR_NS_BYTE 0.15           /* slower is far; */
#define HR_FAR_INTERRUPTED 1.0        /* and more yet: the processor did something else meanwhile */
#define HR_FAR_ROW 3                  /* copies, one after the other */
#define HR_FAR_NS ((int64_t)20000000) /* then it holds for so long */

struct hr_far {
    int slow;      /* the last copies that were, in a row */
    int64_t last;  /* when the last one ended */
    int64_t until; /* until then stores go past the cache */
};

/* A copy through the cache of so many bytes. */
static inline void hr_far_copied(struct hr_far *far, int64_t start, int64_t end, uint64_t len) {
    double ns = (double)(end - start) / (double)len;
    if (len < HR_FAR_MIN || ns > HR_FAR_INTERRUPTED) return;
    if (start - (far->last > far->until ? far->last : far->until) > HR_FAR_NS)
        far->slow = 0; /* caches are others' now */
    far->slow = ns > HR_FAR_NS_BYTE ? far->slow + 1 : 0;
    far->last = end;
    if (far->slow < HR_FAR_ROW) return;
    far->until = end + HR_FAR_NS;
    far->slow = HR_FAR_ROW - 1; /* the first that is tried again decides */
}

#endif
