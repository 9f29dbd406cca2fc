#include "sampler/gather.h"

#include <algorithm>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "abi.h"

namespace stretto {
namespace {

constexpr int64_t kLine = 64;
// Rows fetched ahead of the copy: enough to cover a miss, few enough not to evict each other.
constexpr int64_t kAhead = 12;
// Rows are collected in the first-level cache up to this size, then written out together.
constexpr int64_t kStage = 16 << 10;
// From this size on no near cache holds the result until it is read.
constexpr int64_t kStreamed = 8 << 20;
// Bytes of rows fetched ahead into the second-level cache: more than a stage, so that reads go on while it is written.
constexpr int64_t kFar = 24 << 10;

template <int64_t kBytes>
void gather_small(const uint8_t* data, const int64_t* index, int64_t n, uint8_t* out) {
    constexpr int64_t kRows = 32;
    for (int64_t i = 0; i < n; ++i) {
        if (i + kRows < n) __builtin_prefetch(data + index[i + kRows] * kBytes);
        std::memcpy(out + i * kBytes, data + index[i] * kBytes, kBytes);
    }
}

// Rows begin anywhere in a line: each line is asked for once. kCache: 3, into the first-level cache; 2, the second.
template <int kCache = 3>
inline void prefetch_row(const uint8_t* row, int64_t row_bytes) {
    const uint8_t* end = row + row_bytes;
    for (row -= reinterpret_cast<uintptr_t>(row) % kLine; row < end; row += kLine) __builtin_prefetch(row, 0, kCache);
}

void gather_plain(const uint8_t* data, int64_t row_bytes, int64_t stride, const int64_t* index, int64_t n,
                  uint8_t* out) {
    for (int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) prefetch_row(data + index[i + kAhead] * stride, row_bytes);
        std::memcpy(out + i * row_bytes, data + index[i] * stride, static_cast<size_t>(row_bytes));
    }
}

#if defined(__x86_64__)
// Whole lines past the caches: a store that goes through them reads the line first, though all of it is replaced.
using StreamLines = void (*)(const uint8_t* from, int64_t bytes, uint8_t* out);

void stream_quarters(const uint8_t* from, int64_t bytes, uint8_t* out) {
    for (int64_t b = 0; b < bytes; b += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + b),
                         _mm_load_si128(reinterpret_cast<const __m128i*>(from + b)));
}

__attribute__((target("avx512f"))) void stream_whole(const uint8_t* from, int64_t bytes, uint8_t* out) {
    for (int64_t b = 0; b < bytes; b += kLine)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out + b), _mm512_load_si512(from + b));
}

// Streaming stores share the buffers that misses wait in, and a line is sent early, in pieces, where a miss wants its
// buffer. Hence the stage: reads first, then stores with nothing in between. Rows are asked for far ahead and into the
// second-level cache, which has more such buffers and goes on reading while the stage is written.
void gather_streamed(const uint8_t* data, int64_t row_bytes, int64_t stride, const int64_t* index, int64_t n,
                     uint8_t* out) {
    alignas(kLine) uint8_t stage[kStage + kLine];
    const StreamLines stream_lines = std::strcmp(stretto_isa(), "avx512") ? stream_quarters : stream_whole;
    const int64_t round = kStage / row_bytes, ahead = std::max(kFar / row_bytes, kAhead);
    int64_t held = 0;  // bytes of the stage that fill no line yet
    for (int64_t i = 0; i < std::min(ahead, n); ++i) prefetch_row<2>(data + index[i] * stride, row_bytes);
    for (int64_t start = 0; start < n; start += round) {
        const int64_t end = std::min(start + round, n);
        for (int64_t i = start; i < end; ++i) {
            if (i + ahead < n) prefetch_row<2>(data + index[i + ahead] * stride, row_bytes);
            std::memcpy(stage + held, data + index[i] * stride, static_cast<size_t>(row_bytes));
            held += row_bytes;
        }
        const int64_t whole = held / kLine * kLine;
        stream_lines(stage, whole, out);
        out += whole;
        held -= whole;
        std::memcpy(stage, stage + whole, static_cast<size_t>(held));
    }
    std::memcpy(out, stage, static_cast<size_t>(held));
    _mm_sfence();  // whoever is told that the slot is ready must find it written
}
#endif

}  // namespace

void gather_rows(const stretto_slice& slice, const int64_t* index, int64_t n, uint8_t* out) {
    const auto* data = static_cast<const uint8_t*>(slice.data);
    const int64_t row_bytes = slice.row_bytes, stride = slice.stride;
    if (row_bytes == 0) return;
    if (stride == row_bytes) {
        switch (row_bytes) {
            case 1:
                return gather_small<1>(data, index, n, out);
            case 2:
                return gather_small<2>(data, index, n, out);
            case 4:
                return gather_small<4>(data, index, n, out);
            case 8:
                return gather_small<8>(data, index, n, out);
            case 16:
                return gather_small<16>(data, index, n, out);
            default:
                break;
        }
    }
#if defined(__x86_64__)
    if (n * row_bytes >= kStreamed && row_bytes <= kStage / 4 && reinterpret_cast<uintptr_t>(out) % kLine == 0)
        return gather_streamed(data, row_bytes, stride, index, n, out);
#endif
    gather_plain(data, row_bytes, stride, index, n, out);
}

void gather_scaled(const stretto_slice& slice, const int64_t* index, int64_t n, float* out) {
    const auto* data = static_cast<const int8_t*>(slice.data);
    for (int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n)
            prefetch_row(reinterpret_cast<const uint8_t*>(data + index[i + kAhead] * slice.stride), slice.columns);
        const int8_t* row = data + index[i] * slice.stride;
        float* to = out + i * slice.columns;
        for (int64_t c = 0; c < slice.columns; ++c) to[c] = static_cast<float>(row[c]) * slice.scale[c];
    }
}

}  // namespace stretto
