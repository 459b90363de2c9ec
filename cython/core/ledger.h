/* ledger.h - which offers stand, in memory that the peers map. */
#ifndef HR_CORE_LEDGER_H
#define HR_CORE_LEDGER_H

#include "hr/provider.h"

struct hr_conn;
struct hr_engine;
struct hr_hdr_long;
struct hr_xfer;

#define HR_ID_INDEX_BITS 20 /* of a transfer's id; the rest is its generation */
#define HR_ID_INDEX(id) ((id) & ((1u << HR_ID_INDEX_BITS) - 1))

/* The sender's side. enter: HR_OK, it may be offered; HR_AGAIN; an error: no pulling. strike: it is over. take_back:
 * the same where the peer does not know; 1, it writes there no more; 0, it has not let go, and may have been stopped.
 */
hr_status hr_ledger_enter(struct hr_xfer *x);
void hr_ledger_strike(struct hr_xfer *x);
int hr_ledger_take_back(struct hr_xfer *x);
int64_t hr_ledger_take_own(struct hr_xfer *x, uint32_t n); /* as take, and holds it */
void hr_ledger_let_go_own(struct hr_xfer *x);
int hr_ledger_stands_own(const struct hr_xfer *x);
void hr_ledger_close(struct hr_engine *engine);

/* The receiver's side: what the peer offers. stands: asked after the last byte was read. hold: 1, it stands, and will
 * until it is let go of, which is to be soon: bytes may be written there. take: the next piece of n, which the other
 * end does not take then; -1: none is left, or it does not stand. revoke: as take_back, where the sender helps. */
void hr_ledger_arrived(struct hr_conn *conn, const struct hr_hdr_long *m);
int hr_ledger_covers(const struct hr_xfer *x);
int hr_ledger_stands(const struct hr_xfer *x);
void hr_ledger_claim(struct hr_conn *conn, uint32_t id, int own);
int hr_ledger_hold(struct hr_xfer *x);
void hr_ledger_let_go(struct hr_xfer *x);
int64_t hr_ledger_take(struct hr_xfer *x, uint32_t n);
int hr_ledger_revoke(struct hr_xfer *x);
void hr_ledger_forget(struct hr_conn *conn);

#endif
