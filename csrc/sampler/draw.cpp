#include "sampler/draw.h"

#include <cstring>

#include "abi.h"
#include "sampler/random.h"

namespace stretto {
#if defined(__x86_64__)
namespace {

// As many 64-bit numbers as a register holds.
template <int kBytes>
struct Register {
    typedef uint64_t Type __attribute__((vector_size(kBytes)));
};

// Always inlined: a function of its own would be compiled for the oldest processors.
#define STRETTO_INLINE __attribute__((always_inline))

template <class Lanes>
STRETTO_INLINE inline uint32_t draw(const uint64_t* keys, const uint64_t* sizes, int64_t k, uint64_t* picks) {
    constexpr uint64_t kHalf = UINT32_MAX;
    Lanes state, n;
    std::memcpy(&state, keys, sizeof(Lanes));
    std::memcpy(&n, sizes, sizeof(Lanes));
    Lanes j = n - static_cast<uint64_t>(k), remainder = n * 0 + kHalf;
    // Takes t of [0, j], or j where t was taken already: with vectors, comparing with all picks before costs little.
    auto take = [&](int64_t i, const Lanes& half) STRETTO_INLINE {
        const Lanes product = half * (j + 1), low = product & kHalf;
        remainder = remainder < low ? remainder : low;
        Lanes t = product >> 32;
        auto taken = t != t;
        for (int64_t s = 0; s < i; ++s) {
            Lanes before;
            std::memcpy(&before, picks + s * kTogether, sizeof(Lanes));
            taken |= t == before;
        }
        t = taken ? j : t;
        std::memcpy(picks + i * kTogether, &t, sizeof(Lanes));
        j += 1;
    };
    for (int64_t i = 0; i < k; i += 2) {
        state += kGolden;
        Lanes word = state;  // mix() of random.h, in lanes
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
        word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
        word = word ^ (word >> 31);
        take(i, word & kHalf);
        if (i + 1 < k) take(i + 1, word >> 32);
    }
    // Also set for more than 2^32 candidates, which 32 bits cannot tell apart.
    const auto unsettled = remainder < n;
    uint32_t bits = 0;
    for (size_t lane = 0; lane < sizeof(Lanes) / sizeof(uint64_t); ++lane)
        bits |= static_cast<uint32_t>(unsettled[lane] & 1) << lane;
    return bits;
}

__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw"))) uint32_t draw_avx512(const uint64_t* keys,
                                                                                   const uint64_t* sizes, int64_t k,
                                                                                   uint64_t* picks) {
    return draw<Register<64>::Type>(keys, sizes, k, picks);
}

__attribute__((target("avx2"))) uint32_t draw_avx2(const uint64_t* keys, const uint64_t* sizes, int64_t k,
                                                   uint64_t* picks) {
    constexpr int64_t kLanes = kTogether / 2;
    return draw<Register<32>::Type>(keys, sizes, k, picks) |
           draw<Register<32>::Type>(keys + kLanes, sizes + kLanes, k, picks + kLanes) << kLanes;
}

}  // namespace

Draw draw_together() {
    const char* isa = stretto_isa();
    if (!std::strcmp(isa, "avx512")) return draw_avx512;
    if (!std::strcmp(isa, "avx2")) return draw_avx2;
    return nullptr;
}
#else
Draw draw_together() { return nullptr; }
#endif

}  // namespace stretto
