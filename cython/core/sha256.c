/* sha256.c - SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), for the handshake of auth.c. */

/*
 * Plain C and about 200 MB/s: a handshake hashes a few hundred bytes, once per connection. Nothing here branches on or
 * indexes by secret data.
 */

#include <string.h>

#include "hr/auth.h"

#define BLOCK 64

struct sha256 {
    uint32_t state[8];
    uint64_t nbytes;
    uint8_t block[BLOCK];
};

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static const uint32_t INITIAL[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static uint32_t load_be(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void store_be(uint8_t *p, uint32_t x) {
    p[0] = (uint8_t)(x >> 24);
    p[1] = (uint8_t)(x >> 16);
    p[2] = (uint8_t)(x >> 8);
    p[3] = (uint8_t)x;
}

static void compress(uint32_t state[8], const uint8_t block[BLOCK]) {
    uint32_t w[64], a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 16; i++) w[i] = load_be(block + 4 * i);
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    for (int i = 0; i < 64; i++) {
        uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
        uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + K[i] + w[i];
        uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
        uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d + t1;
        d = c;
        c = b;
        b = a;
        a = t1 + t2;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
}

static void begin(struct sha256 *hash) {
    memcpy(hash->state, INITIAL, sizeof INITIAL);
    hash->nbytes = 0;
}

static void update(struct sha256 *hash, const void *data, size_t len) {
    const uint8_t *p = data;
    size_t have = hash->nbytes % BLOCK;
    hash->nbytes += len;
    if (have + len < BLOCK) {
        if (len) memcpy(hash->block + have, p, len); /* data may be NULL when len is 0 */
        return;
    }
    if (have) {
        size_t fill = BLOCK - have;
        memcpy(hash->block + have, p, fill);
        compress(hash->state, hash->block);
        p += fill;
        len -= fill;
    }
    for (; len >= BLOCK; p += BLOCK, len -= BLOCK) compress(hash->state, p);
    if (len) memcpy(hash->block, p, len);
}

static void finish(struct sha256 *hash, uint8_t out[32]) {
    size_t have = hash->nbytes % BLOCK;
    hash->block[have++] = 0x80;
    if (have > BLOCK - 8) {
        memset(hash->block + have, 0, BLOCK - have);
        compress(hash->state, hash->block);
        have = 0;
    }
    memset(hash->block + have, 0, BLOCK - 8 - have);
    store_be(hash->block + BLOCK - 8, (uint32_t)(hash->nbytes >> 29));
    store_be(hash->block + BLOCK - 4, (uint32_t)(hash->nbytes << 3));
    compress(hash->state, hash->block);
    for (int i = 0; i < 8; i++) store_be(out + 4 * i, hash->state[i]);
}

void hr_sha256(const void *data, size_t len, uint8_t out[32]) {
    struct sha256 hash;
    begin(&hash);
    update(&hash, data, len);
    finish(&hash, out);
    explicit_bzero(&hash, sizeof hash);
}

void hr_hmac_sha256(const uint8_t key[32], const void *data, size_t len, uint8_t out[32]) {
    struct sha256 hash;
    uint8_t pad[BLOCK], inner[32];

    memset(pad, 0x36, sizeof pad);
    for (int i = 0; i < 32; i++) pad[i] ^= key[i];
    begin(&hash);
    update(&hash, pad, sizeof pad);
    update(&hash, data, len);
    finish(&hash, inner);

    for (int i = 0; i < BLOCK; i++) pad[i] ^= 0x36 ^ 0x5c;
    begin(&hash);
    update(&hash, pad, sizeof pad);
    update(&hash, inner, sizeof inner);
    finish(&hash, out);

    explicit_bzero(&hash, sizeof hash);
    explicit_bzero(pad, sizeof pad);
}
