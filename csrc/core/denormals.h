// Numbers too small for a full mantissa (below 1.2e-38 in float) taken for zero, on the thread that asks.
//
// The processor handles them outside its pipelines, many times slower. Gradients are full of them once a softmax
// has made up its mind: exp(-90) divided by the number of nodes is one.
#pragma once
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace stretto {

#if defined(__x86_64__)
using FloatMode = unsigned;
inline FloatMode float_mode() { return _mm_getcsr(); }
inline void set_float_mode(FloatMode mode) { _mm_setcsr(mode); }
inline FloatMode flushing(FloatMode mode) { return mode | 0x8040u; }  // results and operands
#elif defined(__aarch64__)
using FloatMode = unsigned long;
inline FloatMode float_mode() {
    FloatMode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
inline void set_float_mode(FloatMode mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
inline FloatMode flushing(FloatMode mode) { return mode | (1ul << 24); }
#else
using FloatMode = unsigned;
inline FloatMode float_mode() { return 0; }
inline void set_float_mode(FloatMode) {}
inline FloatMode flushing(FloatMode mode) { return mode; }
#endif

// While it lives, this thread takes such numbers for zero, if it is to.
class DenormalsAreZero {
  public:
    explicit DenormalsAreZero(bool really = true) : before_(float_mode()) {
        if (really) set_float_mode(flushing(before_));
    }
    ~DenormalsAreZero() { set_float_mode(before_); }
    DenormalsAreZero(const DenormalsAreZero&) = delete;
    DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;

  private:
    FloatMode before_;
};

}  // namespace stretto
