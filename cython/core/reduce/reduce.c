/* reduce.c - picks the instruction set, blocks long reductions of many sources, copies.
 *
 * A kernel reads all its sources side by side. That is best up to a handful; many sources, a power of two apart as the
 * slots of an arena are, fall into the same few cache sets and push each other out before their lines are used up. So
 * more than GROUP sources go through in groups, a block of the arrays at a time, and the accumulators wait in a buffer
 * on the stack (32 bits wide for 16-bit types: still rounded once).
 */
#include <string.h>
#if defined(__x86_64__)
#    include <cpuid.h>
#endif

#include "divide.h"
#include "table.h"
#include "ways.h"

#define GROUP 8
#define BLOCK 16384
#define STRING_MIN 2048

static const struct {
    const char *name;
    size_t size;
} dtypes[HR_DTYPES] = {
    [HR_INT8] = {"int8", 1},         [HR_INT16] = {"int16", 2},     [HR_INT32] = {"int32", 4},
    [HR_INT64] = {"int64", 8},       [HR_UINT8] = {"uint8", 1},     [HR_UINT16] = {"uint16", 2},
    [HR_UINT32] = {"uint32", 4},     [HR_UINT64] = {"uint64", 8},   [HR_FLOAT16] = {"float16", 2},
    [HR_BFLOAT16] = {"bfloat16", 2}, [HR_FLOAT32] = {"float32", 4}, [HR_FLOAT64] = {"float64", 8},
};

static const char *const redops[HR_REDOPS] = {"sum", "prod", "min", "max", "avg", "band", "bor", "bxor"};

size_t hr_dtype_size(hr_dtype t) { return (unsigned)t < HR_DTYPES ? dtypes[t].size : 0; }

const char *hr_dtype_name(hr_dtype t) { return (unsigned)t < HR_DTYPES ? dtypes[t].name : "unknown"; }

const char *hr_redop_name(hr_redop op) { return (unsigned)op < HR_REDOPS ? redops[op] : "unknown"; }

int hr_reduce_supported(hr_redop op, hr_dtype t) {
    if ((unsigned)op >= HR_REDOPS || (unsigned)t >= HR_DTYPES) return 0;
    if (op == HR_AVG) op = HR_SUM; /* of integers there is no kernel of its own: average_integers */
    return hr_reduce_scalar.kernel[op][t] != NULL;
}

/* Best first. */
static const hr_reduce_table *const tables[] = {
#if defined(__x86_64__)
    &hr_reduce_avx512,
    &hr_reduce_avx2,
#elif defined(__aarch64__)
    &hr_reduce_neon,
#endif
    &hr_reduce_scalar,
};

#if defined(__x86_64__)
/* __builtin_cpu_supports() knows "f16c" only in recent compilers. */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

unsigned hr_reduce_family(void) {
    unsigned a = 0, base = 0;
#if defined(__x86_64__)
    unsigned b, c, d;
    __get_cpuid(1, &a, &b, &c, &d);
    base = a >> 8 & 15;
#endif
    return base == 15 ? base + (a >> 20 & 255) : base;
}

static int runs_here(const hr_reduce_table *table) {
#if defined(__x86_64__)
    if (table == &hr_reduce_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (table == &hr_reduce_avx2) return __builtin_cpu_supports("avx2") && has_f16c();
#endif
    (void)table;
    return 1;
}

static const hr_reduce_table *chosen, *for_float16;
static int amd = -1;

/* Threads that come first together all find the same table. */
static const hr_reduce_table *table(void) {
    const hr_reduce_table *t = __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
    if (__builtin_expect(!t, 0)) {
        hr_reduce_force_isa(NULL);
        t = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    }
    return t;
}

static hr_reduce_kernel kernel_of(hr_redop op, hr_dtype t) {
    const hr_reduce_table *best = table();
    if (t == HR_FLOAT16) best = __atomic_load_n(&for_float16, __ATOMIC_RELAXED);
    return best->kernel[op][t];
}

/* Processors of Intel fetch ahead within a page, so several at a time, and lines that another core has are to be
 * claimed ahead of the stores. Those of AMD write past the cache best in one place at a time, and claims only cost
 * them. */
void hr_reduce_force_amd(int is_amd) {
    if (is_amd < 0) {
        is_amd = 0;
#if defined(__x86_64__)
        is_amd = __builtin_cpu_is("amd") != 0;
#endif
    }
    __atomic_store_n(&amd, is_amd, __ATOMIC_RELAXED);
}

int hr_reduce_claims(void) {
    table(); /* which finds out */
    return !__atomic_load_n(&amd, __ATOMIC_RELAXED);
}

/* Where ways.c does not say otherwise. */
static int pages(void) { return __atomic_load_n(&amd, __ATOMIC_RELAXED) ? 1 : HR_REDUCE_PAGES; }

static hr_store suitable(hr_store store, size_t len) {
    int claims = len >= HR_SHARED_MIN && !__atomic_load_n(&amd, __ATOMIC_RELAXED);
    return store == HR_STORE_SHARED && !claims ? HR_STORE_CACHED : store;
}

/* AMD's Zen 4 converts two vectors of 32 bytes faster than one of 64: a sum in the cache takes 0.85 of the time; EPYCs
 * of Zen 5 (family 26) do not: there it takes 1.4 times as long. Mobile ones were not measured. */
static int shorter_for_float16(const hr_reduce_table *table) {
#if defined(__x86_64__)
    if (table == &hr_reduce_avx512) return __atomic_load_n(&amd, __ATOMIC_RELAXED) && hr_reduce_family() < 26;
#endif
    (void)table;
    return 0;
}

int hr_reduce_force_isa(const char *name) {
    if (__atomic_load_n(&amd, __ATOMIC_RELAXED) < 0) hr_reduce_force_amd(-1);
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if ((name && strcmp(name, tables[i]->name)) || !runs_here(tables[i])) continue;
        __atomic_store_n(&for_float16, tables[i + (!name && shorter_for_float16(tables[i]))], __ATOMIC_RELAXED);
        __atomic_store_n(&chosen, tables[i], __ATOMIC_RELEASE);
        return 1;
    }
    return 0;
}

const char *hr_reduce_isa(void) { return table()->name; }

/* Streamed stores are not ordered with the ones that publish a result to another thread or process. */
static void end_stream(void) {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

static void reduce_blocks(hr_reduce_kernel kernel, const hr_reduce_job *whole) {
    char waiting[HR_REDUCE_WAITING(BLOCK)] __attribute__((aligned(HR_REDUCE_MAX_VECTOR)));
    hr_reduce_job job = *whole;

    for (job.begin = 0; job.begin < whole->end; job.begin = job.end) {
        job.end = whole->end - job.begin < BLOCK ? whole->end : job.begin + BLOCK;
        for (int s = 0; s < whole->nsrc; s += job.nsrc) {
            job.src = whole->src + s;
            job.nsrc = whole->nsrc - s < GROUP ? whole->nsrc - s : GROUP;
            job.resume = s ? waiting : NULL;
            job.suspend = s + job.nsrc < whole->nsrc ? waiting : NULL;
            kernel(&job);
        }
    }
}

/* Then the lines to be written are in the cache already, and to bypass it would cost a transfer more. */
static int is_in_place(const void *dst, const void *const *src, int nsrc) {
    for (int s = 0; s < nsrc; s++)
        if (src[s] == dst) return 1;
    return 0;
}

static void in_full(hr_reduce_kernel kernel, hr_reduce_job *job, int is_half) {
    const int tried = job->store == HR_STORE_UNREAD && job->pages > 1 && job->nsrc <= 2 && job->nalso <= 1;
    struct hr_reduce_trial trial = {.way = -1};
    if (tried) trial = hr_reduce_way_begin(job, is_half);
    if (job->nsrc <= GROUP || job->end <= BLOCK)
        kernel(job);
    else
        reduce_blocks(kernel, job);
    if (job->store == HR_STORE_UNREAD && !job->in_place) end_stream();
    hr_reduce_way_end(&trial, job->end);
}

/* The sum, block by block, and each is divided while it is near. */
static void average_integers(hr_dtype t, char *dst, void *const *also, int nalso, const void *const *src, int nsrc,
                             size_t nbytes, double scale, hr_store store) {
    const uint64_t divisor = (uint64_t)(1.0 / scale + 0.5);
    const size_t size = dtypes[t].size;
    const void *part[HR_REDUCE_MAX_SRC];
    if (store == HR_STORE_UNREAD) store = HR_STORE_CACHED;
    for (size_t at = 0, n; at < nbytes; at += n) {
        n = nbytes - at < BLOCK ? nbytes - at : BLOCK;
        for (int s = 0; s < nsrc; s++) part[s] = (const char *)src[s] + at;
        hr_reduce(HR_SUM, t, dst + at, part, nsrc, n / size, 1.0, store);
        hr_reduce_divide(t, dst + at, n / size, divisor);
        for (int k = 0; k < nalso; k++) hr_copy((char *)also[k] + at, dst + at, n, HR_STORE_CACHED);
    }
}

void hr_reduce(hr_redop op, hr_dtype t, void *dst, const void *const *src, int nsrc, size_t count, double scale,
               hr_store store) {
    hr_reduce_to_all(op, t, dst, NULL, 0, src, nsrc, count, scale, store);
}

void hr_reduce_to_all(hr_redop op, hr_dtype t, void *dst, void *const *also, int nalso, const void *const *src,
                      int nsrc, size_t count, double scale, hr_store store) {
    const size_t nbytes = count * dtypes[t].size;
    if (op == HR_AVG && t < HR_FLOAT16) {
        if (scale < 1.0) {
            average_integers(t, dst, also, nalso, src, nsrc, nbytes, scale, store);
            return;
        }
        op = HR_SUM;
    }
    if (nsrc == 1 && !nalso && (op != HR_AVG || scale == 1.0)) {
        hr_copy(dst, src[0], nbytes, store);
        return;
    }
    hr_reduce_kernel kernel = kernel_of(op, t); /* first: it finds out whose processor this is, too */
    hr_reduce_job job = {.src = src,
                         .nsrc = nsrc,
                         .dst = dst,
                         .also = also,
                         .nalso = nalso,
                         .store = suitable(store, nbytes),
                         .pages = (short)pages(),
                         .in_place = (short)is_in_place(dst, src, nsrc),
                         .end = nbytes,
                         .scale = scale};
    in_full(kernel, &job, t == HR_FLOAT16 || t == HR_BFLOAT16);
}

/* Whether memcpy stumbles. From 2 KiB to some length it is a string move (`rep movsb`), which takes an AMD EPYC of Zen
 * 4 about ten times as long where in their pages the destination is 1 to 15 bytes ahead of the source, and twice as
 * long where it is 16 to 31: as it is of two arrays of 4 KiB, 8 KiB, ... that malloc gave one after the other. Into
 * lines that another core has the latter is a tenth at most, and there vectors can be far slower (Zen 5). */
static int stumbles(const void *dst, const void *src, size_t len, hr_store store) {
    const size_t ahead = ((uintptr_t)dst - (uintptr_t)src) % 4096, slow = store == HR_STORE_SHARED ? 16 : 32;
    return len >= STRING_MIN && ahead && ahead < slow && __atomic_load_n(&amd, __ATOMIC_RELAXED);
}

/* A reduction of one source is a copy. */
void hr_copy(void *dst, const void *src, size_t len, hr_store store) {
    if (dst == src) return;
    hr_reduce_kernel kernel = kernel_of(HR_BOR, HR_UINT8); /* first, as above */
    const int slow = stumbles(dst, src, len, store);
    store = len < HR_SHARED_MIN ? HR_STORE_CACHED : suitable(store, len);
    if (store == HR_STORE_CACHED && !slow) {
        memcpy(dst, src, len);
        return;
    }
    hr_reduce_job job = {.src = &src, .nsrc = 1, .dst = dst, .store = store, .pages = (short)pages(), .end = len};
    in_full(kernel, &job, 0);
}
