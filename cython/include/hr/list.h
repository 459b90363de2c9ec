/* list.h - intrusive doubly linked lists: of the engine, and of providers. */
#ifndef HR_LIST_H
#define HR_LIST_H

#include <stddef.h>

struct hr_link {
    struct hr_link *next, *prev;
};

#define hr_container(ptr, type, field) ((type *)((char *)(ptr) - offsetof(type, field)))

static inline void hr_list_init(struct hr_link *head) { head->next = head->prev = head; }
static inline int hr_list_empty(const struct hr_link *head) { return head->next == head; }
static inline void hr_list_push(struct hr_link *head, struct hr_link *link) {
    link->prev = head->prev;
    link->next = head;
    head->prev->next = link;
    head->prev = link;
}
/* A link that is on no list points to itself: removing it twice is harmless. */
static inline void hr_list_remove(struct hr_link *link) {
    link->prev->next = link->next;
    link->next->prev = link->prev;
    link->next = link->prev = link;
}
static inline struct hr_link *hr_list_pop(struct hr_link *head) {
    struct hr_link *link = head->next;
    if (link == head) return NULL;
    hr_list_remove(link);
    return link;
}

#endif
