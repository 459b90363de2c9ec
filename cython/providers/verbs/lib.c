/* lib.c - libibverbs, opened at run time. */

/*
 * Symbols are asked for by version, because the library still has those of its first interface under the same names. It
 * stays open: its drivers leave handlers behind that must not be unloaded.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>

#include "providers/verbs/backend.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct hr_verbs_backend table;
static const char *missing;
static int (*fork_status)(void); /* of libraries since 2021 */
enum { FORK_UNNEEDED = 2 };

/* Completion channels never changed, and so kept their first version. */
static void *symbol(void *lib, const char *name) {
    void *found = dlvsym(lib, name, "IBVERBS_1.1");
    return found ? found : dlvsym(lib, name, "IBVERBS_1.0");
}

static void load(void) {
    void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        missing = "libibverbs.so.1 cannot be loaded: install rdma-core (Debian, Ubuntu: apt install ibverbs-providers)";
        return;
    }
#define LOAD(type, name, args) \
    if (!(*(void **)&table.name = symbol(lib, "ibv_" #name))) missing = "libibverbs has no symbol ibv_" #name;
    HR_VERBS_BACKEND_CALLS(LOAD)
    *(void **)&fork_status = dlsym(lib, "ibv_is_fork_initialized");
    if (missing) dlclose(lib);
}

int hr_verbs_fork_safe(const struct hr_verbs_backend *verbs) {
    return verbs != &table || (fork_status && fork_status() == FORK_UNNEEDED);
}

const struct hr_verbs_backend *hr_verbs_lib(const char **why_p) {
    pthread_once(&once, load);
    if (missing) *why_p = missing;
    return missing ? NULL : &table;
}
