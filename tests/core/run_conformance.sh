#!/bin/sh
# run_conformance.sh - the conformance suite over providers, and the proof that the suite can fail.
#
#     run_conformance.sh plain|asan|tsan BINARY PROVIDER...
#
# Every provider runs plain and inside the fault provider with no faults, with one thread and with one per side. Then
# faults are switched on and the check that must notice is expected to fail: once, without sanitizers, is enough. Those
# run with a thread per side, in which no check is left out. Exits with 1 after the first surprise. The device of verbs is the
# simulated one, or HR_TEST_DEVICE; without that the suite runs with shared receives for all endpoints as well, on two
# rails, and over tcp where no rail will do.
set -eu
flavour=$1
binary=$2
shift 2
limit=10 # with sanitizers some checks have 2 s of work, and take 8 to 10 where six such programs share two cores
[ "$flavour" = plain ] || limit=40

conformance() { "$binary" --limit $limit "$@"; }

suite() {
    case "$*" in
    *verbs*) conformance --device "${HR_TEST_DEVICE:-sim}" "$@" ;;
    *) conformance "$@" ;;
    esac
}

must_fail() { # provider options check
    suite --limit 1 --expect-fail --options "$2" "fault:$1" "$3" >/dev/null 2>&1 || {
        echo "fault:$1 with $2: $3 did not notice" >&2
        exit 1
    }
}

for provider in "$@"; do
    for threads in "" --threads; do
        [ "$flavour" != plain ] && [ -z "$threads" ] && continue
        suite $threads "$provider"
        suite $threads "fault:$provider"
        if [ "$provider" = verbs ] && [ -z "${HR_TEST_DEVICE:-}" ]; then
            conformance --options receives=shared $threads --device sim verbs
            conformance --device sim2,sim2 --options silence=5 $threads verbs
            conformance --device sim2 --options fallback=tcp $threads verbs
            conformance --device sim2 --options fallback=tcp,deaf=16 $threads verbs
        fi
        suite $threads --options delay=0.01:200us "fault:$provider" streams
        suite $threads --options delay=1:20ms "fault:$provider" cancel
    done
    [ "$flavour" = plain ] || continue
    for options in seed=1,drop=0.01 seed=1,reorder=0.01 seed=1,truncate=0.01 seed=1,error=0.01 kill=after:100; do
        must_fail "$provider" "$options" streams_both_ways_in_order
    done
    must_fail "$provider" drop=1,budget=1 connect_active_first
    must_fail "$provider" drop=0.5 every_message_wakes
    must_fail "$provider" kill=after:50 destroying_one_endpoint_leaves_the_others
    if [ "$provider" != shm ]; then
        must_fail "$provider" drop=0.05,ops=write write_is_visible_before_a_later_message
        must_fail "$provider" truncate=1,budget=1,ops=write write_is_visible_before_its_notification
        must_fail "$provider" truncate=1,ops=read plain_memory
        must_fail "$provider" drop=1,budget=1,ops=read plain_memory
        must_fail "$provider" error=0.1,ops=atomic atomics_add_up
    fi
    if [ "$provider" = verbs ]; then # the others need no quiet before they deregister
        must_fail "$provider" drop=1,ops=quiet nothing_is_written_after_quiet
    fi
done
echo "conformance: $* passed, and, without sanitizers, failed where they had to"
