/* Ascend's vector instructions on a CPU: what the calls in final HIVM of A2 and A3 compute.
 *
 * bishengir-compile leaves one call per instruction (vadd_1d_float, load_gm_to_ubuf_2d_int8_t, ...). hivm_native.py
 * generates a wrapper for each that a kernel uses and calls the function of that name below; an instruction that is not
 * here fails to compile and so is named in the error. Arguments that are scratch space of the device are ignored. The
 * meaning of each is taken from its name and from the pass that emits it: not run on hardware.
 */
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace hivm {

/* 16-bit floats travel as bits. */
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
/* An element of a mask: masks are one bit per element in UB. */
struct bit {};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t word = uint32_t(x.bits) << 16;
    float result;
    memcpy(&result, &word, 4);
    return result;
}
inline float to_float(f16 x) {
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 0x3ff;
    if (exponent == 0) {
        float magnitude = std::ldexp(float(fraction), -24);
        return sign ? -magnitude : magnitude;
    }
    uint32_t word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float result;
    memcpy(&result, &word, 4);
    return result;
}
template <class T> T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline bf16 from_float<bf16>(float x) { /* to nearest even */
    uint32_t word;
    memcpy(&word, &x, 4);
    if ((word & 0x7fffffff) > 0x7f800000) return {uint16_t(word >> 16 | 0x40)};
    return {uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16)};
}
template <> inline f16 from_float<f16>(float x) { /* to nearest even */
    uint32_t word;
    memcpy(&word, &x, 4);
    uint16_t sign = uint16_t(word >> 16 & 0x8000);
    uint32_t magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
    if (magnitude < 0x38800000) { /* becomes a denormal: count in units of 2^-24 */
        float units;
        memcpy(&units, &magnitude, 4);
        return {uint16_t(sign | uint16_t(std::nearbyint(std::ldexp(units, 24))))};
    }
    return {uint16_t(sign | uint16_t((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13))};
}

/* MLIR's memref descriptor. */
template <class T, int R> struct memref {
    T *allocated, *aligned;
    int64_t offset, sizes[R], strides[R];
    int64_t count() const {
        int64_t n = 1;
        for (int r = 0; r < R; r++) n *= sizes[r];
        return n;
    }
    /* The place of the i-th element in row-major order. */
    int64_t place(int64_t i) const {
        int64_t at = offset;
        for (int r = R - 1; r >= 0; r--) {
            at += i % sizes[r] * strides[r];
            i /= sizes[r];
        }
        return at;
    }
    T &operator[](int64_t i) const {
        static_assert(!std::is_same<T, bit>::value, "a mask has no elements with addresses: get, set");
        return aligned[place(i)];
    }
};
template <int R> using mask = memref<bit, R>;
template <int R> bool get(const mask<R> &m, int64_t i) {
    int64_t at = m.place(i);
    return reinterpret_cast<const uint8_t *>(m.aligned)[at >> 3] >> (at & 7) & 1;
}
template <int R> void set(const mask<R> &m, int64_t i, bool value) {
    int64_t at = m.place(i);
    uint8_t &byte = reinterpret_cast<uint8_t *>(m.aligned)[at >> 3];
    byte = uint8_t((byte & ~(1 << (at & 7))) | value << (at & 7));
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

template <class T, int R> void copy(const memref<T, R> &from, const memref<T, R> &to) {
    for (int64_t i = 0, n = from.count(); i < n; i++) to[i] = from[i];
}
template <class T, int R>
void load_gm_to_ubuf(const memref<T, R> &from, const memref<T, R> &to, int32_t, T, int64_t left) {
    if (left != 0) abort(); /* never asked for so far */
    copy(from, to);
}
template <class T, int R> void store_ubuf_to_gm(const memref<T, R> &from, const memref<T, R> &to, int32_t) {
    copy(from, to);
}
template <class T, int R> void copy_ubuf_to_ubuf(const memref<T, R> &from, const memref<T, R> &to, int32_t, T) {
    copy(from, to);
}
template <class T, int R> void broadcast_scalar(T value, const memref<T, R> &to) {
    for (int64_t i = 0, n = to.count(); i < n; i++) to[i] = value;
}
template <int R> void broadcast_scalar(bool value, const mask<R> &to) {
    for (int64_t i = 0, n = to.count(); i < n; i++) set(to, i, value);
}
template <class T> void broadcast_first_axis_align(const memref<T, 2> &from, const memref<T, 2> &to) {
    for (int64_t i = 0; i < to.sizes[0]; i++)
        for (int64_t j = 0; j < to.sizes[1]; j++)
            to.aligned[to.offset + i * to.strides[0] + j * to.strides[1]] =
                from.aligned[from.offset + j * from.strides[1]];
}
template <class T> void arange(const memref<T, 1> &to, int64_t first, int64_t step) {
    for (int64_t i = 0, n = to.count(); i < n; i++) to[i] = T(first + i * step);
}

/* --- arithmetic: vector with vector, vector with scalar, one operand ------------------------------------------------ */

inline int32_t wrap(int64_t x) { return int32_t(uint32_t(x)); }
inline float add(float a, float b) { return a + b; }
inline float multiply(float a, float b) { return a * b; }
inline int32_t add(int32_t a, int32_t b) { return wrap(int64_t(a) + b); }
inline int32_t multiply(int32_t a, int32_t b) { return wrap(int64_t(a) * b); }
template <class T> T larger(T a, T b) { return a > b ? a : b; }
template <class T> T smaller(T a, T b) { return a < b ? a : b; }

#define VECTOR_VECTOR(name, expression)                                                                       \
    template <class T, int R, class S>                                                                        \
    void name(const memref<T, R> &x, const memref<T, R> &y, const memref<T, R> &to, const S &) {              \
        for (int64_t i = 0, n = to.count(); i < n; i++) { T a = x[i], b = y[i]; to[i] = expression; }         \
    }
#define VECTOR_SCALAR(name, expression)                                                                       \
    template <class T, int R, class S> void name(const memref<T, R> &x, T b, const memref<T, R> &to, const S &) { \
        for (int64_t i = 0, n = to.count(); i < n; i++) { T a = x[i]; to[i] = expression; }                   \
    }
#define ONE_OPERAND(name, expression)                                                                         \
    template <class T, int R, class S> void name(const memref<T, R> &x, const memref<T, R> &to, const S &) {  \
        for (int64_t i = 0, n = to.count(); i < n; i++) { T a = x[i]; to[i] = expression; }                   \
    }
VECTOR_VECTOR(vadd, add(a, b))
VECTOR_VECTOR(vmul, multiply(a, b))
VECTOR_VECTOR(vdiv, a / b)
VECTOR_VECTOR(vor, a | b)
VECTOR_SCALAR(vadds_vs, add(a, b))
VECTOR_SCALAR(vmuls_vs, multiply(a, b))
VECTOR_SCALAR(vdiv_vs, a / b)
VECTOR_SCALAR(vmaxs_vs, larger(a, b))
VECTOR_SCALAR(vmins_vs, smaller(a, b))
ONE_OPERAND(vabs, std::fabs(a))
ONE_OPERAND(vexp, std::exp(a))

/* --- comparisons and selections ------------------------------------------------------------------------------------ */

template <class T, int R> void vcmp_eq(const memref<T, R> &x, const memref<T, R> &y, const mask<R> &to) {
    for (int64_t i = 0, n = to.count(); i < n; i++) set(to, i, x[i] == y[i]);
}
template <int R> void vcmps_eq(const memref<f16, R> &x, f16 value, const mask<R> &to) {
    for (int64_t i = 0, n = to.count(); i < n; i++) set(to, i, to_float(x[i]) == to_float(value));
}
template <int R, class S> void vnot(const mask<R> &x, const mask<R> &to, const S &) {
    for (int64_t i = 0, n = to.count(); i < n; i++) set(to, i, !get(x, i));
}
template <class T, int R> T pick(const memref<T, R> &x, int64_t i) { return x[i]; }
template <class T> T pick(T value, int64_t) { return value; }
template <int R, class A, class B, class T, class S>
void vsel(const mask<R> &condition, const A &a, const B &b, const memref<T, R> &to, const S &) {
    for (int64_t i = 0, n = to.count(); i < n; i++) to[i] = get(condition, i) ? pick(a, i) : pick(b, i);
}

/* --- conversions. Rounding modes are numbered as in HIVM: 0 to nearest even, 1 half away, 2 down, 3 up, 4 to zero --- */

inline float rounded(float x, int32_t mode) {
    switch (mode) {
    case 0: return std::nearbyint(x);
    case 1: return std::round(x);
    case 2: return std::floor(x);
    case 3: return std::ceil(x);
    case 4: return std::trunc(x);
    default: abort();
    }
}
inline void convert(float x, int32_t &to, int32_t mode) {
    float y = rounded(x, mode);
    to = y >= 2147483648.0f ? INT32_MAX : y < -2147483648.0f ? INT32_MIN : std::isnan(y) ? 0 : int32_t(y);
}
inline void convert(float x, bf16 &to, int32_t mode) { if (mode) abort(); to = from_float<bf16>(x); }
inline void convert(float x, f16 &to, int32_t mode) { if (mode) abort(); to = from_float<f16>(x); }
inline void convert(bf16 x, float &to, int32_t) { to = to_float(x); }
inline void convert(f16 x, float &to, int32_t) { to = to_float(x); }
inline void convert(int8_t x, f16 &to, int32_t) { to = from_float<f16>(x); }
inline void convert(int32_t x, float &to, int32_t mode) { if (mode) abort(); to = float(x); }
template <class A, class B, int R> void vcast(const memref<A, R> &x, const memref<B, R> &to, int32_t mode) {
    for (int64_t i = 0, n = to.count(); i < n; i++) convert(x[i], to[i], mode);
}
/* int32 -> int8 keeps the low bits. */
template <int R, class S> void vcast(const memref<int32_t, R> &x, const memref<int8_t, R> &to, const S &, int32_t) {
    for (int64_t i = 0, n = to.count(); i < n; i++) to[i] = int8_t(uint8_t(x[i]));
}
template <class T> T one();
template <> inline int32_t one<int32_t>() { return 1; }
template <> inline f16 one<f16>() { return {0x3c00}; }
template <class T, int R, class S> void vcast(const mask<R> &x, const memref<T, R> &to, const S &, int32_t) {
    for (int64_t i = 0, n = to.count(); i < n; i++) to[i] = get(x, i) ? one<T>() : T{};
}

/* --- reductions: r of a vector, ar of every row, ra of every column ------------------------------------------------- */

template <class T, class S> void reduce_sum_r(const memref<T, 1> &x, const memref<T, 1> &to, const S &, T) {
    T total = 0;
    for (int64_t i = 0, n = x.count(); i < n; i++) total = add(total, x[i]);
    to[0] = total;
}
template <class T, class S> void enablevc_reduce_max_r(const memref<T, 1> &x, const memref<T, 1> &to, const S &, T) {
    T most = x[0];
    for (int64_t i = 1, n = x.count(); i < n; i++) most = larger(most, x[i]);
    to[0] = most;
}
template <class T, class S> void reduce_sum_ar(const memref<T, 2> &x, const memref<T, 2> &to, const S &, T) {
    for (int64_t i = 0; i < x.sizes[0]; i++) {
        T total = 0;
        for (int64_t j = 0; j < x.sizes[1]; j++) total = add(total, x[i * x.sizes[1] + j]);
        to[i] = total;
    }
}
template <class T, class S> void reduce_sum_ra(const memref<T, 2> &x, const memref<T, 2> &to, const S &, T) {
    for (int64_t j = 0; j < x.sizes[1]; j++) {
        T total = 0;
        for (int64_t i = 0; i < x.sizes[0]; i++) total = add(total, x[i * x.sizes[1] + j]);
        to[j] = total;
    }
}

} // namespace hivm
