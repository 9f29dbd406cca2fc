// Edges of a row in blocks, for the attention kernels. A block never reaches past its row, so the order of all sums
// depends on the graph alone. Indices are widened per block, which keeps the index type out of the templates.
#pragma once
#include "kernels/simd.h"
#include "kernels/table.h"

namespace stretto::STRETTO_ISA {

constexpr int block_edges = 32;  // 32 rows of 1 KiB stay in the first-level cache
constexpr int prefetch_edges = 4;

// Up to block_edges edges of one row.
struct EdgeBlock {
    int n, padded;               // padded to whole fp32 vectors
    int64_t other[block_edges];  // the node at the far end
    int64_t id[block_edges];     // the edge's number in the user's order
    int64_t ahead[block_edges];  // the far end of the edge to prefetch meanwhile
    int64_t ahead_id[block_edges];

    // Fetches what is kept per edge, `size` values each, of edges soon to come.
    template <class A>
    STRETTO_INLINE void fetch_edges(const A* kept, int64_t size) const {
        for (int b = 0; b < n; ++b) __builtin_prefetch(kept + ahead_id[b] * size, 1);
    }
    // The same of their far ends.
    template <class A>
    STRETTO_INLINE void fetch_ends(const A* kept, int64_t size) const {
        for (int b = 0; b < n; ++b) __builtin_prefetch(kept + ahead[b] * size);
    }
};

template <class Index>
STRETTO_INLINE void fill_block(const stretto_csr& g, int64_t begin, int64_t end, int64_t ahead_end, EdgeBlock& block) {
    const auto* col = static_cast<const Index*>(g.col);
    const auto* edge_id = static_cast<const Index*>(g.edge_id);
    block.n = static_cast<int>(end - begin);
    block.padded = (block.n + 15) / 16 * 16;
    for (int b = 0; b < block.n; ++b) {
        const int64_t e = begin + b, ahead = e + prefetch_edges < ahead_end ? e + prefetch_edges : e;
        block.other[b] = col ? static_cast<int64_t>(col[e]) : e;
        block.id[b] = edge_id ? static_cast<int64_t>(edge_id[e]) : e;
        block.ahead[b] = col ? static_cast<int64_t>(col[ahead]) : ahead;
        block.ahead_id[b] = edge_id ? static_cast<int64_t>(edge_id[ahead]) : ahead;
    }
}

// Calls use(block, whether it is the row's first) for the edges [begin, end) of a row.
template <class Use>
STRETTO_INLINE void for_each_block(const stretto_csr& g, int64_t begin, int64_t end, int64_t ahead_end, Use&& use) {
    EdgeBlock block;
    for (int64_t e = begin; e < end; e += block_edges) {
        const int64_t stop = e + block_edges < end ? e + block_edges : end;
        if (g.index_bytes == 4)
            fill_block<int32_t>(g, e, stop, ahead_end, block);
        else
            fill_block<int64_t>(g, e, stop, ahead_end, block);
        use(static_cast<const EdgeBlock&>(block));
    }
}

// Memory of one task: a few arrays, freed together.
struct Scratch {
    char* memory;
    int64_t used = 0;
    explicit Scratch(int64_t bytes) : memory(static_cast<char*>(__builtin_malloc(static_cast<size_t>(bytes)))) {}
    ~Scratch() { __builtin_free(memory); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    template <class A>
    A* take(int64_t count) {
        A* p = reinterpret_cast<A*>(memory + used);
        used += (count * static_cast<int64_t>(sizeof(A)) + 63) / 64 * 64;
        return p;
    }
};

}  // namespace stretto::STRETTO_ISA
