// Vectors of the instruction set being compiled, for fp32 and fp64, with loads from every storage type.
//
// Arithmetic uses the compiler's vector extensions; only partial loads and stores and the fp16 conversions need
// intrinsics. Everything lives in the ISA's own namespace and is inlined: two instruction sets never share a symbol.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of its own header
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#if !defined(STRETTO_ISA)
#error "compile through CMake: STRETTO_ISA names the instruction set"
#endif

namespace stretto::STRETTO_ISA {

#define STRETTO_INLINE __attribute__((always_inline)) inline

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// The type in which values of storage type T are accumulated.
template <class T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif

template <class A>
constexpr int lanes = vector_bytes / static_cast<int>(sizeof(A));

typedef float vf32 __attribute__((vector_size(vector_bytes)));
typedef double vf64 __attribute__((vector_size(vector_bytes)));
typedef int32_t vi32 __attribute__((vector_size(vector_bytes)));
typedef uint32_t vu32 __attribute__((vector_size(vector_bytes)));
typedef uint16_t vu16 __attribute__((vector_size(vector_bytes / 2)));

template <class A>
using Vec = std::conditional_t<std::is_same_v<A, double>, vf64, vf32>;

template <class A>
STRETTO_INLINE Vec<A> broadcast(A value) {
    return value - Vec<A>{};  // a sum would have to turn -0 into 0, and so be carried out
}

// acc + a * b, rounded once where the processor can do that. Left to the compiler, one loop would round once and
// another twice: some fuse no chain of additions.
template <class V>
STRETTO_INLINE V fused(V acc, V a, V b) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<V, vf32>)
        return reinterpret_cast<V>(
            _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(acc)));
    else
        return reinterpret_cast<V>(_mm512_fmadd_pd(reinterpret_cast<__m512d>(a), reinterpret_cast<__m512d>(b),
                                                   reinterpret_cast<__m512d>(acc)));
#elif defined(__FMA__)
    if constexpr (std::is_same_v<V, vf32>)
        return reinterpret_cast<V>(
            _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(acc)));
    else
        return reinterpret_cast<V>(_mm256_fmadd_pd(reinterpret_cast<__m256d>(a), reinterpret_cast<__m256d>(b),
                                                   reinterpret_cast<__m256d>(acc)));
#else
    return acc + a * b;
#endif
}

// Software conversions, for instruction sets without F16C. Not inlined: they would bloat every loop they stand in.
__attribute__((noinline, unused)) static float half_to_float(uint16_t h) {
    // Shift the magnitude into place and rescale the exponent by a multiplication, which also handles subnormals.
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = static_cast<uint32_t>(h & 0x7fff) << 13;
    if (rest >= 0x0f800000u) return __builtin_bit_cast(float, sign | rest | 0x7f800000u);  // infinity or NaN
    const float magnitude = __builtin_bit_cast(float, rest) * 5.192296858534828e33f;       // 2^112
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, magnitude) | sign);
}

__attribute__((noinline, unused)) static uint16_t float_to_half(float value) {
    uint32_t bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t sign = bits & 0x80000000u;
    bits ^= sign;
    uint32_t half;
    if (bits >= 0x47800000u) {  // too large for fp16: infinity, or NaN stays NaN
        half = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (bits < 0x38800000u) {  // subnormal: let the adder round at the right place
        half = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, bits) + 0.5f) - 0x3f000000u;
    } else {  // round to nearest even
        half = (bits + 0xc8000fffu + ((bits >> 13) & 1u)) >> 13;
    }
    return static_cast<uint16_t>(half | (sign >> 16));
}

STRETTO_INLINE float widen(float v) { return v; }
STRETTO_INLINE double widen(double v) { return v; }
STRETTO_INLINE float widen(bf16 v) { return __builtin_bit_cast(float, static_cast<uint32_t>(v.bits) << 16); }
STRETTO_INLINE float widen(f16 v) { return half_to_float(v.bits); }

STRETTO_INLINE uint16_t float_to_bf16(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <class T>
STRETTO_INLINE T narrow(Acc<T> v) {
    if constexpr (std::is_same_v<T, bf16>)
        return bf16{float_to_bf16(v)};
    else if constexpr (std::is_same_v<T, f16>)
        return f16{float_to_half(v)};
    else
        return v;
}

// ---- whole vectors ----

template <class T>
STRETTO_INLINE Vec<Acc<T>> load(const T* p) {
    if constexpr (std::is_same_v<T, bf16>) {
        vu16 raw;
        std::memcpy(&raw, p, sizeof(raw));
        return reinterpret_cast<vf32>(__builtin_convertvector(raw, vu32) << 16);
    } else if constexpr (std::is_same_v<T, f16>) {
#if defined(__AVX512F__)
        return reinterpret_cast<vf32>(
            _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
        return reinterpret_cast<vf32>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
        vf32 value;
        for (int i = 0; i < lanes<float>; ++i) value[i] = half_to_float(p[i].bits);
        return value;
#endif
    } else {
        Vec<T> value;
        std::memcpy(&value, p, sizeof(value));
        return value;
    }
}

template <class T>
STRETTO_INLINE void store(T* p, Vec<Acc<T>> value) {
    if constexpr (std::is_same_v<T, bf16>) {
        const vu32 bits = reinterpret_cast<vu32>(value);
        const vu32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const vu16 raw = __builtin_convertvector(value == value ? rounded : vu32{} + 0x7fc0u, vu16);
        std::memcpy(p, &raw, sizeof(raw));
    } else if constexpr (std::is_same_v<T, f16>) {
#if defined(__AVX512F__)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(reinterpret_cast<__m512>(value), 0));
#elif defined(__AVX2__)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(reinterpret_cast<__m256>(value), 0));
#else
        for (int i = 0; i < lanes<float>; ++i) p[i].bits = float_to_half(value[i]);
#endif
    } else {
        std::memcpy(p, &value, sizeof(value));
    }
}

// value as it would come back from storage: rounded to T.
template <class T>
STRETTO_INLINE Vec<Acc<T>> as_stored(Vec<Acc<T>> value) {
    if constexpr (std::is_same_v<T, Acc<T>>) return value;
    T stored[lanes<Acc<T>>];
    store(stored, value);
    return load(stored);
}

// ---- the first n lanes, the others zero (load) or untouched (store) ----

#if defined(__AVX2__) && !defined(__AVX512F__)
// Eight ones, eight zeros: a mask of n lanes is eight entries starting at 8 - n.
alignas(32) constexpr int32_t lane_masks[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
alignas(32) constexpr int64_t lane_masks64[8] = {-1, -1, -1, -1, 0, 0, 0, 0};
#endif

template <class T>
STRETTO_INLINE Vec<Acc<T>> load_first(const T* p, int n) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>)
        return reinterpret_cast<vf32>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p));
    else if constexpr (std::is_same_v<T, double>)
        return reinterpret_cast<vf64>(_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << n) - 1), p));
    else {
        const __m256i raw = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
        if constexpr (std::is_same_v<T, f16>)
            return reinterpret_cast<vf32>(_mm512_maskz_cvtph_ps(0xffff, raw));
        else
            return reinterpret_cast<vf32>(
                _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, raw), 16));
    }
#else
#if defined(__AVX2__)
    if constexpr (std::is_same_v<T, float>)
        return reinterpret_cast<vf32>(
            _mm256_maskload_ps(p, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lane_masks + 8 - n))));
    if constexpr (std::is_same_v<T, double>)
        return reinterpret_cast<vf64>(
            _mm256_maskload_pd(p, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lane_masks64 + 4 - n))));
#endif
    Vec<Acc<T>> value{};
    for (int i = 0; i < n; ++i) value[i] = widen(p[i]);
    return value;
#endif
}

template <class T>
STRETTO_INLINE void store_first(T* p, Vec<Acc<T>> value, int n) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>) {
        _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m512>(value));
        return;
    } else if constexpr (std::is_same_v<T, double>) {
        _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << n) - 1), reinterpret_cast<__m512d>(value));
        return;
    }
#endif
    for (int i = 0; i < n; ++i) p[i] = narrow<T>(value[i]);
}

// Up to a whole vector. Where masked loads are as cheap as whole ones there is nothing to choose.
template <class T>
STRETTO_INLINE Vec<Acc<T>> load_lanes(const T* p, int n) {
#if defined(__AVX512F__)
    return load_first(p, n);
#else
    return n == lanes<Acc<T>> ? load(p) : load_first(p, n);
#endif
}

// acc + x, x up to a whole vector at p. With masks that is one instruction, which no compiler makes of a load and a
// sum; what it masks out is not read.
template <class T>
STRETTO_INLINE Vec<Acc<T>> add_lanes(Vec<Acc<T>> acc, const T* p, int n) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>) {
        const auto mask = static_cast<__mmask16>((1u << n) - 1);
        asm("vaddps %2, %0, %0%{%1%}" : "+v"(acc) : "Yk"(mask), "m"(*p));
        return acc;
    }
    if constexpr (std::is_same_v<T, double>) {
        const auto mask = static_cast<__mmask8>((1u << n) - 1);
        asm("vaddpd %2, %0, %0%{%1%}" : "+v"(acc) : "Yk"(mask), "m"(*p));
        return acc;
    }
#endif
    return acc + load_lanes(p, n);
}

// acc + factor * x, in the same way.
template <class T>
STRETTO_INLINE Vec<Acc<T>> add_scaled_lanes(Vec<Acc<T>> acc, Vec<Acc<T>> factor, const T* p, int n) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>) {
        const auto mask = static_cast<__mmask16>((1u << n) - 1);
        asm("vfmadd231ps %3, %2, %0%{%1%}" : "+v"(acc) : "Yk"(mask), "v"(factor), "m"(*p));
        return acc;
    }
    if constexpr (std::is_same_v<T, double>) {
        const auto mask = static_cast<__mmask8>((1u << n) - 1);
        asm("vfmadd231pd %3, %2, %0%{%1%}" : "+v"(acc) : "Yk"(mask), "v"(factor), "m"(*p));
        return acc;
    }
#endif
    return fused(acc, factor, load_lanes(p, n));
}

template <class T>
STRETTO_INLINE void store_lanes(T* p, Vec<Acc<T>> value, int n) {
    if (n == lanes<Acc<T>>)
        store(p, value);
    else
        store_first(p, value, n);
}

// The larger of two numbers per lane; NaN wins, as in torch.
template <class A>
STRETTO_INLINE Vec<A> larger(Vec<A> a, Vec<A> b) {
#if defined(__AVX512F__)
    // The instruction returns its second operand if either is NaN, which is right unless only the first one is.
    if constexpr (std::is_same_v<A, float>) {
        const auto x = reinterpret_cast<__m512>(a), y = reinterpret_cast<__m512>(b);
        return reinterpret_cast<vf32>(_mm512_mask_max_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x, y));
    } else {
        const auto x = reinterpret_cast<__m512d>(a), y = reinterpret_cast<__m512d>(b);
        return reinterpret_cast<vf64>(_mm512_mask_max_pd(x, _mm512_cmp_pd_mask(x, x, _CMP_ORD_Q), x, y));
    }
#else
    return (b > a) | (b != b) ? b : a;
#endif
}

// The same, and how many entries attain the maximum: count goes with a, count_b with b.
template <class A>
STRETTO_INLINE Vec<A> larger_counting(Vec<A> a, Vec<A>& count, Vec<A> b, Vec<A> count_b) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<A, float>) {
        const auto x = reinterpret_cast<__m512>(a), y = reinterpret_cast<__m512>(b);
        const auto n = reinterpret_cast<__m512>(count), m = reinterpret_cast<__m512>(count_b);
        const __mmask16 better = _mm512_cmp_ps_mask(y, x, _CMP_GT_OQ) | _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
        const __m512 sum = _mm512_mask_add_ps(n, _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ), n, m);
        count = reinterpret_cast<vf32>(_mm512_mask_mov_ps(sum, better, m));
        return reinterpret_cast<vf32>(_mm512_mask_mov_ps(x, better, y));
    }
#endif
    const auto better = (b > a) | (b != b);
    count = better ? count_b : (b == a ? count + count_b : count);
    return better ? b : a;
}

// Sum of all lanes, in a fixed order: the upper half is added to the lower, until one is left.
template <class A>
STRETTO_INLINE A sum_lanes(Vec<A> value) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<A, float>)
        return _mm512_reduce_add_ps(reinterpret_cast<__m512>(value));
    else
        return _mm512_reduce_add_pd(reinterpret_cast<__m512d>(value));
#else
    A part[lanes<A>];
    std::memcpy(part, &value, sizeof(value));
    for (int half = lanes<A> / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) part[i] += part[i + half];
    return part[0];
#endif
}

// The sums of four vectors, each in the order of sum_lanes.
template <class A>
STRETTO_INLINE void sum_lanes_of_four(const Vec<A>* value, A* sum) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<A, float>) {
        const auto half = [&](int i) __attribute__((always_inline)) {
            const auto a = reinterpret_cast<__m512>(value[i]), b = reinterpret_cast<__m512>(value[i + 1]);
            return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        };
        const __m512 a = half(0), b = half(2);
        __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
        all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
        _mm_storeu_ps(sum, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all)));
        return;
    }
#endif
    for (int i = 0; i < 4; ++i) sum[i] = sum_lanes<A>(value[i]);
}

STRETTO_INLINE void prefetch_bytes(const void* p, int64_t bytes) {
    const char* c = static_cast<const char*>(p);
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(c + b, 0, 3);
}

}  // namespace stretto::STRETTO_ISA
