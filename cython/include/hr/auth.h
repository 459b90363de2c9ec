/* auth.h - the job key, and the handshake by which both ends of a stream socket prove it. */
#ifndef HR_AUTH_H
#define HR_AUTH_H

/*
 * The key is SHA-256 of the job token; without a token it is all zero and have_token is 0: then providers accept
 * loopback and same-host peers only, unless insecure is set. The token itself is never sent.
 *
 * Handshake on a connected stream, C the caller, A the acceptor; nothing else is read before it is through:
 *   C -> A  hello     magic, version, id of C, id of A, epoch, nonce of C
 *   A -> C  challenge magic, version, nonce of A, HMAC(key, "A" | hello | nonce of A)
 *   C -> A  proof     HMAC(key, "C" | hello | nonce of A)
 * Frames have fixed sizes. A wrong magic, version, id, epoch or proof closes the socket.
 */

#include <stddef.h>
#include <stdint.h>

#include "hr/status.h"

struct hr_auth {
    uint8_t key[32];
    int have_token;
    int insecure;
    uint32_t epoch; /* incarnation of the job: peers of another one are refused */
};

void hr_auth_init(struct hr_auth *auth, const void *token, size_t len, int insecure, uint32_t epoch);
void hr_sha256(const void *data, size_t len, uint8_t out[32]);
void hr_hmac_sha256(const uint8_t key[32], const void *data, size_t len, uint8_t out[32]);

#define HR_HELLO_BYTES 64
#define HR_CHALLENGE_BYTES 64
#define HR_PROOF_BYTES 32

/* A non-blocking driver: a provider feeds it a socket that is ready, until it says HR_OK or an error. */
struct hr_handshake {
    uint8_t hello[HR_HELLO_BYTES];
    uint8_t in[HR_HELLO_BYTES];
    uint8_t out[HR_HELLO_BYTES];
    uint32_t in_have, in_want, out_have, out_sent;
    uint8_t nonce[16];
    int step, active;
    uint64_t self_id, peer_id;
    const struct hr_auth *auth;
};

/* active: the caller's side, peer_id known. Passive: peer_id is found in the hello (hs->peer_id afterwards). */
void hr_handshake_start(struct hr_handshake *hs, const struct hr_auth *auth, int active, uint64_t self_id,
                        uint64_t peer_id);
/* Reads and writes what the non-blocking socket takes: HR_OK (through), HR_AGAIN (wait for the socket; *want_write_p
 * says which way), or an error (close the socket). Never reads a byte past the handshake. */
hr_status hr_handshake_step(struct hr_handshake *hs, int fd, int *want_write_p);

#endif
