// Vectors of 16 lanes, and how 16 elements of each dtype become fp32 and back. Included by the kernels that are
// compiled once per instruction set: see rows_impl.h and reduce_impl.h.
//
// bf16 is rounded with integer arithmetic although AVX-512 BF16 has an instruction for it: vcvtneps2bf16 flushes
// denormals to zero, and results would then depend on the machine. The kernels wait for memory, not for this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cam {
namespace {  // one copy per translation unit: the linker must never merge code of different instruction sets

constexpr int kLanes = 16;
typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));
typedef int8_t I8 __attribute__((vector_size(16)));
typedef uint8_t U8 __attribute__((vector_size(16)));

template <class To, class From>
inline To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

template <class Vector>
inline Vector load(const void* source) {
    Vector value;
    std::memcpy(&value, source, sizeof value);
    return value;
}

template <class Vector>
inline void store(void* target, Vector value) {
    std::memcpy(target, &value, sizeof value);
}

inline F32 splat(float value) { return value - F32{}; }

// 64 bytes to an address that is a multiple of 64, around the caches.
inline void stream64(void* target, const void* source) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i*>(target), _mm512_loadu_si512(source));
#elif defined(__AVX2__)
    auto* to = static_cast<__m256i*>(target);
    const auto* from = static_cast<const __m256i*>(source);
    const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
#elif defined(__SSE2__)
    auto* to = static_cast<__m128i*>(target);
    const auto* from = static_cast<const __m128i*>(source);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(to + i, _mm_loadu_si128(from + i));
#else
    std::memcpy(target, source, 64);
#endif
}

// How 16 elements of each dtype become fp32 and back. The way back rounds to nearest even, once.
struct Bfloat16 {
    using Storage = uint16_t;
    static F32 load16(const uint16_t* source) {
        return bits<F32>(__builtin_convertvector(load<U16>(source), U32) << 16);
    }
    static void store16(uint16_t* target, F32 value) {
        const U32 raw = bits<U32>(value);
        const U32 rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
        const U32 quiet = (raw >> 16) | 0x40u;
        store(target, __builtin_convertvector(bits<U32>(value != value ? bits<I32>(quiet) : bits<I32>(rounded)), U16));
    }
};

#if defined(__AVX512F__) || defined(__F16C__)
struct Float16 {
    using Storage = uint16_t;
    static F32 load16(const uint16_t* source) {
#if defined(__AVX512F__)
        return bits<F32>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source))));
#else
        const __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))),
                                  _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 8)))};
        return load<F32>(halves);
#endif
    }
    static void store16(uint16_t* target, F32 value) {
#if defined(__AVX512F__)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target),
                            _mm512_cvtps_ph(bits<__m512>(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
        __m256 halves[2];
        std::memcpy(halves, &value, sizeof value);
        for (int i = 0; i < 2; ++i) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(target + 8 * i),
                             _mm256_cvtps_ph(halves[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        }
#endif
    }
};
#else
#if defined(__aarch64__)
typedef __fp16 Half;  // GCC 12 has no _Float16 in C++ here
#else
typedef _Float16 Half;
#endif
struct Float16 {
    using Storage = uint16_t;
    static F32 load16(const uint16_t* source) {
        F32 value;
        for (int i = 0; i < kLanes; ++i) {
            Half half;
            std::memcpy(&half, source + i, 2);
            value[i] = static_cast<float>(half);
        }
        return value;
    }
    static void store16(uint16_t* target, F32 value) {
        for (int i = 0; i < kLanes; ++i) {
            const auto half = static_cast<Half>(value[i]);
            std::memcpy(target + i, &half, 2);
        }
    }
};
#endif

struct Float32 {
    using Storage = float;
    static F32 load16(const float* source) { return load<F32>(source); }
    static void store16(float* target, F32 value) { store(target, value); }
};

// The elements after the last multiple of 16, through zero-padded copies.
template <class Type>
F32 load_tail(const typename Type::Storage* source, int64_t count) {
    typename Type::Storage padded[kLanes] = {};
    std::memcpy(padded, source, count * sizeof padded[0]);
    return Type::load16(padded);
}

template <class Type>
void store_tail(typename Type::Storage* target, F32 value, int64_t count) {
    typename Type::Storage padded[kLanes];
    Type::store16(padded, value);
    std::memcpy(target, padded, count * sizeof padded[0]);
}

}  // namespace
}  // namespace cam
