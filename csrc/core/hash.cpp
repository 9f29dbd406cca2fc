// A 128-bit hash of large arrays at memory speed, to recognise a graph that comes back in a new tensor.
//
// The range is cut into fixed blocks, hashed independently (any number of threads gives the same result) and folded in
// order. Inside a block four chains absorb two words each per stripe. A chain carries two states of 64 bits that see
// the words in different roles; each step is a full 64x64-bit product folded onto itself, fed by the previous state, so
// that neighbouring indices, swaps and shifts (what one graph differs from the next by) do not cancel.
#include <cstring>
#include <memory>

#include "abi.h"
#include "core/parallel.h"

namespace {

constexpr int64_t block_bytes = int64_t{1} << 18;
constexpr int chains = 4, stripe_words = 2 * chains;
constexpr uint64_t key_a = 0x9e3779b97f4a7c15ull, key_b = 0xc2b2ae3d27d4eb4full, key_c = 0x165667b19e3779f9ull;

uint64_t fold(uint64_t x, uint64_t y) {
    const auto product = static_cast<unsigned __int128>(x) * y;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t mix(uint64_t v) {
    v ^= v >> 32;
    v *= 0xd6e8feb86659fd93ull;
    v ^= v >> 29;
    v *= 0xd6e8feb86659fd93ull;
    return v ^ (v >> 32);
}

struct Digest {
    uint64_t low, high;
};

Digest hash_block(const unsigned char* p, int64_t bytes, uint64_t seed) {
    uint64_t a[chains], b[chains], keys_a[chains], keys_b[chains];
    for (int i = 0; i < chains; ++i) {
        const auto n = static_cast<uint64_t>(i + 1);
        a[i] = mix(seed + key_a * n), b[i] = mix(seed ^ (key_b * n));
        keys_a[i] = mix(key_c + n), keys_b[i] = mix(key_c - n);
    }
    const auto absorb = [&](const unsigned char* stripe) {
        uint64_t word[stripe_words];
        std::memcpy(word, stripe, sizeof(word));
        for (int i = 0; i < chains; ++i) {
            a[i] = fold(word[2 * i] ^ keys_a[i], word[2 * i + 1] ^ a[i]);
            b[i] = fold(word[2 * i + 1] ^ keys_b[i], word[2 * i] ^ b[i]);
        }
    };
    int64_t at = 0;
    for (; at + 64 <= bytes; at += 64) absorb(p + at);
    if (at < bytes) {
        unsigned char tail[64] = {};
        std::memcpy(tail, p + at, static_cast<size_t>(bytes - at));
        absorb(tail);
    }
    uint64_t low = static_cast<uint64_t>(bytes) ^ key_a, high = static_cast<uint64_t>(bytes) ^ key_b;
    for (int i = 0; i < chains; ++i) {
        low = mix(fold(low ^ key_b, a[i] ^ key_c) + b[i]);
        high = mix(fold(high ^ key_c, b[i] ^ key_a) + a[i]);
    }
    return {low, high};
}

}  // namespace

extern "C" void stretto_hash(const void* data, int64_t bytes, int threads, uint64_t* out) {
    const int64_t blocks = bytes ? (bytes + block_bytes - 1) / block_bytes : 1;
    auto digests = std::make_unique<Digest[]>(static_cast<size_t>(blocks));
    stretto::parallel_for(blocks, threads, [&](int64_t b) {
        const int64_t begin = b * block_bytes, size = bytes - begin < block_bytes ? bytes - begin : block_bytes;
        digests[static_cast<size_t>(b)] =
            hash_block(static_cast<const unsigned char*>(data) + begin, size, mix(static_cast<uint64_t>(b) + key_c));
    });
    uint64_t low = mix(static_cast<uint64_t>(bytes)), high = mix(low + key_a);
    for (int64_t b = 0; b < blocks; ++b) {
        const Digest& digest = digests[static_cast<size_t>(b)];
        low = mix(fold(low ^ key_a, digest.low ^ key_b) + digest.high);
        high = mix(fold(high ^ key_c, digest.high ^ key_a) + digest.low);
    }
    out[0] = low;
    out[1] = high;
}
