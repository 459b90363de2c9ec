/* ifaces.h - this host's addresses, and the grammar that chooses among them. */
#ifndef HR_IFACES_H
#define HR_IFACES_H

/*
 * grammar: items separated by commas; blanks around an item are ignored.
 *   eth0            that interface
 *   eth*            a glob over names
 *   10.0.0.0/16     addresses in that network; a bare address is itself
 *   ^ITEM           not those
 * Without a positive item all interfaces are chosen; exclusions win whatever the order.
 */

#include <net/if.h>
#include <netinet/in.h>
#include <stddef.h>

#include "hr/status.h"

union hr_sockaddr {
    struct sockaddr sa;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

struct hr_iface {
    char name[IF_NAMESIZE];
    union hr_sockaddr at; /* port 0 */
    uint8_t prefix;       /* bits of the network */
    uint8_t loopback;
    uint8_t chosen;
};

#define HR_SOCKADDR_TEXT 64 /* enough for an address and port as text */

/* All IPv4 and IPv6 addresses of interfaces that are up, loopback last; IPv6 link-local ones are left out, they mean
 * nothing without a scope that only the host itself knows. Returns how many; *list_p is to be freed. -1: errno. */
int hr_ifaces_scan(struct hr_iface **list_p);
/* Sets `chosen`. HR_ERR_INVALID: not in the grammar. HR_ERR_NO_DEVICE: nothing is chosen. detail says why. */
hr_status hr_ifaces_choose(struct hr_iface *list, int n, const char *grammar, char detail[256]);

/* 1 when both are in the network that the first prefix bits name. */
int hr_sockaddr_within(const union hr_sockaddr *a, const union hr_sockaddr *b, int prefix);
/* 1 when the addresses are one, whatever the ports. */
int hr_sockaddr_same(const union hr_sockaddr *a, const union hr_sockaddr *b);
int hr_sockaddr_loopback(const union hr_sockaddr *a);
/* 1: loopback, or one of these: whoever has it is this host. */
int hr_ifaces_own(const struct hr_iface *list, int n, const union hr_sockaddr *a);
socklen_t hr_sockaddr_len(const union hr_sockaddr *a);
uint16_t hr_sockaddr_port(const union hr_sockaddr *a);
void hr_sockaddr_set_port(union hr_sockaddr *a, uint16_t port);
/* "10.0.0.2:4242", "[fd00::2]:4242"; without a port "10.0.0.2". */
const char *hr_sockaddr_text(const union hr_sockaddr *a, char text[HR_SOCKADDR_TEXT]);

#endif
