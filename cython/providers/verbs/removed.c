/* removed.c - hears from the kernel that a device was taken away, where libibverbs is not told. */

/*
 * A driver that can let go of its users (mlx5) says IBV_EVENT_DEVICE_FATAL. One that cannot (soft-RoCE, soft-iWARP)
 * says nothing: who removes the device waits until all who have it open have closed it. What can be seen is that its
 * node in /dev/infiniband goes, of which the kernel tells everybody who asks. In a network namespace of a user
 * namespace it does not: there the remover waits until the domain is closed.
 */

#include <errno.h>
#include <linux/netlink.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "providers/verbs/verbs.h"

enum { KERNEL = 1 }; /* the group of what the kernel tells; another is udev's */

void hr_verbs_removed_watch(struct hr_verbs_domain *d) {
    struct sockaddr_nl at = {.nl_family = AF_NETLINK, .nl_groups = KERNEL};
    d->removed.fd = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_KOBJECT_UEVENT);
    if (d->removed.fd >= 0 && bind(d->removed.fd, (struct sockaddr *)&at, sizeof at) == 0 &&
        hr_poll_watch(&d->poll, &d->removed, EPOLLIN) == 0)
        return;
    hr_verbs_unwatch(d, &d->removed); /* it is done without */
}

/* "remove@/devices/.../infiniband_verbs/uverbs0", and a zero. */
static int is_ours(const struct hr_verbs_domain *d, const char *text) {
    static const char remove[] = "remove@", folder[] = "/infiniband_verbs/";
    const char *name = strrchr(text, '/');
    size_t len = sizeof folder - 1;
    if (strncmp(text, remove, sizeof remove - 1) != 0 || !name || strcmp(name + 1, d->ctx->device->dev_name) != 0)
        return 0;
    return (size_t)(name + 1 - text) >= len && strncmp(name + 1 - len, folder, len) == 0;
}

int hr_verbs_removed_event(struct hr_verbs_domain *d) {
    char text[4096];
    for (;;) {
        struct sockaddr_nl from = {0};
        socklen_t from_len = sizeof from;
        ssize_t n = recvfrom(d->removed.fd, text, sizeof text - 1, MSG_DONTWAIT, (struct sockaddr *)&from, &from_len);
        if (n < 0 && errno == ENOBUFS && access(d->ctx->device->dev_path, F_OK)) return 1; /* some were not kept */
        if (n < 0 && errno != ENOBUFS && errno != EINTR) return 0;
        if (n < 0 || from.nl_pid) continue; /* 0 is the kernel */
        text[n] = 0;
        if (is_ours(d, text)) return 1;
    }
}
