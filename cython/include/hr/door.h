/* door.h - the accepting side of connections over sockets: listeners, callers that prove themselves, those who wait. */
#ifndef HR_DOOR_H
#define HR_DOOR_H

/*
 * A caller costs one small structure and a descriptor until it has proved the job key; it has five seconds for that,
 * and there are at most HALF_OPEN of them: beyond that nobody is accepted and the kernel's queue holds the rest. So a
 * port scanner delays nothing for longer than that and never gets to see more than its socket closing. The first that
 * is turned away for a reason is told of.
 *
 * A caller that proved itself names the endpoint it wants: its open, of which the provider says whether it makes sense
 * and which stream it names. If no endpoint waits for it yet it is parked, and must be silent until it is answered.
 */

#include "hr/auth.h"
#include "hr/list.h"
#include "hr/net.h"

enum { HR_OPEN_BYTES = 256 }; /* largest open */

enum hr_stranger { HR_STRANGER_FOREIGN, HR_STRANGER_UNPROVEN, HR_STRANGER_REMOTE, HR_STRANGER_SILENT };

enum hr_caller_step { HR_CALLER_PROVING, HR_CALLER_OPENING, HR_CALLER_PARKED };
struct hr_caller {
    struct hr_source source;
    struct hr_link link; /* door.callers */
    enum hr_caller_step step;
    struct hr_handshake hs;
    int64_t deadline; /* until parked */
    union hr_sockaddr from;
    uint32_t have, stream;
    _Alignas(8) uint8_t open[HR_OPEN_BYTES];
};

struct hr_door {
    struct hr_poll *poll;
    const struct hr_auth *auth;
    uint64_t self_id;
    const struct hr_iface *ifaces; /* of this host: without a token only its own addresses may call */
    int nifaces;
    int listener_kind, caller_kind; /* of their sources */
    size_t open_len;
    /* Settings of a socket, the listeners' too. 0: all well. */
    int (*prepare)(struct hr_door *door, int fd, int local);
    /* Whether an open makes sense; which stream it names. */
    int (*good)(const void *open, uint32_t *stream_p);
    /* This caller waits: an endpoint that is meant may take it now. */
    void (*waits)(struct hr_door *door, struct hr_caller *caller);
    /* hr_door_busy may have changed. */
    void (*changed)(struct hr_door *door);
    /* A caller that was turned away: where it came from, and why. */
    void (*stranger)(struct hr_door *door, const char *detail);

    struct hr_listener *listeners;
    int nlisteners;
    struct hr_link callers;
    int half_open; /* callers that have not proved the key yet */
    int parked;    /* callers that have, and wait for an endpoint */
    int paused;    /* nobody is accepted until a tick */
    unsigned told; /* reasons of which one was told of: bits by enum hr_stranger */
};

/* Listens there too; room for most addresses in all. -1: errno, and the address may be there but not usable yet or any
 * more (tentative, deprecated): others will do. */
int hr_door_listen(struct hr_door *door, const union hr_sockaddr *at, const char *name, int most);
void hr_door_accept(struct hr_door *door, struct hr_listener *listener);
void hr_door_event(struct hr_door *door, struct hr_caller *caller);
/* To be called every now and then while the door is busy. */
void hr_door_tick(struct hr_door *door, int64_t now);
static inline int hr_door_busy(const struct hr_door *door) { return door->half_open || door->paused; }
/* A parked caller of that peer for that stream, or NULL. */
struct hr_caller *hr_door_find(struct hr_door *door, uint64_t peer_id, uint32_t stream);
/* Its socket, unwatched; the caller is gone. */
int hr_door_take(struct hr_door *door, struct hr_caller *caller);
void hr_door_close(struct hr_door *door);

#endif
