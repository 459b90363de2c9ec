/* mix.h - splitmix64: a stream of 64-bit numbers from any seed, 0 too; not for secrets. */
#ifndef HR_MIX_H
#define HR_MIX_H

#include <stdint.h>

static inline uint64_t hr_mix(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

#endif
