/* loop.h - the objects of the loop provider, shared by its two source files. */
#ifndef HR_LOOP_H
#define HR_LOOP_H

#include <pthread.h>

#include "hr/auth.h"
#include "hr/provider.h"
#include "ring.h"

enum { LOOP_ADDR_BYTES = 16, LOOP_MAX_SEND = 1 << 16 };

/* A registration. Keys hold a generation, so a key that outlived its registration opens nothing else. */
struct loop_region {
    char *addr; /* NULL: free */
    size_t len;
    uint32_t access;
    uint32_t generation;
};

/*
 * The part of a domain that other threads touch: its door bell and its registered memory. Links count references, so a
 * peer that rings or reads a moment after the domain was closed finds a bell that nobody hears and an empty table,
 * never freed memory or somebody else's descriptor.
 */
struct loop_shared {
    atomic_int refs;
    atomic_int armed;     /* the owner sleeps, or is about to: ring */
    int fd;               /* the bell: an eventfd */
    pthread_mutex_t lock; /* held during every access from outside: what revoke and abort wait for */
    struct loop_region *regions;
    uint32_t nregions, first_free; /* no slot below first_free is free */
};

/* Two connected endpoints. Side 0 is the active one. */
struct loop_link {
    atomic_int refs;
    struct loop_shared *shared[2];
    atomic_int closed[2]; /* set under shared[i]->lock */
    struct ring ring[2];  /* ring[i] is read by side i */
};

struct loop_domain {
    struct hr_domain base;
    uint64_t self_id;
    uint8_t addr[LOOP_ADDR_BYTES];
    struct hr_auth auth;
    struct loop_shared *shared;
    int armed;            /* shared->armed was set, and not taken back */
    uint64_t rung;        /* rings of the bell that were not read from it yet */
    struct loop_ep **eps; /* in order of creation; changed under the table's lock, which others hold to search it */
    int neps, cap, next;  /* next: whose turn it is in progress */
    unsigned turns;
    struct loop_domain *next_domain;
};

enum loop_phase { LOOP_IDLE, LOOP_CONNECTING, LOOP_OPEN, LOOP_DEAD };

struct loop_map; /* an arena of the peer's, mapped here */

struct loop_ep {
    struct hr_ep base;
    enum loop_phase phase; /* what the sink was told */
    int active, side;
    size_t starved;     /* size of the record for which post found no room; 0: none, or its room was told */
    atomic_int verdict; /* CONNECTING: HR_INPROGRESS until the pair is made, then the result. Orders link and side. */
    int waiting;        /* under the table's lock: may be paired */
    uint8_t target[LOOP_ADDR_BYTES];
    const char *detail;
    struct loop_link *link;
    struct loop_map *maps;
};

/* pair.c */
struct loop_shared *hr_loop_shared_new(void);
void hr_loop_shared_put(struct loop_shared *shared);
void hr_loop_ring_bell(struct loop_shared *shared); /* wakes the owner if it sleeps */
void hr_loop_table_add(struct loop_domain *domain);
void hr_loop_table_remove(struct loop_domain *domain);
hr_status hr_loop_ep_create(struct hr_domain *base, uint64_t peer_id, void *ctx, struct hr_ep **ep_p);
hr_status hr_loop_ep_connect(struct hr_ep *base, const void *addr, size_t addr_len, int active);
void hr_loop_ep_abort(struct hr_ep *base);
void hr_loop_ep_destroy(struct hr_ep *base);

/* memory.c */
hr_status hr_loop_mem_register(struct hr_domain *domain, void *addr, size_t len, uint32_t access, struct hr_mem *mem_p);
void hr_loop_mem_deregister(struct hr_domain *domain, struct hr_mem *mem);
hr_status hr_loop_mem_quiet(struct hr_ep *ep, const struct hr_mem *mem);
hr_status hr_loop_mem_export(struct hr_ep *ep, const struct hr_mem *mem, void *addr, size_t len,
                             struct hr_desc *desc_p);
hr_status hr_loop_mem_import(struct hr_ep *ep, const struct hr_desc *desc, struct hr_rmem *rmem_p);
void hr_loop_mem_release(struct hr_ep *ep, struct hr_rmem *rmem);
void hr_loop_unmap_all(struct loop_ep *ep);
/* A range of the peer's memory, with the peer's lock held on HR_OK: no revoke and no abort over there can return before
 * hr_loop_unlock. */
hr_status hr_loop_lock_remote(struct loop_ep *ep, uint64_t rkey, uint64_t addr, uint64_t len, uint32_t access,
                              char **ptr_p);
void hr_loop_unlock_remote(struct loop_ep *ep);

#endif
