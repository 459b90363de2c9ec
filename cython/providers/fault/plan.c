/* plan.c - the fault provider's options, and its random numbers. */

#include "fault.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hr/mix.h"

const char *const hr_fault_names[HR_FAULT_KINDS] = {"drop", "delay", "reorder", "truncate", "error", "kill", "stop"};

/* ---- options ---- */

static int bad(char detail[256], const char *key, const char *value, const char *want) {
    snprintf(detail, 256, "fault: %.40s=%.80s: expected %s", key, value, want);
    return 0;
}

/* The number begins at digits, inside text, which is what a message shows. */
static int parse_count(const char *key, const char *text, const char *digits, uint64_t *value_p, char detail[256]) {
    char *end;
    unsigned long long value = strtoull(digits, &end, 10);
    if (end == digits || *end || *digits == '-') return bad(detail, key, text, "a whole number");
    *value_p = value;
    return 1;
}

static int parse_rate(const char *key, const char *text, double *rate_p, char detail[256]) {
    char *end;
    double rate = strtod(text, &end);
    if (end == text || *end || !(rate >= 0 && rate <= 1)) return bad(detail, key, text, "a probability from 0 to 1");
    *rate_p = rate;
    return 1;
}

/* "0.05:2ms" */
static int parse_delay(const char *key, char *text, struct fault_plan *plan, char detail[256]) {
    static const struct {
        const char *unit;
        double ns;
    } units[] = {{"us", 1e3}, {"ms", 1e6}, {"s", 1e9}};
    char *colon = strchr(text, ':'), *end;
    double value;
    if (!colon) return bad(detail, key, text, "probability:time, as in 0.05:2ms");
    value = strtod(colon + 1, &end);
    for (int i = 0; i < 3; i++) {
        if (end == colon + 1 || strcmp(end, units[i].unit) != 0 || !(value >= 0 && value * units[i].ns < 1e12))
            continue;
        plan->delay_ns = (int64_t)(value * units[i].ns);
        *colon = 0;
        return parse_rate(key, text, &plan->rate[FAULT_DELAY], detail);
    }
    return bad(detail, key, text, "a time below 1000s in us, ms or s");
}

/* "after:100", and for kill also "process:100" */
static int parse_after(const char *key, const char *text, uint64_t *after_p, int *process_p, char detail[256]) {
    const char *colon = strchr(text, ':');
    if (colon && strncmp(text, "after:", 6) == 0) return parse_count(key, text, colon + 1, after_p, detail);
    if (colon && process_p && strncmp(text, "process:", 8) == 0) {
        *process_p = 1;
        return parse_count(key, text, colon + 1, after_p, detail);
    }
    return bad(detail, key, text, process_p ? "after:N (endpoint) or process:N" : "after:N");
}

static int parse_ops(const char *key, char *text, unsigned *ops_p, char detail[256]) {
    static const struct {
        const char *name;
        unsigned op;
    } names[] = {{"send", FAULT_SEND},     {"write", FAULT_WRITE}, {"read", FAULT_READ},
                 {"atomic", FAULT_ATOMIC}, {"quiet", FAULT_QUIET}, {"put", FAULT_PUT}};
    char *save, *name;
    unsigned ops = 0;
    for (name = strtok_r(text, "+", &save); name; name = strtok_r(NULL, "+", &save)) {
        unsigned found = 0;
        for (int i = 0; i < 6; i++)
            if (strcmp(name, names[i].name) == 0) found = names[i].op;
        if (!found) return bad(detail, key, name, "send, write, read, atomic, quiet, put, joined by +");
        ops |= found;
    }
    *ops_p = ops;
    return 1;
}

static int parse_one(const char *key, char *value, struct fault_plan *plan, char detail[256]) {
    for (int kind = 0; kind < FAULT_RATES; kind++)
        if (kind != FAULT_DELAY && strcmp(key, hr_fault_names[kind]) == 0)
            return parse_rate(key, value, &plan->rate[kind], detail);
    if (!strcmp(key, "delay")) return parse_delay(key, value, plan, detail);
    if (!strcmp(key, "seed")) return parse_count(key, value, value, &plan->seed, detail);
    if (!strcmp(key, "budget")) return parse_count(key, value, value, &plan->budget, detail);
    if (!strcmp(key, "kill")) return parse_after(key, value, &plan->kill_after, &plan->kill_process, detail);
    if (!strcmp(key, "stop")) return parse_after(key, value, &plan->stop_after, NULL, detail);
    if (!strcmp(key, "ops")) return parse_ops(key, value, &plan->ops, detail);
    snprintf(
        detail, 256,
        "fault: unknown option \"%.60s\": expected seed, drop, delay, reorder, truncate, error, kill, stop, ops or "
        "budget",
        key);
    return 0;
}

hr_status hr_fault_parse(const char *options, struct fault_plan *plan_p, char detail[256]) {
    struct fault_plan plan = {.seed = 1, .budget = UINT64_MAX, .ops = ~(unsigned)(FAULT_QUIET | FAULT_PUT)};
    char text[512], *save, *item;
    double sum = 0;
    int n = snprintf(text, sizeof text, "%s", options ? options : "");

    if (n >= (int)sizeof text) {
        snprintf(detail, 256, "fault: options of %d characters: at most %zu", n, sizeof text - 1);
        return HR_ERR_INVALID;
    }
    for (item = strtok_r(text, ", ", &save); item; item = strtok_r(NULL, ", ", &save)) {
        char *equals = strchr(item, '=');
        if (!equals) {
            snprintf(detail, 256, "fault: \"%.80s\": expected key=value", item);
            return HR_ERR_INVALID;
        }
        *equals = 0;
        if (!parse_one(item, equals + 1, &plan, detail)) return HR_ERR_INVALID;
    }
    for (int kind = 0; kind < FAULT_RATES; kind++) sum += plan.rate[kind];
    if (sum > 1) {
        snprintf(detail, 256, "fault: the probabilities add up to %g: at most 1, an operation has one fault", sum);
        return HR_ERR_INVALID;
    }
    *plan_p = plan;
    return HR_OK;
}

/* ---- random numbers: xoshiro256** (Blackman and Vigna, "Scrambled Linear Pseudorandom Number Generators", 2021) ----
 */

static uint64_t rotl(uint64_t x, int k) { return x << k | x >> (64 - k); }

uint64_t hr_fault_next(struct fault_random *random) {
    uint64_t *s = random->s, result = rotl(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return result;
}

/* A state that is not all zero, whatever the seed. */
void hr_fault_seed(struct fault_random *random, uint64_t seed) {
    for (int i = 0; i < 4; i++) random->s[i] = hr_mix(&seed);
}
