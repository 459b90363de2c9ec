/* test_sha256.c - SHA-256 and HMAC-SHA-256 against published vectors (FIPS 180-4 examples, RFC 4231). */

#include "check.h"
#include "hr/auth.h"

static int unhex(const char *hex, uint8_t *out) {
    int n = 0;
    unsigned byte;
    for (; sscanf(hex, "%2x", &byte) == 1; hex += 2) out[n++] = (uint8_t)byte;
    return n;
}

static void check_digest(const uint8_t got[32], const char *hex) {
    uint8_t want[32];
    CHECK_EQ(unhex(hex, want), 32);
    CHECK_MEM(got, want, 32);
}

static void check_sha(const char *text, const char *hex) {
    uint8_t out[32];
    hr_sha256(text, strlen(text), out);
    check_digest(out, hex);
}

TEST(sha256_vectors) {
    check_sha("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    check_sha("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    check_sha("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    check_sha("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
              "mnopqrstnopqrstu",
              "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
    char *million = malloc(1000000);
    REQUIRE(million);
    memset(million, 'a', 1000000);
    uint8_t out[32];
    hr_sha256(million, 1000000, out);
    check_digest(out, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    free(million);
}

/* A digest over the digests of every length about the block size: made with another implementation. */
TEST(sha256_lengths) {
    uint8_t data[200], chain[200 * 32], out[32];
    for (int i = 0; i < 200; i++) data[i] = (uint8_t)i;
    for (int i = 0; i < 200; i++) hr_sha256(data, (size_t)i, chain + 32 * i);
    hr_sha256(chain, sizeof chain, out);
    check_digest(out, "ba7b0fcea7d10c06b855b43d2b4dce1e3e842fff6be0acefb0faf4f2dd05bb47");
}

static void check_hmac(const char *key_hex, const char *data_hex, const char *want_hex) {
    uint8_t long_key[256], key[32] = {0}, data[256], mac[32];
    int key_len = unhex(key_hex, long_key);
    if (key_len > 64)
        hr_sha256(long_key, (size_t)key_len, key); /* RFC 2104: keys longer than a block are hashed */
    else
        memcpy(key, long_key, (size_t)key_len);
    hr_hmac_sha256(key, data, (size_t)unhex(data_hex, data), mac);
    check_digest(mac, want_hex);
}

#define AA20 "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
#define AA131 AA20 AA20 AA20 AA20 AA20 AA20 "aaaaaaaaaaaaaaaaaaaaaa"
#define DD10 "dddddddddddddddddddd"
#define CD10 "cdcdcdcdcdcdcdcdcdcd"

TEST(hmac_rfc4231) {
    check_hmac("0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b", "4869205468657265",
               "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    check_hmac("4a656665", "7768617420646f2079612077616e7420666f72206e6f7468696e673f",
               "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    check_hmac(AA20, DD10 DD10 DD10 DD10 DD10, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    check_hmac("0102030405060708090a0b0c0d0e0f10111213141516171819", CD10 CD10 CD10 CD10 CD10,
               "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
    check_hmac(AA131,
               "54657374205573696e67204c6172676572205468616e20426c6f636b2d53697a65204b6579202d2048617368204b657920"
               "4669727374",
               "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    check_hmac(AA131,
               "5468697320697320612074657374207573696e672061206c6172676572207468616e20626c6f636b2d73697a65206b6579"
               "20616e642061206c6172676572207468616e20626c6f636b2d73697a6520646174612e20546865206b6579206e65656473"
               "20746f20626520686173686564206265666f7265206265696e6720757365642062792074686520484d414320616c676f72"
               "6974686d2e",
               "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}
