/* registry.c - the table of providers, expanded from providers/providers.def. */

#include <string.h>

#include "hr/provider.h"

#define HR_PROVIDER(name) extern const struct hr_provider hr_provider_##name;
#define HR_WRAPPER(name) extern const struct hr_provider hr_provider_##name;
#include "providers/providers.def"
#undef HR_PROVIDER
#undef HR_WRAPPER

#define HR_PROVIDER(name) &hr_provider_##name,
#define HR_WRAPPER(name)
const struct hr_provider *const hr_providers[] = {
#include "providers/providers.def"
    NULL};
#undef HR_PROVIDER
#undef HR_WRAPPER

#define HR_PROVIDER(name)
#define HR_WRAPPER(name) &hr_provider_##name,
static const struct hr_provider *const wrappers[] = {
#include "providers/providers.def"
    NULL};
#undef HR_PROVIDER
#undef HR_WRAPPER

_Static_assert(sizeof(hr_providers) / sizeof(hr_providers[0]) <= HR_MAX_PROVIDERS + 1, "raise HR_MAX_PROVIDERS");

static const struct hr_provider *find_in(const struct hr_provider *const *table, const char *name) {
    for (; *table; table++)
        if (strcmp((*table)->name, name) == 0) return *table;
    return NULL;
}

const struct hr_provider *hr_provider_find(const char *name) {
    const struct hr_provider *provider = find_in(hr_providers, name);
    return provider ? provider : find_in(wrappers, name);
}
