// Counter-based random numbers: what a node draws depends on a key alone, never on who drew before it.
//
// A batch's key is mixed from (seed, epoch, batch), a hop's from that and (hop, relation), a node's from that and its
// id. Any thread may therefore sample any batch, and the stream of batches is the same.
#pragma once
#include <cmath>
#include <cstdint>

namespace stretto {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// The finaliser of SplitMix64 (Stafford's variant 13): a bijection of 64 bits in which every bit depends on every bit.
inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

inline uint64_t combine(uint64_t key, uint64_t value) { return mix(key + kGolden * (value + 1)); }

// The numbers one node draws at one hop.
class Stream {
  public:
    explicit Stream(uint64_t key) : state_(key) {}

    uint64_t next() { return mix(state_ += kGolden); }

    // Uniform on [0, n), without bias: Lemire's multiply-shift, which rejects the few values that would favour some.
    uint64_t below(uint64_t n) {
        if (n >> 32) return below_wide(n);
        const auto small = static_cast<uint32_t>(n);
        uint64_t product = static_cast<uint64_t>(half()) * small;
        if (static_cast<uint32_t>(product) < small) {
            const uint32_t floor = -small % small;
            while (static_cast<uint32_t>(product) < floor) product = static_cast<uint64_t>(half()) * small;
        }
        return product >> 32;
    }

    // Uniform on (0, 1].
    double unit() { return (static_cast<double>(next() >> 11) + 1.0) * 0x1.0p-53; }
    double exponential() { return -std::log(unit()); }

  private:
    // Each 64-bit number serves two draws.
    uint32_t half() {
        if (spare_) {
            spare_ = false;
            return static_cast<uint32_t>(word_ >> 32);
        }
        spare_ = true;
        word_ = next();
        return static_cast<uint32_t>(word_);
    }

    uint64_t below_wide(uint64_t n) {
        __extension__ using Wide = unsigned __int128;
        Wide product = static_cast<Wide>(next()) * n;
        if (static_cast<uint64_t>(product) < n) {
            const uint64_t floor = -n % n;
            while (static_cast<uint64_t>(product) < floor) product = static_cast<Wide>(next()) * n;
        }
        return static_cast<uint64_t>(product >> 64);
    }

    uint64_t state_;
    uint64_t word_ = 0;
    bool spare_ = false;
};

}  // namespace stretto
