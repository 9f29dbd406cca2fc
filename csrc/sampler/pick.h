// Which k of the n candidates of one node are taken: uniform, with replacement, weighted, LABOR, or the last ones.
//
// Each function writes distinct positions (but for replacement) in [first, first + n) to out and returns how many. None
// allocates in the common case: PickScratch keeps what the rare ones need.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "sampler/random.h"

namespace stretto {

// Which of the numbers below kMarks were met since begin(), told by a stamp: nothing is cleared in between.
class Marks {
  public:
    static constexpr int64_t kMarks = 1024;

    void begin() {
        if (++stamp_ != 0) return;
        std::fill_n(mark_, kMarks, 0);
        stamp_ = 1;
    }
    // Of a number beyond kMarks only the last bits are looked at.
    bool met(uint64_t t) const { return mark_[t % kMarks] == stamp_; }
    void meet(uint64_t t) { mark_[t % kMarks] = stamp_; }

  private:
    uint32_t mark_[kMarks] = {};
    uint32_t stamp_ = 0;
};

struct PickScratch {
    Marks marks;
    std::vector<uint64_t> bits;                        // one bit per candidate, all zero between calls
    std::vector<std::pair<double, int64_t>> ranked;    // (key, candidate) of the k best so far
    std::vector<std::pair<uint32_t, int64_t>> hashed;  // the same with integer keys
};

// Floyd's method: for j = n-k .. n-1 draw t from [0, j]; take t, or j where t was taken already. Every k-subset is
// equally likely. Up to kScan picks are compared with all before them, more are marked in a bitmap.
constexpr int64_t kScan = 32;

inline int64_t pick_slowly(Stream stream, int64_t first, int64_t n, int64_t k, PickScratch& scratch, int64_t* out) {
    if (k <= kScan) {
        for (int64_t i = 0; i < k; ++i) {
            const int64_t j = n - k + i;
            int64_t t = first + static_cast<int64_t>(stream.below(static_cast<uint64_t>(j) + 1));
            bool hit = false;
            for (int64_t s = 0; s < i; ++s) hit |= out[s] == t;
            out[i] = hit ? first + j : t;
        }
        return k;
    }
    auto& bits = scratch.bits;
    if (static_cast<int64_t>(bits.size()) * 64 < n) bits.resize(static_cast<size_t>(n / 64 + 1), 0);
    for (int64_t i = 0; i < k; ++i) {
        const int64_t j = n - k + i;
        auto t = static_cast<int64_t>(stream.below(static_cast<uint64_t>(j) + 1));
        if (bits[t >> 6] >> (t & 63) & 1) t = j;
        bits[t >> 6] |= 1ull << (t & 63);
        out[i] = first + t;
    }
    for (int64_t i = 0; i < k; ++i) bits[(out[i] - first) >> 6] = 0;
    return k;
}

// The same picks without a branch that depends on a draw, nearly always: what the draws alone do not settle (a number
// that has to be drawn again, a mark that may be another candidate's) is left to pick_slowly.
inline int64_t pick_uniform(const Stream& stream, int64_t first, int64_t n, int64_t k, PickScratch& scratch,
                            int64_t* out) {
    const bool exact = n <= Marks::kMarks;
    if (n > UINT32_MAX || (!exact && k > kScan)) return pick_slowly(stream, first, n, k, scratch, out);
    Stream ahead = stream;
    auto& marks = scratch.marks;
    marks.begin();
    bool met = false;
    auto remainder = UINT32_MAX;
    auto draw = [&](int64_t i, uint32_t half) {
        const auto j = static_cast<uint64_t>(n - k + i);
        const uint64_t product = half * (j + 1);
        remainder = std::min(remainder, static_cast<uint32_t>(product));
        uint64_t t = product >> 32;
        const bool hit = marks.met(t);
        met |= hit;
        t = hit ? j : t;
        marks.meet(t);
        out[i] = first + static_cast<int64_t>(t);
    };
    int64_t i = 0;
    for (; i + 1 < k; i += 2) {
        const uint64_t word = ahead.next();
        draw(i, static_cast<uint32_t>(word));
        draw(i + 1, static_cast<uint32_t>(word >> 32));
    }
    if (i < k) draw(i, static_cast<uint32_t>(ahead.next()));
    if (remainder < n || (met && !exact)) return pick_slowly(stream, first, n, k, scratch, out);
    return k;
}

inline int64_t pick_replace(Stream& stream, int64_t first, int64_t n, int64_t k, int64_t* out) {
    for (int64_t i = 0; i < k; ++i) out[i] = first + static_cast<int64_t>(stream.below(static_cast<uint64_t>(n)));
    return k;
}

inline int64_t pick_all(int64_t first, int64_t n, int64_t* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = first + i;
    return n;
}

// `count` draws from candidates whose running sums of weights are `running` [n], by binary searches in step with each
// other, so that their cache misses overlap. A candidate of weight zero is never drawn.
inline void weighted_draws(Stream& stream, const double* running, int64_t n, int64_t count, int64_t* out) {
    constexpr int64_t kTogether = 32;
    double target[kTogether];
    for (int64_t done = 0; done < count; done += kTogether) {
        const int64_t size = std::min(kTogether, count - done);
        int64_t* at = out + done;
        for (int64_t i = 0; i < size; ++i) {
            target[i] = stream.unit() * running[n - 1];
            at[i] = 0;
        }
        // The answer, the smallest position whose sum reaches the target, stays in [at, at + length).
        for (int64_t length = n; length > 1;) {
            const int64_t half = length / 2;
            length -= half;
            for (int64_t i = 0; i < size; ++i) {
                at[i] += running[at[i] + half - 1] < target[i] ? half : 0;
                __builtin_prefetch(running + at[i] + length / 2 - 1);
            }
        }
    }
}

// With replacement, k draws. Without, successive sampling: draws that hit a taken candidate are rejected, which is the
// same as drawing from what is left; when most of the weight is taken, what remains is ranked by exponential keys
// (Efraimidis and Spirakis), which continues exactly that process. A candidate of weight zero is never taken.
// Where there are few candidates for the picks wanted, rejections are frequent and ranking is quicker from the start.
constexpr int64_t kMany = 8;

inline int64_t pick_weighted(Stream& stream, const double* running, int64_t first, int64_t n, int64_t k, bool replace,
                             PickScratch& scratch, int64_t* out) {
    if (n == 0 || !(running[n - 1] > 0)) return 0;
    if (replace) {
        weighted_draws(stream, running, n, k, out);
        for (int64_t i = 0; i < k; ++i) out[i] += first;
        return k;
    }
    auto weight = [&](int64_t i) { return i == 0 ? running[0] : running[i] - running[i - 1]; };
    int64_t count = 0;
    if (n <= k) {
        for (int64_t i = 0; i < n; ++i)
            if (weight(i) > 0) out[count++] = first + i;
        return count;
    }
    auto taken = [&](int64_t candidate) {
        for (int64_t s = 0; s < count; ++s)
            if (out[s] == candidate) return true;
        return false;
    };
    if (k <= 2 * kScan && n > kMany * k) {
        int64_t drawn[2 * kScan];
        for (int round = 0; round < 4 && count < k; ++round) {
            const int64_t wanted = k - count;
            weighted_draws(stream, running, n, wanted, drawn);
            for (int64_t i = 0; i < wanted; ++i)
                if (!taken(first + drawn[i])) out[count++] = first + drawn[i];
        }
    }
    if (count == k) return k;
    auto& ranked = scratch.ranked;  // a max-heap of the smallest keys
    ranked.clear();
    const auto room = static_cast<size_t>(k - count);
    for (int64_t i = 0; i < n; ++i) {
        if (!(weight(i) > 0) || taken(first + i)) continue;
        const double key = stream.exponential() / weight(i);
        if (ranked.size() < room) {
            ranked.emplace_back(key, first + i);
            std::push_heap(ranked.begin(), ranked.end());
        } else if (key < ranked.front().first) {
            std::pop_heap(ranked.begin(), ranked.end());
            ranked.back() = {key, first + i};
            std::push_heap(ranked.begin(), ranked.end());
        }
    }
    for (const auto& entry : ranked) out[count++] = entry.second;
    return count;
}

// LABOR: every source has one random number for the whole batch, and each target takes its k sources with the smallest.
// Targets thus agree on their sources where they can, and a batch needs fewer of them. Ranks are 32 bits, computed in
// chunks that the compiler turns into vector code; equal ranks are told apart by position.
template <class Row>
inline int64_t pick_labor(uint64_t key, const Row* row, int64_t first, int64_t n, int64_t k, PickScratch& scratch,
                          int64_t* out) {
    constexpr int64_t kChunk = 256;
    uint32_t rank[kChunk];
    const auto low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
    auto& hashed = scratch.hashed;  // a max-heap of the k smallest
    hashed.clear();
    uint32_t worst = UINT32_MAX;
    for (int64_t start = 0; start < n; start += kChunk) {
        const int64_t size = std::min(kChunk, n - start);
        const Row* sources = row + first + start;
        uint32_t least = UINT32_MAX;
        for (int64_t i = 0; i < size; ++i) {
            uint32_t x = static_cast<uint32_t>(sources[i]) ^ low;
            x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
            x = (x ^ (x >> 13) ^ high) * 0xC2B2AE35u;
            x = (x ^ (x >> 16)) * 0x9E3779B1u;
            rank[i] = x ^ (x >> 15);
            least = std::min(least, rank[i]);
        }
        if (least >= worst && static_cast<int64_t>(hashed.size()) == k) continue;  // most chunks of a hub
        for (int64_t i = 0; i < size; ++i) {
            if (rank[i] >= worst && static_cast<int64_t>(hashed.size()) == k) continue;
            if (static_cast<int64_t>(hashed.size()) == k) {
                std::pop_heap(hashed.begin(), hashed.end());
                hashed.back() = {rank[i], first + start + i};
            } else {
                hashed.emplace_back(rank[i], first + start + i);
            }
            std::push_heap(hashed.begin(), hashed.end());
            worst = hashed.front().first;
        }
    }
    for (int64_t i = 0; i < k; ++i) out[i] = hashed[static_cast<size_t>(i)].second;
    return k;
}

}  // namespace stretto
