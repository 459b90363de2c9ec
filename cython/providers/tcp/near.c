/* near.c - whether a network is between the two ends of a connection. */

/*
 * Not on loopback, and not between two containers of one machine, unless somebody has put one there: a namespace may
 * stand for a host of a network that is only imagined, with its delay. So between namespaces it is looked at how long
 * the kernel took for a round trip, which is some 10 us over loopback, a veth pair or a bridge. A rate alone does no
 * harm: reno keeps to it as others do. Virtual machines that were copied while they ran have the boot's name in common,
 * and may be as near as that in a data centre: there reno is no worse than most. Who wants such links to be taken for a
 * network names a congestion control, or the system's.
 */

#include <linux/tcp.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

#include "providers/tcp/tcp.h"

enum { NEAR_US = 200 };

int hr_tcp_near(struct hr_tcp_ep *ep) {
    const struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    struct tcp_info info;
    socklen_t len = sizeof info;
    if (hr_ifaces_own(d->ifaces, d->nifaces, &ep->peer)) return 1;
    if (!ep->same_machine || strcmp(d->opt.cc, "auto") != 0) return 0;
    memset(&info, 0, sizeof info);
    if (getsockopt(ep->source.fd, IPPROTO_TCP, TCP_INFO, &info, &len)) return 0;
    return info.tcpi_min_rtt && info.tcpi_min_rtt < NEAR_US;
}
