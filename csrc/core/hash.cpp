// A 128-bit hash of large arrays at memory speed, to recognise a graph that comes back in a new tensor.
//
// The range is cut into fixed blocks, hashed independently (any number of threads gives the same result) and folded in
// order. Inside a block eight 64-bit lanes absorb eight words at a time by a 32x32-bit product, which every vector unit
// has; the finaliser mixes each lane into both halves of the result.
#include <cstring>
#include <memory>

#include "abi.h"
#include "core/parallel.h"

namespace {

constexpr int64_t block_bytes = int64_t{1} << 18;
constexpr int lane_count = 8;
constexpr uint64_t prime_a = 0x9e3779b97f4a7c15ull, prime_b = 0xc2b2ae3d27d4eb4full, prime_c = 0x165667b19e3779f9ull;

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

void absorb(uint64_t* lane, const uint64_t* key, const unsigned char* p) {
    uint64_t word[lane_count];
    std::memcpy(word, p, sizeof(word));
    for (int i = 0; i < lane_count; ++i) {
        const uint64_t v = word[i] ^ key[i];
        lane[i] += (v & 0xffffffffull) * (v >> 32) + ((word[i] << 31) | (word[i] >> 33));
    }
}

Digest hash_block(const unsigned char* p, int64_t bytes, uint64_t seed) {
    uint64_t lane[lane_count], key[lane_count];
    for (int i = 0; i < lane_count; ++i) {
        lane[i] = mix(seed + prime_a * static_cast<uint64_t>(i + 1));
        key[i] = mix(seed ^ (prime_b * static_cast<uint64_t>(i + 1)));
    }
    int64_t at = 0, stripes = 0;
    for (; at + 64 <= bytes; at += 64) {
        absorb(lane, key, p + at);
        // Position matters: the key moves with every stripe, the lanes are scrambled every sixteen.
        for (int i = 0; i < lane_count; ++i) key[i] += prime_c;
        if ((++stripes & 15) == 0)
            for (int i = 0; i < lane_count; ++i) lane[i] = (lane[i] ^ (lane[i] >> 47) ^ key[i]) * prime_a;
    }
    unsigned char tail[64] = {};
    std::memcpy(tail, p + at, static_cast<size_t>(bytes - at));
    absorb(lane, key, tail);
    uint64_t low = static_cast<uint64_t>(bytes) * prime_a, high = ~low * prime_b;
    for (int i = 0; i < lane_count; ++i) {
        low = mix(low ^ lane[i]) + prime_b;
        high = mix(high + (lane[i] * prime_c ^ (lane[i] >> 31))) ^ prime_a;
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
            hash_block(static_cast<const unsigned char*>(data) + begin, size, mix(static_cast<uint64_t>(b) + prime_c));
    });
    uint64_t low = static_cast<uint64_t>(bytes), high = mix(low + prime_a);
    for (int64_t b = 0; b < blocks; ++b) {
        low = mix(low ^ digests[static_cast<size_t>(b)].low) * prime_a + high;
        high = mix(high + digests[static_cast<size_t>(b)].high) ^ (low >> 7);
    }
    out[0] = low;
    out[1] = high;
}
