// Row gather by an index, and the ceiling it is measured against.
#include "core/error.h"
#include "core/parallel.h"
#include "kernels/simd.h"
#include "kernels/table.h"

namespace stretto::STRETTO_ISA {
namespace {

constexpr int64_t rows_per_task = 2048, ahead = 8;

// Rows of one word: no prefetch, the loads overlap by themselves.
template <class Word, class Index>
void gather_words(const char* x, const Index* index, int64_t begin, int64_t end, char* out) {
    for (int64_t i = begin; i < end; ++i) {
        Word word;  // by memcpy: rows of two halves may begin at any even address
        __builtin_memcpy(&word, x + static_cast<int64_t>(index[i]) * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
        __builtin_memcpy(out + i * static_cast<int64_t>(sizeof(Word)), &word, sizeof(Word));
    }
}

template <class Index>
int gather(const gather_rows_args& a) {
    const auto* x = static_cast<const char*>(a.x);
    const auto* index = static_cast<const Index*>(a.index);
    auto* out = static_cast<char*>(a.out);
    parallel_for((a.n + rows_per_task - 1) / rows_per_task, a.threads, [&](int64_t t) {
        const int64_t begin = t * rows_per_task, end = begin + rows_per_task < a.n ? begin + rows_per_task : a.n;
        if (a.row_bytes == 4) return gather_words<uint32_t>(x, index, begin, end, out);
        if (a.row_bytes == 8) return gather_words<uint64_t>(x, index, begin, end, out);
        for (int64_t i = begin; i < end; ++i) {
            if (i + ahead < end) prefetch_bytes(x + static_cast<int64_t>(index[i + ahead]) * a.row_bytes, a.row_bytes);
            __builtin_memcpy(out + i * a.row_bytes, x + static_cast<int64_t>(index[i]) * a.row_bytes,
                             static_cast<size_t>(a.row_bytes));
        }
    });
    return 0;
}

// Adds up the rows at index[begin, end): so many sums, and so few branches, that adding never sets the pace.
template <int lines_known>
float read_rows(const gather_ceiling_args& a, int64_t begin, int64_t end) {
    constexpr int chains = 8, in_line = 16 / lanes<float>;
    const auto* x = static_cast<const char*>(a.x);
    const auto* index = static_cast<const int32_t*>(a.index);
    const int64_t lines = lines_known ? lines_known : a.row_bytes / 64;
    Vec<float> sum[chains] = {};
    const auto add = [&](int64_t i, int first) __attribute__((always_inline)) {
        if (a.prefetch > 0 && i + a.prefetch < a.n)
            prefetch_bytes(x + static_cast<int64_t>(index[i + a.prefetch]) * a.row_bytes, 64 * lines);
        const auto* row = reinterpret_cast<const float*>(x + static_cast<int64_t>(index[i]) * a.row_bytes);
        const auto line = [&](int64_t l, int chain) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int v = 0; v < in_line; ++v)
                sum[(first + chain * in_line + v) % chains] += load(row + l * 16 + v * lanes<float>);
        };
        if constexpr (lines_known > 0) {
#pragma GCC unroll 4
            for (int l = 0; l < lines_known; ++l) line(l, l);
        } else {
            int64_t l = 0;
            for (; l + 4 <= lines; l += 4)
#pragma GCC unroll 4
                for (int c = 0; c < 4; ++c) line(l + c, c);
            for (; l < lines; ++l) line(l, 0);
        }
    };
    int64_t i = begin;
    for (; i + 4 <= end; i += 4)
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) add(i + u, 2 * u);
    for (; i < end; ++i) add(i, 0);
    for (int v = 1; v < chains; ++v) sum[0] += sum[v];
    return sum_lanes<float>(sum[0]);
}

}  // namespace

int gather_rows(const gather_rows_args& a) { return a.index_bytes == 4 ? gather<int32_t>(a) : gather<int64_t>(a); }

int gather_ceiling(const gather_ceiling_args& a) {
    if (a.row_bytes % 64)
        return error("gather_ceiling: row_bytes %ld is not a multiple of 64", static_cast<long>(a.row_bytes));
    auto* out = static_cast<float*>(a.out);
    const int64_t lines = a.row_bytes / 64;
    const auto read = lines == 1   ? read_rows<1>
                      : lines == 2 ? read_rows<2>
                      : lines == 3 ? read_rows<3>
                      : lines == 4 ? read_rows<4>
                                   : read_rows<0>;
    parallel_for((a.n + rows_per_task - 1) / rows_per_task, a.threads, [&](int64_t t) {
        const int64_t begin = t * rows_per_task, end = begin + rows_per_task < a.n ? begin + rows_per_task : a.n;
        out[t] = read(a, begin, end);
    });
    return 0;
}

}  // namespace stretto::STRETTO_ISA
