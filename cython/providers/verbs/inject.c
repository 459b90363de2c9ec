/* inject.c - faults at the level of the verbs, by plan. */

#include "providers/verbs/inject.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hr/fault.h"
#include "hr/mix.h"

static const struct {
    const char *name;
    enum ibv_wc_status status;
} statuses[] = {{"retry", IBV_WC_RETRY_EXC_ERR}, {"rnr", IBV_WC_RNR_RETRY_EXC_ERR}, {"access", IBV_WC_REM_ACCESS_ERR},
                {"flush", IBV_WC_WR_FLUSH_ERR},  {"local", IBV_WC_LOC_PROT_ERR},    {"fatal", IBV_WC_FATAL_ERR}};

static int bad(char detail[256], const char *key, const char *value, const char *want) {
    snprintf(detail, 256, "verbs option %.40s=%.80s: expected %s", key, value, want);
    return -1;
}

static int rate(const char *key, const char *value, double *rate_p, char detail[256]) {
    char *end;
    double found = strtod(value, &end);
    if (end == value || *end || !(found >= 0 && found <= 1))
        return bad(detail, key, value, "a probability from 0 to 1");
    *rate_p = found;
    return 1;
}

static int number(const char *key, const char *value, uint64_t *number_p, char detail[256]) {
    char *end;
    unsigned long long found = strtoull(value, &end, 10);
    if (end == value || *end || *value == '-') return bad(detail, key, value, "a whole number");
    *number_p = found;
    return 1;
}

int hr_verbs_inject_option(struct hr_verbs_inject *inject, const char *key, const char *value, char detail[256]) {
    if (!strcmp(key, "wc_error")) return rate(key, value, &inject->wc_error, detail);
    if (!strcmp(key, "errno")) return rate(key, value, &inject->post_error, detail);
    if (!strcmp(key, "reg_errno")) return rate(key, value, &inject->reg_error, detail);
    if (!strcmp(key, "deaf")) return number(key, value, &inject->deaf, detail);
    if (!strcmp(key, "narrow")) return number(key, value, &inject->narrow, detail);
    if (!strcmp(key, "fault_seed")) return number(key, value, &inject->seed, detail);
    if (!strcmp(key, "fault_budget")) return number(key, value, &inject->budget, detail);
    if (strcmp(key, "wc_status")) return 0;
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; i++) {
        if (strcmp(value, statuses[i].name)) continue;
        inject->status = statuses[i].status;
        return 1;
    }
    return bad(detail, key, value, "retry, rnr, access, flush, local or fatal");
}

void hr_verbs_inject_start(const struct hr_verbs_inject *inject, struct hr_verbs_inject_ep *ep, uint64_t self,
                           uint64_t peer, uint32_t stream) {
    ep->random = inject->seed + (self << 40) + (peer << 16) + stream;
    hr_mix(&ep->random);
}

/* A fault of one kind has been injected. */
static void count(uint64_t *kind) {
    ++*kind;
    hr_fault_fired();
}

static int strikes(struct hr_verbs_inject *inject, struct hr_verbs_inject_ep *ep, double probability) {
    if (probability <= 0 || inject->completions + inject->posts + inject->registrations >= inject->budget) return 0;
    return (double)(hr_mix(&ep->random) >> 11) * 0x1p-53 < probability;
}

int hr_verbs_inject_wc(struct hr_verbs_inject *inject, struct hr_verbs_inject_ep *ep, struct ibv_wc *wc) {
    if (wc->status != IBV_WC_SUCCESS || !strikes(inject, ep, inject->wc_error)) return 0;
    count(&inject->completions);
    wc->status = inject->status;
    wc->vendor_err = 0xfa;
    return 1;
}

int hr_verbs_inject_try(struct hr_verbs_inject *inject, int turn, int greeting) {
    uint64_t small = inject->deaf, any = small + inject->narrow;
    if ((uint64_t)turn >= any || (greeting == 0) != ((uint64_t)turn < small)) return 0;
    count(&inject->tries);
    return 1;
}

int hr_verbs_inject_register(struct hr_verbs_inject *inject) {
    struct hr_verbs_inject_ep next = {inject->seed + inject->registered++};
    if (!strikes(inject, &next, inject->reg_error)) return 0;
    count(&inject->registrations);
    return ENOMEM;
}

int hr_verbs_inject_post(struct hr_verbs_inject *inject, struct hr_verbs_inject_ep *ep) {
    if (!strikes(inject, ep, inject->post_error)) return 0;
    count(&inject->posts);
    return ENOMEM;
}
