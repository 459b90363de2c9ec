/* arena_extents.c - first fit in logarithmic time: a treap of extents by offset. */

/*
 * Extents, used and free, cover the arena without gaps, and no two free ones are neighbours. Each node knows the
 * longest free extent below it, so the first fit is one walk down: left if there is room on the left, else here, else
 * right.
 *
 *                     [64 used]  longest 1024
 *                    /         \
 *      longest 128 [0 free]   [192 used]  longest 1024
 *                                       \
 *                                     [512 free] 1024
 *
 * The bookkeeping lies outside the arena, because peers may be able to write there.
 */

#include "core/arena_extents.h"

#include <stdlib.h>

struct hr_extent {
    struct hr_extent *left, *right;
    size_t offset, len, asked;
    size_t longest; /* free, in this subtree */
    uint32_t priority;
    uint32_t used;
};

static size_t longest(const struct hr_extent *n) { return n ? n->longest : 0; }

static void refresh(struct hr_extent *n) {
    size_t max = n->used ? 0 : n->len;
    if (longest(n->left) > max) max = longest(n->left);
    if (longest(n->right) > max) max = longest(n->right);
    n->longest = max;
}

/* Everything in a lies before everything in b. */
static struct hr_extent *join(struct hr_extent *a, struct hr_extent *b) {
    if (!a || !b) return a ? a : b;
    struct hr_extent *top = a->priority > b->priority ? a : b;
    if (top == a)
        a->right = join(a->right, b);
    else
        b->left = join(a, b->left);
    refresh(top);
    return top;
}

/* below: offsets less than this one. */
static void split(struct hr_extent *n, size_t offset, struct hr_extent **below_p, struct hr_extent **rest_p) {
    if (!n) {
        *below_p = *rest_p = NULL;
    } else if (n->offset < offset) {
        split(n->right, offset, &n->right, rest_p);
        refresh(n);
        *below_p = n;
    } else {
        split(n->left, offset, below_p, &n->left);
        refresh(n);
        *rest_p = n;
    }
}

static struct hr_extent *extent_new(struct hr_extents *e, size_t offset, size_t len, int used) {
    struct hr_extent *n = malloc(sizeof *n);
    if (!n) return NULL;
    e->seed ^= e->seed << 13; /* xorshift: a tree of any shape is right, a random one is flat */
    e->seed ^= e->seed >> 17;
    e->seed ^= e->seed << 5;
    *n = (struct hr_extent){.offset = offset, .len = len, .priority = e->seed, .used = (uint32_t)used};
    refresh(n);
    return n;
}

static void insert(struct hr_extents *e, struct hr_extent *n) {
    struct hr_extent *below, *rest;
    split(e->root, n->offset, &below, &rest);
    e->root = join(join(below, n), rest);
}

/* Takes a node out of the tree; its length and use may then change. */
static void detach(struct hr_extents *e, struct hr_extent *n) {
    struct hr_extent *below, *rest, *self;
    split(e->root, n->offset, &below, &rest);
    split(rest, n->offset + 1, &self, &rest);
    e->root = join(below, rest);
}

static struct hr_extent *first_fit(struct hr_extent *n, size_t len) {
    while (longest(n) >= len) {
        if (longest(n->left) >= len)
            n = n->left;
        else if (!n->used && n->len >= len)
            return n;
        else
            n = n->right;
    }
    return NULL;
}

static struct hr_extent *at(struct hr_extent *n, size_t offset) {
    while (n && n->offset != offset) n = offset < n->offset ? n->left : n->right;
    return n;
}

static struct hr_extent *before(struct hr_extent *n, size_t offset) {
    struct hr_extent *best = NULL;
    while (n) {
        if (n->offset < offset) best = n;
        n = n->offset < offset ? n->right : n->left;
    }
    return best;
}

int hr_extents_init(struct hr_extents *e, size_t len) {
    *e = (struct hr_extents){.seed = 0x9e3779b9};
    e->root = extent_new(e, 0, len, 0);
    return e->root ? 0 : -1;
}

static void free_tree(struct hr_extent *n) {
    if (!n) return;
    free_tree(n->left);
    free_tree(n->right);
    free(n);
}

void hr_extents_free(struct hr_extents *e) {
    free_tree(e->root);
    e->root = NULL;
}

size_t hr_extents_longest(const struct hr_extents *e) { return longest(e->root); }

size_t hr_extents_take(struct hr_extents *e, size_t len, size_t asked) {
    struct hr_extent *n = first_fit(e->root, len), *rest = NULL;
    if (!n) return SIZE_MAX;
    if (n->len > len) {
        rest = extent_new(e, n->offset + len, n->len - len, 0);
        if (!rest) return SIZE_MAX;
    }
    detach(e, n);
    n->left = n->right = NULL;
    n->len = len;
    n->asked = asked;
    n->used = 1;
    refresh(n);
    insert(e, n);
    if (rest) insert(e, rest);
    e->blocks++;
    e->used += len;
    return n->offset;
}

int hr_extents_ends(const struct hr_extents *e, size_t end) {
    const struct hr_extent *n = before(e->root, end);
    return n && n->used && n->offset + n->asked == end;
}

size_t hr_extents_give(struct hr_extents *e, size_t offset) {
    struct hr_extent *n = at(e->root, offset);
    if (!n || !n->used) return 0;
    size_t len = n->len;
    struct hr_extent *next = at(e->root, offset + len), *prev = before(e->root, offset);
    detach(e, n);
    n->used = 0;
    if (next && !next->used) {
        detach(e, next);
        n->len += next->len;
        free(next);
    }
    if (prev && !prev->used) {
        detach(e, prev);
        n->offset = prev->offset;
        n->len += prev->len;
        free(prev);
    }
    n->left = n->right = NULL;
    refresh(n);
    insert(e, n);
    e->blocks--;
    e->used -= len;
    return len;
}
