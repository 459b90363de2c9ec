/* conformance.c - one suite for every provider: the contract of hr/provider.h, slot by slot.
 *
 *     conformance [flags] PROVIDER [PART-OF-A-NAME]
 *
 * PROVIDER is a name from providers.def, or fault:NAME for the fault provider around another.
 *
 *     --list               name the checks
 *     --threads            each side has a thread and a lock of its own
 *     --options TEXT       handed to domain_open
 *     --ifname TEXT        handed to domain_open
 *     --device TEXT        handed to domain_open
 *     --limit SECONDS      how long a check waits for what must come (10)
 *     --expect-fail        the reverse: exit with 0 if the checks fail AND the fault provider injected something.
 *                          A suite that cannot fail proves nothing; run_conformance.sh has the list of such runs.
 */

#include <getopt.h>

#include "conformance.h"
#include "hr/fault.h"

static uint64_t injected;

void count_faults(struct hr_domain *domain) {
    const char *names[HR_FAULT_KINDS];
    uint64_t values[HR_FAULT_KINDS];
    int n = hr_fault_counts(domain, names, values, HR_FAULT_KINDS);
    for (int i = 0; i < n; i++) injected += values[i];
}

static void on_alarm(int sig) {
    static const char text[] = ": took longer than CHECK_TIMEOUT\n";
    (void)sig;
    if (write(2, check_current, strlen(check_current)) < 0 || write(2, text, sizeof text - 1) < 0) _exit(3);
    _exit(2);
}

static int list(void) {
    for (struct check_test *t = check_first; t; t = t->next) puts(t->name);
    return 0;
}

static int choose(const char *name) {
    if (strncmp(name, "fault:", 6) == 0) {
        settings.inner = hr_provider_find(name + 6);
        if (!settings.inner) return fprintf(stderr, "no provider \"%s\"\n", name + 6), 0;
        name = "fault";
    }
    settings.provider = hr_provider_find(name);
    if (!settings.provider) fprintf(stderr, "no provider \"%s\"\n", name);
    return settings.provider != NULL;
}

/* Returns how many checks failed, or -1 when no check has such a name. */
static int run(const char *filter) {
    int passed = 0, failed = 0, skipped = 0;
    signal(SIGALRM, on_alarm);
    signal(SIGPIPE, SIG_DFL); /* a provider must not rely on the application to ignore it */
    for (struct check_test *t = check_first; t; t = t->next) {
        int64_t start = rig_now();
        if (!strstr(t->name, filter)) continue;
        check_current = t->name;
        check_skipped = NULL;
        atomic_store(&check_count, 0);
        alarm(CHECK_TIMEOUT);
        t->run();
        alarm(0);
        if (check_failures()) {
            printf("%-55s FAILED, %d checks\n", t->name, check_failures());
            failed++;
        } else if (check_skipped) {
            printf("%-55s skipped: %s\n", t->name, check_skipped);
            skipped++;
        } else {
            printf("%-55s ok %6.1f ms\n", t->name, (double)(rig_now() - start) / 1e6);
            passed++;
        }
        fflush(stdout);
    }
    if (!passed && !failed && !skipped) return -1;
    printf("%s%s%s%s: %d passed, %d skipped, %d failed\n", settings.provider->name, settings.inner ? ":" : "",
           settings.inner ? settings.inner->name : "", settings.threads ? " (threads)" : "", passed, skipped, failed);
    return failed;
}

int main(int argc, char **argv) {
    static const struct option flags[] = {
        {"list", no_argument, NULL, 'l'},          {"threads", no_argument, NULL, 't'},
        {"options", required_argument, NULL, 'o'}, {"ifname", required_argument, NULL, 'i'},
        {"device", required_argument, NULL, 'd'},  {"limit", required_argument, NULL, 's'},
        {"expect-fail", no_argument, NULL, 'x'},   {0},
    };
    int flag, failed, expect_failure = 0;

    settings.limit = 10ll * 1000000000;
    while ((flag = getopt_long(argc, argv, "", flags, NULL)) != -1) {
        switch (flag) {
        case 'l': return list();
        case 't': settings.threads = 1; break;
        case 'o': settings.options = optarg; break;
        case 'i': settings.ifname = optarg; break;
        case 'd': settings.device = optarg; break;
        case 's': settings.limit = (int64_t)(atof(optarg) * 1e9); break;
        case 'x': expect_failure = 1; break;
        default: return 1;
        }
    }
    if (optind >= argc || !choose(argv[optind])) {
        fprintf(stderr, "usage: conformance [flags] PROVIDER [PART-OF-A-NAME]\n");
        return 1;
    }
    failed = run(optind + 1 < argc ? argv[optind + 1] : "");
    if (failed < 0) {
        fprintf(stderr, "no check has \"%s\" in its name\n", argv[optind + 1]);
        return 1;
    }
    if (!expect_failure) return failed != 0;
    printf("%llu faults injected\n", (unsigned long long)injected);
    if (!injected) fprintf(stderr, "no fault was injected: this run proves nothing\n");
    if (!failed) fprintf(stderr, "the checks passed in spite of the faults\n");
    return !(failed && injected);
}
