/* ledger.h - which offers stand, in memory that the peers map. */
#ifndef HR_CORE_LEDGER_H
#define HR_CORE_LEDGER_H

#include "hr/provider.h"

struct hr_conn;
struct hr_engine;
struct hr_hdr_long;

#define HR_ID_INDEX_BITS 20 /* of a transfer's id; the rest is its generation */
#define HR_ID_INDEX(id) ((id) & ((1u << HR_ID_INDEX_BITS) - 1))

/* The sender's side. enter: HR_OK, it may be offered; HR_AGAIN; an error: no pulling. strike: 1, no peer writes there
 * any more; 0, one has not let go of it, and may have been stopped. */
hr_status hr_ledger_enter(struct hr_conn *conn, uint32_t id);
int hr_ledger_strike(struct hr_engine *engine, uint32_t id);
int64_t hr_ledger_take_own(struct hr_engine *engine, uint32_t id, uint32_t n); /* and holds it */
void hr_ledger_let_go_own(struct hr_engine *engine, uint32_t id);
void hr_ledger_close(struct hr_engine *engine);

/* The receiver's side: the peer's offers. stands: asked after the last byte was read. hold: 1, it stands, and will
 * until it is let go of, which is to be soon: bytes may be written there. */
void hr_ledger_arrived(struct hr_conn *conn, const struct hr_hdr_long *m);
int hr_ledger_covers(struct hr_conn *conn, uint32_t id);
int hr_ledger_stands(struct hr_conn *conn, uint32_t id);
int hr_ledger_hold(struct hr_conn *conn, uint32_t id);
void hr_ledger_let_go(struct hr_conn *conn, uint32_t id);
/* take: the next piece of n, which the other end does not take then; -1: none is left, or it does not stand. revoke:
 * as strike, of an offer that the sender helps with. */
int64_t hr_ledger_take(struct hr_conn *conn, uint32_t id, uint32_t n);
int hr_ledger_revoke(struct hr_conn *conn, uint32_t id);
void hr_ledger_forget(struct hr_conn *conn);

#endif
