/* line.h - cache lines that go from core to core. */
#ifndef HR_LINE_H
#define HR_LINE_H

/* The line is going to be written: takes it over from whichever core has it, and waits for nothing. An ordinary
 * prefetch, __builtin_prefetch(p, 1) unless the compiler is told of prefetchw, would make the store wait twice. */
static inline void hr_claim(const void *line) {
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" ::"m"(*(const char *)line)); /* a no-op where the processor has it not */
#else
    __builtin_prefetch(line, 1);
#endif
}

#endif
