/* ring.h - a bounded queue of records between one producer and one consumer, in one process. */
#ifndef HR_LOOP_RING_H
#define HR_LOOP_RING_H

/*
 * head and tail count bytes since the beginning and never wrap; their low bits are the place in data. The producer owns
 * tail, the consumer owns head, each on a cache line of its own. A record is contiguous: where it would cross the end,
 * a SKIP record fills the rest and it starts at 0, so a record may be up to half the ring.
 *
 * tail and `hungry` are stored, and the flags of the other side read, with sequential consistency: see "Sleeping" in
 * loop.c for what depends on it.
 */

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

enum { RING_BYTES = 1 << 18, RECORD_ALIGN = 16 };

enum record_kind { RECORD_SKIP, RECORD_MESSAGE, RECORD_NOTIFY };

struct record { /* then hdr_len bytes of header and len bytes of payload */
    uint16_t kind;
    uint16_t hdr_len;
    uint32_t len;
    uint64_t value; /* NOTIFY: what the write carried; MESSAGE: unused, it keeps the header 8-aligned and then some */
};

struct ring {
    alignas(64) _Atomic uint64_t tail;
    uint64_t head_seen; /* the producer's copy: head is read only when this says full */
    alignas(64) _Atomic uint64_t head;
    uint64_t tail_seen; /* the consumer's copy */
    _Atomic int hungry; /* the producer found no room and wants to be woken */
    char *data;
};

static inline size_t record_bytes(size_t hdr_len, size_t len) {
    return (sizeof(struct record) + hdr_len + len + RECORD_ALIGN - 1) & ~(size_t)(RECORD_ALIGN - 1);
}

static inline struct record *ring_at(const struct ring *ring, uint64_t pos) {
    return (struct record *)(ring->data + (pos & (RING_BYTES - 1)));
}

static inline uint64_t ring_to_end(uint64_t pos) { return RING_BYTES - (pos & (RING_BYTES - 1)); }

/* Producer: is there room for a record of n bytes, a SKIP before it included? */
static inline int ring_fits(struct ring *ring, size_t n) {
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint64_t need = ring_to_end(tail) < n ? ring_to_end(tail) + n : n;
    if (tail + need - ring->head_seen <= RING_BYTES) return 1;
    ring->head_seen = atomic_load(&ring->head);
    return tail + need - ring->head_seen <= RING_BYTES;
}

/* Producer, after ring_fits: where the record goes. Nothing is visible before ring_publish. */
static inline struct record *ring_reserve(struct ring *ring, size_t n) {
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    if (ring_to_end(tail) >= n) return ring_at(ring, tail);
    ring_at(ring, tail)->kind = RECORD_SKIP;
    return ring_at(ring, tail + ring_to_end(tail));
}

static inline void ring_publish(struct ring *ring, size_t n) {
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    atomic_store(&ring->tail, tail + (ring_to_end(tail) < n ? ring_to_end(tail) + n : n));
}

/* Consumer: the oldest record, or NULL. It stays in place until ring_pop. */
static inline struct record *ring_peek(struct ring *ring) {
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    if (head == ring->tail_seen) {
        ring->tail_seen = atomic_load(&ring->tail);
        if (head == ring->tail_seen) return NULL;
    }
    if (ring_at(ring, head)->kind == RECORD_SKIP) { /* never the last record: what made it necessary follows */
        head += ring_to_end(head);
        /* Release like every store of head: whoever reads it may overwrite the records before. */
        atomic_store_explicit(&ring->head, head, memory_order_release);
    }
    return ring_at(ring, head);
}

static inline void ring_pop(struct ring *ring) {
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    const struct record *record = ring_at(ring, head);
    atomic_store_explicit(&ring->head, head + record_bytes(record->hdr_len, record->len), memory_order_release);
}

#endif
