/* shelf.c - the ring of records and the table of where they are. */
#include "hr/shelf.h"

#include <stdatomic.h>
#include <string.h>

#include "hr/clock.h"

#define WORD sizeof(uint64_t)
#define SLOTS ((size_t)1 << 13)
#define WORDS (((size_t)4 << 20) / WORD)
#define HEADER 2 /* words: length of the name and of what describes it; length of the content */

struct hr_shelf {
    _Atomic uint64_t home, until, head, tail; /* the head is the writer's alone */
    _Atomic uint64_t heard[HR_SHELF_PLACES];
    _Atomic uint64_t slots[SLOTS]; /* where a record is; 0: none */
    _Atomic uint64_t ring[WORDS];
};

_Static_assert(sizeof(struct hr_shelf) <= HR_SHELF_BYTES, "the memory of a shelf");
_Static_assert(HR_SHELF_LARGEST < WORDS * WORD / 2, "the tail stays below the head");

/* In the order of the text, for all: who reads a word that was written over finds the tail beyond it afterwards. */
static uint64_t load(const _Atomic uint64_t *word) { return atomic_load_explicit(word, memory_order_acquire); }
static void store(_Atomic uint64_t *word, uint64_t x) { atomic_store_explicit(word, x, memory_order_release); }
static size_t words(size_t nbytes) { return (nbytes + WORD - 1) / WORD; }

/* The slot of a name: FNV-1a. */
static size_t slot_of(const void *name, size_t length) {
    const uint8_t *bytes = name;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < length; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return (hash ^ hash >> 32) % SLOTS;
}

static void write_words(_Atomic uint64_t *to, const void *from, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += WORD) {
        uint64_t word = 0;
        memcpy(&word, (const char *)from + i, nbytes - i < WORD ? nbytes - i : WORD);
        store(to++, word);
    }
}

static void read_words(void *to, const _Atomic uint64_t *from, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += WORD) {
        uint64_t word = load(from++);
        memcpy((char *)to + i, &word, nbytes - i < WORD ? nbytes - i : WORD);
    }
}

static int same_words(const _Atomic uint64_t *from, const void *with, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += WORD) {
        uint64_t word = 0;
        memcpy(&word, (const char *)with + i, nbytes - i < WORD ? nbytes - i : WORD);
        if (load(from++) != word) return 0;
    }
    return 1;
}

/* Whether what was read of a record is what was written there. */
static int still(const struct hr_shelf *shelf, uint64_t at) { return load(&shelf->tail) <= at; }

int hr_shelf_put(struct hr_shelf *shelf, const void *name, size_t length, const void *meta, size_t nmeta,
                 const void *content, size_t ncontent) {
    if (length > UINT32_MAX || nmeta > HR_SHELF_LARGEST || ncontent > HR_SHELF_LARGEST ||
        length + nmeta + ncontent > HR_SHELF_LARGEST) {
        hr_shelf_remove(shelf, name, length);
        return 0;
    }
    size_t size = HEADER + words(length) + words(nmeta) + words(ncontent);
    uint64_t head = load(&shelf->head), at = head ? head : 1;
    if (at % WORDS + size > WORDS) at += WORDS - at % WORDS; /* a record lies in one piece */
    if (at + size > WORDS && load(&shelf->tail) < at + size - WORDS) store(&shelf->tail, at + size - WORDS);
    _Atomic uint64_t *word = shelf->ring + at % WORDS;
    store(word++, (uint64_t)length << 32 | nmeta);
    store(word++, ncontent);
    write_words(word, name, length);
    write_words(word += words(length), meta, nmeta);
    write_words(word + words(nmeta), content, ncontent);
    store(&shelf->head, at + size);
    store(shelf->slots + slot_of(name, length), at);
    return 1;
}

void hr_shelf_remove(struct hr_shelf *shelf, const void *name, size_t length) {
    struct hr_shelf_record found;
    if (hr_shelf_find(shelf, name, length, &found)) store(shelf->slots + slot_of(name, length), 0);
}

void hr_shelf_clear(struct hr_shelf *shelf) { store(&shelf->tail, load(&shelf->head)); }

void hr_shelf_hold(struct hr_shelf *shelf, uint64_t home, int64_t until) {
    store(&shelf->home, home);
    store(&shelf->until, (uint64_t)until);
}

void hr_shelf_hear(struct hr_shelf *shelf, int place, uint64_t number) { store(shelf->heard + place, number); }

int hr_shelf_holds(const struct hr_shelf *shelf, uint64_t home) {
    uint64_t until = load(&shelf->until);
    return load(&shelf->home) == home && hr_now() < (int64_t)until;
}

int hr_shelf_find(const struct hr_shelf *shelf, const void *name, size_t length, struct hr_shelf_record *record_p) {
    uint64_t at = load(shelf->slots + slot_of(name, length));
    if (at == 0 || load(&shelf->tail) > at) return 0;
    size_t word = at % WORDS;
    uint64_t lengths = load(shelf->ring + word);
    struct hr_shelf_record found = {.at = at, .meta = lengths & UINT32_MAX, .content = load(shelf->ring + word + 1)};
    if (lengths >> 32 != length || !still(shelf, at)) return 0;
    found.meta_at = word + HEADER + words(length);
    found.content_at = found.meta_at + words(found.meta);
    if (!same_words(shelf->ring + word + HEADER, name, length)) return 0;
    *record_p = found;
    return 1;
}

int hr_shelf_read(const struct hr_shelf *shelf, const struct hr_shelf_record *record, void *meta, void *content) {
    read_words(meta, shelf->ring + record->meta_at, record->meta);
    read_words(content, shelf->ring + record->content_at, record->content);
    return still(shelf, record->at);
}

uint64_t hr_shelf_heard(const struct hr_shelf *shelf, int place) { return load(shelf->heard + place); }
