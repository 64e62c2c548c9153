// Vectors of one register, and vectors of 16 elements made of several.
//
// Each instruction set includes this file into a namespace of its own. Everything is static: the linker must not merge
// code of different instruction sets. Half precision is computed in float.
#pragma once
#include <stdint.h>
#include <string.h>

#include "plan.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")  // for loops over the registers of a vector
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace weft {
namespace WEFT_ISA {

struct half { uint16_t bits; };
struct bfloat { uint16_t bits; };

template <class T> struct Computed { typedef float type; };
template <> struct Computed<double> { typedef double type; };
template <class T> using In = typename Computed<T>::type;  // the dtype that elements of T are computed in

template <class F> constexpr int LANES = WEFT_WIDTH / sizeof(F);
template <class F> struct RegisterOf;
template <> struct RegisterOf<float> { typedef float type __attribute__((vector_size(WEFT_WIDTH), may_alias)); };
template <> struct RegisterOf<double> { typedef double type __attribute__((vector_size(WEFT_WIDTH), may_alias)); };
template <class F> using Register = typename RegisterOf<F>::type;

typedef float Floats __attribute__((vector_size(WEFT_WIDTH), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(WEFT_WIDTH), aligned(8), may_alias));
typedef float FloatsOfDoubles __attribute__((vector_size(WEFT_WIDTH / 2), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(WEFT_WIDTH), may_alias));
typedef int32_t Integers __attribute__((vector_size(WEFT_WIDTH), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(WEFT_WIDTH / 2), aligned(2), may_alias));

// ---- half precision

#if WEFT_WIDTH == 64
INLINE Register<float> widen(half, const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void narrow(half* p, Register<float> v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, 0)); }
#elif WEFT_WIDTH == 32
INLINE Register<float> widen(half, const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE void narrow(half* p, Register<float> v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, 0)); }
#elif defined(__aarch64__)
INLINE Register<float> widen(half, const void* p) {
    return (Register<float>)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
}
INLINE void narrow(half* p, Register<float> v) {
    vst1_u16((uint16_t*)p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
}
#else
INLINE Register<float> widen(half, const void* p) {
    Words h = __builtin_convertvector(*(const Shorts*)p, Words), exponent = h & 0x7c00u, body = (h & 0x7fffu) << 13;
    Register<float> tiny = __builtin_convertvector((Integers)(h & 0x3ffu), Register<float>) * 0x1p-24f;
    Words usual = exponent == 0x7c00u ? body | 0x7f800000u : body + (112u << 23);
    return (Register<float>)((exponent == 0u ? (Words)tiny : usual) | (h & 0x8000u) << 16);
}
INLINE void narrow(half* p, Register<float> v) {
    Words bits = (Words)v, sign = bits & 0x80000000u, odd = (bits >> 13) & 1u;
    bits ^= sign;
    Register<float> shifted = (Register<float>)bits + 0.5f;  // rounds to a multiple of the smallest half
    Words tiny = (Words)shifted - 0x3f000000u, usual = (bits - (112u << 23) + 0xfffu + odd) >> 13;
    Words large = bits > 0x7f800000u ? ((bits >> 13) & 0x3ffu) | 0x7e00u : (bits & 0u) | 0x7c00u;
    Words found = bits < (113u << 23) ? tiny : bits >= (143u << 23) ? large : usual;
    *(Shorts*)p = __builtin_convertvector(found | sign >> 16, Shorts);
}
#endif

INLINE Register<float> widen(bfloat, const void* p) {
#if WEFT_WIDTH == 64  // GCC widens 16 or 8 elements in two halves
    Words words = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif WEFT_WIDTH == 32
    Words words = (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    Words words = __builtin_convertvector(*(const Shorts*)p, Words);
#endif
    return (Register<float>)(words << 16);
}
// Rounding must not carry a NaN into infinity. Those of arithmetic are quiet: they stay NaNs without their last 16 bits.
#if WEFT_WIDTH == 64
INLINE void narrow(bfloat* p, Register<float> v) {
    __m512i bits = (__m512i)v, upper = _mm512_castsi256_si512(
        _mm256_setr_epi16(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
    __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    __m512i more = _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7fff), _mm512_set1_epi32(0x8000));
    bits = _mm512_mask_add_epi32(bits, _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), bits, more);
    _mm256_storeu_si256((__m256i*)p, _mm512_castsi512_si256(_mm512_permutexvar_epi16(upper, bits)));
}
#else
INLINE void narrow(bfloat* p, Register<float> v) {
    Words bits = (Words)v, more = ((bits >> 16 & 1u) + 0x7fffu) & (Words)(v == v), found = (bits + more) >> 16;
#if WEFT_WIDTH == 32
    __m256i words = (__m256i)found;
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    *(Shorts*)p = __builtin_convertvector(found, Shorts);
#endif
}
#endif

// ---- loads and stores of one register

INLINE Register<float> load(const float* p) { return *(const Floats*)p; }
INLINE Register<double> load(const double* p) { return *(const Doubles*)p; }
INLINE Register<float> load(const half* p) { return widen(half(), p); }
INLINE Register<float> load(const bfloat* p) { return widen(bfloat(), p); }
INLINE void store(float* p, Register<float> v) { *(Floats*)p = v; }
INLINE void store(double* p, Register<double> v) { *(Doubles*)p = v; }
INLINE void store(half* p, Register<float> v) { narrow(p, v); }
INLINE void store(bfloat* p, Register<float> v) { narrow(p, v); }

// Elements as doubles.
INLINE Register<double> load_wide(const double* p) { return load(p); }
INLINE Register<double> load_wide(const float* p) {
    return __builtin_convertvector(*(const FloatsOfDoubles*)p, Register<double>);
}

INLINE void store_narrow(double* p, Register<double> v) { store(p, v); }
INLINE void store_narrow(float* p, Register<double> v) { *(FloatsOfDoubles*)p = __builtin_convertvector(v, FloatsOfDoubles); }

// Doubles rounded to F.
template <class F> INLINE Register<double> rounded(Register<double> v) {
    if constexpr (sizeof(F) == sizeof(double)) return v;
    else return __builtin_convertvector(__builtin_convertvector(v, FloatsOfDoubles), Register<double>);
}

template <class F> INLINE Register<F> all(F value) { return value - Register<F>{}; }

// The first `left` elements from p on, and `rest` in the other lanes.
#if WEFT_WIDTH == 64
INLINE Register<float> load_part(const float* p, int64_t left, Register<float> rest) {
    return _mm512_mask_loadu_ps(rest, (__mmask16)((1u << left) - 1), p);
}
INLINE Register<double> load_part(const double* p, int64_t left, Register<double> rest) {
    return _mm512_mask_loadu_pd(rest, (__mmask8)((1u << left) - 1), p);
}
INLINE Register<float> load_part(const half* p, int64_t left, Register<float> rest) {
    __mmask16 mask = (__mmask16)((1u << left) - 1);
    return _mm512_mask_blend_ps(mask, rest, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p)));
}
INLINE Register<float> load_part(const bfloat* p, int64_t left, Register<float> rest) {
    __mmask16 mask = (__mmask16)((1u << left) - 1);
    __m512i words = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16);
    return _mm512_mask_blend_ps(mask, rest, _mm512_castsi512_ps(words));
}
INLINE void store_part(float* p, Register<float> v, int64_t left) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << left) - 1), v);
}
INLINE void store_part(double* p, Register<double> v, int64_t left) {
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << left) - 1), v);
}
template <class T> INLINE void store_part(T* p, Register<float> v, int64_t left) {
    T whole[LANES<float>];
    store(whole, v);
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << left) - 1), _mm256_loadu_si256((const __m256i*)whole));
}
#else
template <class T> INLINE Register<In<T>> load_part(const T* p, int64_t left, Register<In<T>> rest) {
    T whole[LANES<In<T>>];
    Register<In<T>> found = rest;
    for (int i = 0; i < LANES<In<T>>; i++) whole[i] = p[i < left ? i : 0];
    Register<In<T>> read = load(whole);
    for (int i = 0; i < LANES<In<T>>; i++) found[i] = i < left ? read[i] : rest[i];
    return found;
}
template <class T> INLINE void store_part(T* p, Register<In<T>> v, int64_t left) {
    T whole[LANES<In<T>>];
    store(whole, v);
    for (int i = 0; i < left; i++) p[i] = whole[i];
}
#endif
#if WEFT_WIDTH == 32
INLINE __m256i first_lanes(int64_t left) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE Register<float> load_part(const float* p, int64_t left, Register<float> rest) {
    __m256i mask = first_lanes(left);
    return _mm256_blendv_ps(rest, _mm256_maskload_ps(p, mask), _mm256_castsi256_ps(mask));
}
INLINE void store_part(float* p, Register<float> v, int64_t left) { _mm256_maskstore_ps(p, first_lanes(left), v); }
#endif

// Stores past the caches; p must be aligned to what is written.
#if WEFT_WIDTH == 64
INLINE void stream(float* p, Register<float> v) { _mm512_stream_ps(p, v); }
INLINE void stream(double* p, Register<double> v) { _mm512_stream_pd(p, v); }
#elif WEFT_WIDTH == 32
INLINE void stream(float* p, Register<float> v) { _mm256_stream_ps(p, v); }
INLINE void stream(double* p, Register<double> v) { _mm256_stream_pd(p, v); }
#elif defined(__x86_64__)
INLINE void stream(float* p, Register<float> v) { _mm_stream_ps(p, v); }
INLINE void stream(double* p, Register<double> v) { _mm_stream_pd(p, v); }
#endif
template <class T> constexpr bool CAN_STREAM = sizeof(T) >= LEAST_STREAMED;
template <class T> INLINE void stream(T* p, Register<In<T>> v) { store(p, v); }

// ---- arithmetic

// a b + c, rounded once where the processor does so in one step.
#if WEFT_WIDTH == 64
INLINE Register<float> fused(Register<float> a, Register<float> b, Register<float> c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Register<double> fused(Register<double> a, Register<double> b, Register<double> c) { return _mm512_fmadd_pd(a, b, c); }
#elif WEFT_WIDTH == 32
INLINE Register<float> fused(Register<float> a, Register<float> b, Register<float> c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Register<double> fused(Register<double> a, Register<double> b, Register<double> c) { return _mm256_fmadd_pd(a, b, c); }
#elif defined(__aarch64__)
INLINE Register<float> fused(Register<float> a, Register<float> b, Register<float> c) {
    return (Register<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE Register<double> fused(Register<double> a, Register<double> b, Register<double> c) {
    return (Register<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#else
template <class R> INLINE R fused(R a, R b, R c) { return a * b + c; }
#endif

INLINE float root(float v) { return __builtin_sqrtf(v); }
INLINE double root(double v) { return __builtin_sqrt(v); }
#if WEFT_WIDTH == 64
INLINE Register<double> root(Register<double> v) { return _mm512_sqrt_pd(v); }
#elif WEFT_WIDTH == 32
INLINE Register<double> root(Register<double> v) { return _mm256_sqrt_pd(v); }
#else
INLINE Register<double> root(Register<double> v) { return Register<double>{root(v[0]), root(v[1])}; }
#endif
template <class F> INLINE bool is_finite(F v) { return v - v == 0; }

// ---- 16 elements, in as many registers as that takes

template <class F> constexpr int REGISTERS = 16 / LANES<F>;

// Their sum, added in pairs, in double.
template <class F> INLINE double total(const Register<F>* v) {
    F part[16];
    double sums[16];
    UNROLL for (int i = 0; i < REGISTERS<F>; i++) store(part + i * LANES<F>, v[i]);
    UNROLL for (int i = 0; i < 16; i++) sums[i] = part[i];
    UNROLL for (int i = 0; i < 8; i++) sums[i] += sums[i + 8];
    UNROLL for (int i = 0; i < 4; i++) sums[i] += sums[i + 4];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

}  // namespace WEFT_ISA
}  // namespace weft
