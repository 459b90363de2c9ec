/* net.h - sockets as providers between hosts use them: watched by one epoll, listened on, called, given away as bytes.
 */
#ifndef HR_NET_H
#define HR_NET_H

#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>

#include "hr/ifaces.h"
#include "hr/status.h"

/* What an epoll event points to; the first member of everything that has a descriptor there. */
struct hr_source {
    int kind; /* the provider's: what it is the first member of */
    int fd;   /* -1: none */
    int watched;
    uint32_t interest; /* the bits that are watched for */
};

enum { HR_POLL_EVENTS = 16 };
struct hr_poll {
    int fd;
    struct epoll_event events[HR_POLL_EVENTS];
    int next, count; /* events [next, count) were fetched and not looked at */
    int writers;     /* sources that are watched for EPOLLOUT */
};

/* Adds it to the epoll, or changes its bits. -1: errno. */
int hr_poll_watch(struct hr_poll *poll, struct hr_source *source, uint32_t interest);
/* Takes it out of the epoll and out of the events at hand. */
void hr_poll_forget(struct hr_poll *poll, struct hr_source *source);
/* Asks the kernel, without waiting, when all events at hand were looked at. */
void hr_poll_fetch(struct hr_poll *poll);
/* The next event at hand and what it points to, which was not forgotten since; NULL: none is left. */
struct hr_source *hr_poll_next(struct hr_poll *poll, uint32_t *bits_p);

struct hr_listener {
    struct hr_source source;
    union hr_sockaddr at; /* with port */
    char name[IF_NAMESIZE];
};

/* A socket for calls to, or from, addresses of that family: stream, non-blocking, closed by exec. -1: errno. */
int hr_socket_open(int family);
/* Binds and listens; the port that the kernel chose is put into at. -1: errno. */
int hr_socket_listen(int fd, union hr_sockaddr *at);
/* A caller's socket; -1: nobody calls; -2: there is no descriptor or memory for who does, so look again later. */
int hr_socket_accept(int listener, union hr_sockaddr *from_p);
/* Starts to call. -1: errno. */
int hr_socket_call(int fd, const union hr_sockaddr *to);
/* How a call that was started has ended: 0, or an errno. */
int hr_socket_called(int fd);
/* What became of a handshake, in words; how says what it is to the connection. */
const char *hr_prove_text(hr_status status, hr_status *how_p);

/* An address with its port as bytes of a domain's address: 7 or 19 of them. */
size_t hr_sockaddr_size(const union hr_sockaddr *a);
uint8_t *hr_sockaddr_write(const union hr_sockaddr *a, uint8_t *to);
/* Where the next one begins, or NULL: these bytes are none. */
const uint8_t *hr_sockaddr_read(union hr_sockaddr *a, const uint8_t *from, const uint8_t *end);

#endif
