/* auth.c - the job key, and the handshake that proves it on a fresh stream socket. */

/*
 * Frames, little endian, all of fixed size; reserved bytes are zero:
 *
 *   hello      0 magic  4 version  8 id of C  16 id of A  24 epoch  28 nonce of C  44 reserved              64
 *   challenge  0 magic  4 version  8 nonce of A  24 HMAC(key, "A" | hello | nonce of A)  56 reserved        64
 *   proof      0 HMAC(key, "C" | hello | nonce of A)                                                        32
 *
 * Both proofs cover both nonces, so neither can be replayed; the leading letter keeps a proof of one role from serving
 * in the other, and the ids in the hello keep a proof made for one rank from serving at another: a caller's own bytes
 * thrown back at it, or at a third rank, prove nothing.
 *
 * A side that refuses closes the socket without a word, so that a stranger learns nothing: the refused side then sees
 * HR_ERR_PEER_LOST, the refusing one HR_ERR_PROTOCOL (this is not our protocol) or HR_ERR_AUTH (it is, but not our job
 * key, epoch or rank). A prefix that is not ours is refused at its first wrong byte: a port scanner does not hold a
 * socket until the deadline.
 */

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "hr/auth.h"

#define PREFIX_BYTES 8
#define NONCE_BYTES 16
#define MAC_BYTES 32

enum { HELLO_CALLER = 8, HELLO_ACCEPTOR = 16, HELLO_EPOCH = 24, HELLO_NONCE = 28 };
enum { CHALLENGE_NONCE = 8, CHALLENGE_MAC = 24 };

/* What the frame being read is; a failed handshake holds its (negative) status here instead. */
enum { WANT_HELLO, WANT_CHALLENGE, WANT_PROOF, WANT_NOTHING };

static const uint8_t prefix[PREFIX_BYTES] = {'h', 'r', 'd', 'm', 1, 0, 0, 0}; /* magic, version */

static void store_le(uint8_t *p, uint64_t x, int nbytes) {
    for (int i = 0; i < nbytes; i++) p[i] = (uint8_t)(x >> (8 * i));
}

static uint64_t load_le(const uint8_t *p, int nbytes) {
    uint64_t x = 0;
    for (int i = 0; i < nbytes; i++) x |= (uint64_t)p[i] << (8 * i);
    return x;
}

/* Takes the same time wherever the first difference is. */
static int same_bytes(const uint8_t *a, const uint8_t *b, size_t len) {
    volatile uint8_t differ = 0;
    for (size_t i = 0; i < len; i++) differ |= a[i] ^ b[i];
    return differ == 0;
}

static void prove(const struct hr_handshake *hs, char role, const uint8_t *acceptor_nonce, uint8_t mac[MAC_BYTES]) {
    uint8_t text[1 + HR_HELLO_BYTES + NONCE_BYTES];
    text[0] = (uint8_t)role;
    memcpy(text + 1, hs->hello, HR_HELLO_BYTES);
    memcpy(text + 1 + HR_HELLO_BYTES, acceptor_nonce, NONCE_BYTES);
    hr_hmac_sha256(hs->auth->key, text, sizeof text, mac);
}

void hr_auth_init(struct hr_auth *auth, const void *token, size_t len, int insecure, uint32_t epoch) {
    memset(auth, 0, sizeof *auth);
    auth->have_token = token != NULL && len > 0;
    auth->insecure = insecure;
    auth->epoch = epoch;
    if (auth->have_token) hr_sha256(token, len, auth->key);
}

static void send_frame(struct hr_handshake *hs, uint32_t len) {
    hs->out_have = len;
    hs->out_sent = 0;
}

static void want_frame(struct hr_handshake *hs, int step, uint32_t len) {
    hs->step = step;
    hs->in_want = len;
    hs->in_have = 0;
}

void hr_handshake_start(struct hr_handshake *hs, const struct hr_auth *auth, int active, uint64_t self_id,
                        uint64_t peer_id) {
    memset(hs, 0, sizeof *hs);
    hs->auth = auth;
    hs->active = active;
    hs->self_id = self_id;
    hs->peer_id = active ? peer_id : 0;
    if (getrandom(hs->nonce, sizeof hs->nonce, 0) != sizeof hs->nonce) {
        hs->step = HR_ERR_IO; /* never a guessable nonce */
        return;
    }
    if (!active) {
        want_frame(hs, WANT_HELLO, HR_HELLO_BYTES);
        return;
    }
    memcpy(hs->hello, prefix, PREFIX_BYTES);
    store_le(hs->hello + HELLO_CALLER, self_id, 8);
    store_le(hs->hello + HELLO_ACCEPTOR, peer_id, 8);
    store_le(hs->hello + HELLO_EPOCH, auth->epoch, 4);
    memcpy(hs->hello + HELLO_NONCE, hs->nonce, NONCE_BYTES);
    memcpy(hs->out, hs->hello, HR_HELLO_BYTES);
    send_frame(hs, HR_HELLO_BYTES);
    want_frame(hs, WANT_CHALLENGE, HR_CHALLENGE_BYTES);
}

static hr_status take_hello(struct hr_handshake *hs) {
    memcpy(hs->hello, hs->in, HR_HELLO_BYTES);
    if (load_le(hs->hello + HELLO_ACCEPTOR, 8) != hs->self_id) return HR_ERR_AUTH;
    if (load_le(hs->hello + HELLO_EPOCH, 4) != hs->auth->epoch) return HR_ERR_AUTH;
    memset(hs->out, 0, sizeof hs->out);
    memcpy(hs->out, prefix, PREFIX_BYTES);
    memcpy(hs->out + CHALLENGE_NONCE, hs->nonce, NONCE_BYTES);
    prove(hs, 'A', hs->nonce, hs->out + CHALLENGE_MAC);
    send_frame(hs, HR_CHALLENGE_BYTES);
    want_frame(hs, WANT_PROOF, HR_PROOF_BYTES);
    return HR_OK;
}

static hr_status take_challenge(struct hr_handshake *hs) {
    const uint8_t *acceptor_nonce = hs->in + CHALLENGE_NONCE;
    uint8_t mac[MAC_BYTES];
    prove(hs, 'A', acceptor_nonce, mac);
    if (!same_bytes(mac, hs->in + CHALLENGE_MAC, MAC_BYTES)) return HR_ERR_AUTH;
    prove(hs, 'C', acceptor_nonce, hs->out);
    send_frame(hs, HR_PROOF_BYTES);
    want_frame(hs, WANT_NOTHING, 0);
    return HR_OK;
}

static hr_status take_proof(struct hr_handshake *hs) {
    uint8_t mac[MAC_BYTES];
    prove(hs, 'C', hs->nonce, mac);
    if (!same_bytes(mac, hs->in, MAC_BYTES)) return HR_ERR_AUTH;
    hs->peer_id = load_le(hs->hello + HELLO_CALLER, 8); /* only now is the caller who it says */
    want_frame(hs, WANT_NOTHING, 0);
    return HR_OK;
}

static hr_status take_frame(struct hr_handshake *hs) {
    switch (hs->step) {
    case WANT_HELLO: return take_hello(hs);
    case WANT_CHALLENGE: return take_challenge(hs);
    default: return take_proof(hs);
    }
}

static int prefix_is_ours(const struct hr_handshake *hs) {
    size_t n = hs->in_have < PREFIX_BYTES ? hs->in_have : PREFIX_BYTES;
    return hs->step == WANT_PROOF || memcmp(hs->in, prefix, n) == 0;
}

/* One direction as far as the socket goes. HR_ERR_PEER_LOST leaves the reason in errno. */
static hr_status flush_out(struct hr_handshake *hs, int fd) {
    while (hs->out_sent < hs->out_have) {
        ssize_t n = send(fd, hs->out + hs->out_sent, hs->out_have - hs->out_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0)
            hs->out_sent += (uint32_t)n;
        else if (errno == EAGAIN || errno == EWOULDBLOCK)
            return HR_AGAIN;
        else if (errno != EINTR)
            return HR_ERR_PEER_LOST;
    }
    return HR_OK;
}

static hr_status fill_in(struct hr_handshake *hs, int fd) {
    while (hs->in_have < hs->in_want) {
        ssize_t n = recv(fd, hs->in + hs->in_have, hs->in_want - hs->in_have, MSG_DONTWAIT);
        if (n > 0) {
            hs->in_have += (uint32_t)n;
            if (!prefix_is_ours(hs)) return HR_ERR_PROTOCOL;
        } else if (n == 0) {
            errno = ECONNRESET;
            return HR_ERR_PEER_LOST;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return HR_AGAIN;
        } else if (errno != EINTR) {
            return HR_ERR_PEER_LOST;
        }
    }
    return HR_OK;
}

hr_status hr_handshake_step(struct hr_handshake *hs, int fd, int *want_write_p) {
    while (hs->step >= 0) {
        hr_status status = flush_out(hs, fd);
        *want_write_p = status == HR_AGAIN;
        if (status == HR_OK && hs->step == WANT_NOTHING) return HR_OK;
        if (status == HR_OK) status = fill_in(hs, fd);
        if (status == HR_OK) status = take_frame(hs);
        if (status == HR_AGAIN) return HR_AGAIN;
        if (hr_is_error(status)) hs->step = status;
    }
    return (hr_status)hs->step;
}
