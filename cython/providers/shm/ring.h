/* ring.h - one direction of a connection: records in a ring of shared memory, one producer, one consumer. */
#ifndef HR_SHM_RING_H
#define HR_SHM_RING_H

/*
 * A record begins on a cache line with a word that says what it is; header and payload follow without a gap, and the
 * next record begins on the next free line:
 *
 *     | word | header 8..64 | payload .......... | pad | word | ...
 *       8 B                                            ^ zero: nothing here yet
 *
 * The word is written last, by it alone the consumer learns of a record: there is no tail in shared memory, so an
 * 8-byte message under a 48-byte header moves one cache line from core to core, and nothing else. The price: a line on
 * which the next record will begin must hold a zero word before the record in front of it is published, for old payload
 * may lie there. The producer zeroes words ahead, after it has published, while the consumer is busy with what it got.
 * That takes the lines over from the consumer's cache as well, so that the next record is written into the producer's
 * own. Lines of longer records are claimed instead, by a prefetch for writing, where that pays (setup.c): the
 * next locked instruction would wait for so many stores. The consumer's processor fetches beyond the end of what it
 * reads and so takes the first of them back; they are claimed again when an answer has come, by when it has read.
 *
 * The data is mapped twice in a row: a record may run over the end of the first map and still lies in one piece.
 *
 * The consumer says how far it has come (head) once per quarter of the ring only. As no record is larger than three
 * quarters, a producer that waits for room always gets it from a consumer that has emptied the ring.
 *
 * Who sleeps says so in shared memory, then looks once more; who publishes does so, then looks whether the other
 * sleeps. All four accesses are seq_cst, so in their one total order either the sleeper's second look comes after the
 * word was written and finds it, or the publisher's look comes after the flag was raised and finds that. The
 * publisher's exchange takes the flag down: one wake-up for each sleep, however many records follow. want and head are
 * the same with the roles reversed.
 *
 * Nothing that the other process can write is used as an index or a length before it was checked on a private copy.
 */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "hr/line.h"

#define SHM_LINE 64
#define SHM_WORD 8
#define SHM_ALIGN 1024  /* payload from this length on begins on a line */
#define SHM_ZERO 256    /* records up to this are zeroed ahead */
#define SHM_AHEAD 16384 /* of longer ones so much is claimed */
#define SHM_AGAIN 5120  /* records up to this are claimed again */
#define SHM_FETCH 4096  /* of a record that has come are fetched at once, before anybody looks at them */

struct ring_ctl { /* in shared memory; each member on lines of its own, two because processors fetch pairs */
    _Alignas(128) _Atomic uint64_t head;   /* bytes consumed and given back; written by the consumer */
    _Alignas(128) _Atomic uint32_t asleep; /* the consumer sleeps: wake it after publishing */
    _Alignas(128) _Atomic uint32_t want;   /* the producer sleeps until there is room */
    _Alignas(128) _Atomic uint64_t taken;  /* how far the consumer has read the producer's board: board.c */
    _Atomic uint32_t left;                 /* and that it reads no more */
};

struct ring_tx { /* the producer's own */
    uint8_t *data;
    uint64_t mask;
    uint64_t tail;   /* where the next record goes; positions count up for ever */
    uint64_t clear;  /* the words of all lines in [tail, clear) are zero */
    uint64_t limit;  /* head + size, as last seen */
    uint32_t again;  /* bytes to claim when the consumer answers */
    uint32_t claims; /* records up to this have their lines claimed ahead */
    struct ring_ctl *ctl;
};

struct ring_rx { /* the consumer's own */
    uint8_t *data;
    uint64_t mask;
    uint64_t pos;   /* the next record */
    uint64_t given; /* head, as last written */
    struct ring_ctl *ctl;
};

/* SHOWN is a message whose payload is on the producer's board (board.c): so long, and in its place is where, 8 bytes.
 */
enum ring_kind { RING_MSG = 1, RING_WRITE, RING_ATOMIC, RING_REPLY, RING_SHOWN };

static inline uint64_t ring_word(enum ring_kind kind, size_t hdr_len, size_t len) {
    return (uint64_t)len | (uint64_t)hdr_len << 32 | (uint64_t)kind << 48 | 0xa5ull << 56;
}
static inline size_t ring_word_len(uint64_t word) { return (uint32_t)word; }
static inline size_t ring_word_hdr_len(uint64_t word) { return word >> 32 & 0xffff; }
static inline unsigned ring_word_kind(uint64_t word) { return word >> 48 & 0xff; }
static inline int ring_word_marked(uint64_t word) { return word >> 56 == 0xa5; }

static inline size_t ring_word_held(uint64_t word) {
    return ring_word_kind(word) == RING_SHOWN ? 8 : ring_word_len(word);
}

static inline uint64_t ring_lines(uint64_t n) { return (n + SHM_LINE - 1) & ~(uint64_t)(SHM_LINE - 1); }

/* Where the payload is, counted from the header: behind it, or on lines of its own where there is much of it. */
static inline size_t ring_payload(size_t hdr_len, size_t len) {
    return len < SHM_ALIGN ? hdr_len : ring_lines(SHM_WORD + hdr_len) - SHM_WORD;
}

/* Bytes that a record takes in the ring. */
static inline uint64_t ring_record(size_t hdr_len, size_t len) {
    return ring_lines(SHM_WORD + ring_payload(hdr_len, len) + len);
}

static inline _Atomic uint64_t *ring_slot(uint8_t *data, uint64_t mask, uint64_t pos) {
    return (_Atomic uint64_t *)(void *)(data + (pos & mask));
}

static inline void ring_tx_init(struct ring_tx *tx, struct ring_ctl *ctl, uint8_t *data, uint64_t size,
                                uint32_t claims) {
    *tx = (struct ring_tx){.data = data, .mask = size - 1, .clear = size, .limit = size, .claims = claims, .ctl = ctl};
}

static inline void ring_rx_init(struct ring_rx *rx, struct ring_ctl *ctl, uint8_t *data, uint64_t size) {
    *rx = (struct ring_rx){.data = data, .mask = size - 1, .ctl = ctl};
}

/* Is there room for n bytes of records, and the zero word behind them, as far as is known here? */
static inline int ring_tx_fits(const struct ring_tx *tx, uint64_t n) { return tx->tail + n + SHM_LINE <= tx->limit; }

/* Looks how far the consumer has come: 0 when it says what cannot be. */
static inline int ring_tx_look(struct ring_tx *tx) {
    uint64_t size = tx->mask + 1, head = atomic_load(&tx->ctl->head), seen = tx->limit - size;
    if (head - seen > tx->tail - seen || head % SHM_LINE) return 0;
    tx->limit = head + size;
    return 1;
}

/* Where the next record's header goes. */
static inline uint8_t *ring_tx_at(struct ring_tx *tx) { return tx->data + (tx->tail & tx->mask) + SHM_WORD; }

static inline void ring_tx_claim(struct ring_tx *tx, uint64_t n) {
    uint64_t end = tx->tail + (n < SHM_AHEAD ? n : SHM_AHEAD);
    if (end > tx->limit) end = tx->limit;
    for (uint64_t at = tx->tail; at < end; at += SHM_LINE) hr_claim(tx->data + (at & tx->mask));
}

/* Takes lines ahead for one or two more records like the last one, of n bytes. */
static inline void ring_tx_ahead(struct ring_tx *tx, uint64_t n) {
    uint64_t end;
    tx->again = 0;
    if (n > SHM_ZERO) {
        if (n > tx->claims) return;
        ring_tx_claim(tx, n);
        if (n <= SHM_AGAIN) tx->again = (uint32_t)n;
        return;
    }
    if (__builtin_expect(tx->clear >= tx->tail + n + 2 * SHM_LINE, 1)) return;
    end = tx->tail + 2 * n + 8 * SHM_LINE;
    if (end > tx->limit) end = tx->limit;
    for (; tx->clear < end; tx->clear += SHM_LINE)
        atomic_store_explicit(ring_slot(tx->data, tx->mask, tx->clear), 0, memory_order_relaxed);
}

/* The consumer has answered. */
static inline void ring_tx_again(struct ring_tx *tx) {
    if (!tx->again) return;
    ring_tx_claim(tx, tx->again);
    tx->again = 0;
}

/* Publishes the record of n bytes that was written at tail. 1: the consumer sleeps and has to be woken. */
static inline int ring_tx_publish(struct ring_tx *tx, uint64_t word, uint64_t n) {
    uint64_t next = tx->tail + n;
    if (tx->clear <= next) {
        atomic_store_explicit(ring_slot(tx->data, tx->mask, next), 0, memory_order_relaxed);
        tx->clear = next + SHM_LINE;
    }
    atomic_store(ring_slot(tx->data, tx->mask, tx->tail), word);
    tx->tail = next;
    ring_tx_ahead(tx, n);
    return __builtin_expect(atomic_load(&tx->ctl->asleep), 0) && atomic_exchange(&tx->ctl->asleep, 0);
}

/* The word of the next record; 0: there is none. */
static inline uint64_t ring_rx_word(const struct ring_rx *rx) {
    return atomic_load_explicit(ring_slot(rx->data, rx->mask, rx->pos), memory_order_acquire);
}

/* Going to sleep: raise the flag on all rings first, then look at all of them once more. */
static inline void ring_rx_sleep(const struct ring_rx *rx) { atomic_store(&rx->ctl->asleep, 1); }
static inline int ring_rx_look(const struct ring_rx *rx) {
    return atomic_load(ring_slot(rx->data, rx->mask, rx->pos)) != 0;
}
static inline void ring_rx_awake(const struct ring_rx *rx) {
    atomic_store_explicit(&rx->ctl->asleep, 0, memory_order_relaxed);
}

/* The lines of what came, all at once instead of one after the other. */
static inline void ring_rx_fetch(const uint8_t *at, size_t len) {
    if (len > SHM_FETCH) len = SHM_FETCH;
    for (size_t i = SHM_LINE; i < len; i += SHM_LINE) __builtin_prefetch(at + i);
}

static inline uint8_t *ring_rx_at(const struct ring_rx *rx) { return rx->data + (rx->pos & rx->mask) + SHM_WORD; }

/* Done with n bytes. 1: the producer sleeps, waiting for the room that was just given back, and has to be woken. */
static inline int ring_rx_consume(struct ring_rx *rx, uint64_t n) {
    rx->pos += n;
    if (__builtin_expect(rx->pos - rx->given < (rx->mask + 1) / 4, 1)) return 0;
    rx->given = rx->pos;
    atomic_store(&rx->ctl->head, rx->pos);
    return atomic_load(&rx->ctl->want) && atomic_exchange(&rx->ctl->want, 0);
}

#endif
