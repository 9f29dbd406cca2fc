// Row gather by an index, and the ceiling it is measured against.
#include "core/parallel.h"
#include "kernels/entries.h"

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
int gather(const GatherArgs& a) {
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

}  // namespace

int gather_rows(const GatherArgs& a) { return a.index_bytes == 4 ? gather<int32_t>(a) : gather<int64_t>(a); }

int gather_ceiling(const GatherArgs& a) {
    const auto* x = static_cast<const char*>(a.x);
    const auto* index = static_cast<const int32_t*>(a.index);
    auto* out = static_cast<float*>(a.out);
    const int64_t tasks = (a.n + rows_per_task - 1) / rows_per_task;
    parallel_for(tasks, a.threads, [&](int64_t t) {
        const int64_t begin = t * rows_per_task, end = begin + rows_per_task < a.n ? begin + rows_per_task : a.n;
        Vec<float> sum[4] = {};
        for (int64_t i = begin; i < end; ++i) {
            if (a.prefetch > 0 && i + a.prefetch < a.n)
                prefetch_bytes(x + static_cast<int64_t>(index[i + a.prefetch]) * a.row_bytes, a.row_bytes);
            const auto* row = reinterpret_cast<const float*>(x + static_cast<int64_t>(index[i]) * a.row_bytes);
            for (int64_t k = 0; k < a.row_bytes / 4; k += 16)
                for (int v = 0; v < 16 / lanes<float>; ++v) sum[v] += load(row + k + v * lanes<float>);
        }
        out[t] = sum_lanes<float>(sum[0] + sum[1] + sum[2] + sum[3]);
    });
    return 0;
}

}  // namespace stretto::STRETTO_ISA
