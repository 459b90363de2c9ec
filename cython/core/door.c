/* door.c - the accepting side of connections over sockets: accepting, proof of the job key, parking. */

#include "hr/door.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hr/clock.h"

#define PROVE_NS 5000000000LL
enum { HALF_OPEN = 256, PARKED = 4096, ACCEPTS = 16 };

int hr_door_listen(struct hr_door *door, const union hr_sockaddr *at, const char *name, int most) {
    if (!door->listeners && !(door->listeners = calloc((size_t)most, sizeof *door->listeners))) return -1;
    struct hr_listener *listener = &door->listeners[door->nlisteners];
    int fd = hr_socket_open(at->sa.sa_family);
    *listener = (struct hr_listener){.source = {.kind = door->listener_kind, .fd = fd}, .at = *at};
    snprintf(listener->name, sizeof listener->name, "%s", name);
    if (fd < 0) return -1;
    /* The window that a connection may offer is fixed when it is accepted: buffers are set on the listener. */
    if (!door->prepare(door, fd, hr_sockaddr_loopback(at)) && !hr_socket_listen(fd, &listener->at) &&
        !hr_poll_watch(door->poll, &listener->source, EPOLLIN)) {
        door->nlisteners++;
        return 0;
    }
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static void pause_accepting(struct hr_door *door, int pause) {
    if (door->paused == pause) return;
    door->paused = pause;
    for (int i = 0; i < door->nlisteners; i++)
        hr_poll_watch(door->poll, &door->listeners[i].source, pause ? 0 : EPOLLIN);
    door->changed(door);
}

static void half_open(struct hr_door *door, int change) {
    door->half_open += change;
    if (door->half_open >= HALF_OPEN)
        pause_accepting(door, 1);
    else if (change < 0)
        pause_accepting(door, 0);
    door->changed(door);
}

int hr_door_take(struct hr_door *door, struct hr_caller *caller) {
    int fd = caller->source.fd, parked = caller->step == HR_CALLER_PARKED;
    hr_poll_forget(door->poll, &caller->source);
    hr_list_remove(&caller->link);
    free(caller);
    if (parked)
        door->parked--;
    else
        half_open(door, -1);
    return fd;
}

static void drop(struct hr_door *door, struct hr_caller *caller) {
    int fd = hr_door_take(door, caller);
    shutdown(fd, SHUT_RDWR); /* a forked child may hold a copy: closing would not tell the peer */
    close(fd);
}

/* Once for each reason: who knocks again and again fills no log. */
static void tell(struct hr_door *door, const union hr_sockaddr *from, enum hr_stranger reason) {
    static const char *const words[] = {
        [HR_STRANGER_FOREIGN] = "it does not speak this protocol",
        [HR_STRANGER_UNPROVEN] = "it does not know the job token, or is not of this job",
        [HR_STRANGER_REMOTE] = "it is on another host and there is no job token",
        [HR_STRANGER_SILENT] = "it did not prove within 5 s that it is of this job",
    };
    char at[HR_SOCKADDR_TEXT], text[HR_SOCKADDR_TEXT + 80];
    if (door->told & 1u << reason) return;
    door->told |= 1u << reason;
    snprintf(text, sizeof text, "%s: %s", hr_sockaddr_text(from, at), words[reason]);
    door->stranger(door, text);
}

void hr_door_close(struct hr_door *door) {
    while (!hr_list_empty(&door->callers)) drop(door, hr_container(door->callers.next, struct hr_caller, link));
    for (int i = 0; i < door->nlisteners; i++) {
        hr_poll_forget(door->poll, &door->listeners[i].source);
        shutdown(door->listeners[i].source.fd, SHUT_RDWR);
        close(door->listeners[i].source.fd);
    }
    free(door->listeners);
    door->listeners = NULL;
    door->nlisteners = 0;
}

void hr_door_tick(struct hr_door *door, int64_t now) {
    for (struct hr_link *l = door->callers.next, *next; l != &door->callers; l = next) {
        struct hr_caller *caller = hr_container(l, struct hr_caller, link);
        next = l->next;
        if (caller->step == HR_CALLER_PARKED || now < caller->deadline) continue;
        tell(door, &caller->from, HR_STRANGER_SILENT);
        drop(door, caller);
    }
    /* After a shortage of descriptors or memory. */
    if (door->half_open < HALF_OPEN) pause_accepting(door, 0);
}

void hr_door_accept(struct hr_door *door, struct hr_listener *listener) {
    for (int i = 0; i < ACCEPTS && !door->paused; i++) {
        union hr_sockaddr from;
        int fd = hr_socket_accept(listener->source.fd, &from);
        if (fd < 0) {
            /* Out of descriptors: look again at the next tick, or the listener would keep progress spinning. */
            if (fd == -2) pause_accepting(door, 1);
            return;
        }
        int local = hr_ifaces_own(door->ifaces, door->nifaces, &from);
        int remote = !local && !door->auth->have_token && !door->auth->insecure;
        struct hr_caller *caller = NULL;
        if (remote) tell(door, &from, HR_STRANGER_REMOTE);
        if (remote || door->prepare(door, fd, local) || !(caller = calloc(1, sizeof *caller))) {
            close(fd);
            continue;
        }
        caller->source = (struct hr_source){.kind = door->caller_kind, .fd = fd};
        caller->from = from;
        caller->deadline = hr_now() + PROVE_NS;
        hr_handshake_start(&caller->hs, door->auth, 0, door->self_id, 0);
        hr_list_push(&door->callers, &caller->link);
        half_open(door, 1);
        if (hr_poll_watch(door->poll, &caller->source, EPOLLIN)) drop(door, caller);
    }
}

struct hr_caller *hr_door_find(struct hr_door *door, uint64_t peer_id, uint32_t stream) {
    for (struct hr_link *l = door->callers.next; l != &door->callers; l = l->next) {
        struct hr_caller *caller = hr_container(l, struct hr_caller, link);
        if (caller->step == HR_CALLER_PARKED && caller->hs.peer_id == peer_id && caller->stream == stream)
            return caller;
    }
    return NULL;
}

/* An older caller for the same stream was given up by the peer. */
static void park(struct hr_door *door, struct hr_caller *caller) {
    struct hr_caller *old = hr_door_find(door, caller->hs.peer_id, caller->stream);
    if (old) drop(door, old);
    if (door->parked >= PARKED) {
        drop(door, caller);
        return;
    }
    caller->step = HR_CALLER_PARKED;
    door->parked++;
    half_open(door, -1);
    door->waits(door, caller);
}

void hr_door_event(struct hr_door *door, struct hr_caller *caller) {
    int fd = caller->source.fd;
    if (caller->step == HR_CALLER_PROVING) {
        int want_write = 0;
        hr_status status = hr_handshake_step(&caller->hs, fd, &want_write);
        if (status == HR_AGAIN)
            hr_poll_watch(door->poll, &caller->source, want_write ? EPOLLOUT : EPOLLIN);
        else if (status != HR_OK) {
            if (status == HR_ERR_PROTOCOL) tell(door, &caller->from, HR_STRANGER_FOREIGN);
            if (status == HR_ERR_AUTH) tell(door, &caller->from, HR_STRANGER_UNPROVEN);
            drop(door, caller);
        }
        if (status != HR_OK) return;
        caller->step = HR_CALLER_OPENING;
        hr_poll_watch(door->poll, &caller->source, EPOLLIN);
    }
    uint8_t byte;
    int parked = caller->step == HR_CALLER_PARKED;
    ssize_t n = recv(fd, parked ? &byte : caller->open + caller->have, parked ? 1 : door->open_len - caller->have,
                     MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0 || parked) { /* parked it says nothing until it is answered: whatever comes is its end */
        drop(door, caller);
        return;
    }
    caller->have += (uint32_t)n;
    if (caller->have < door->open_len) return;
    if (door->good(caller->open, &caller->stream)) {
        park(door, caller);
        return;
    }
    tell(door, &caller->from, HR_STRANGER_FOREIGN);
    drop(door, caller);
}
