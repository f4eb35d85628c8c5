// The row kernels, written once with compiler vectors of 16 lanes and compiled once per instruction set (see
// rows_avx512.cpp, rows_avx2.cpp, rows_portable.cpp). Lanes never mix, except in dot(), where the order is fixed; with
// -ffp-contract=off every build therefore gives the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "lanes.h"
#include "rows.h"

namespace cam {
namespace {  // one copy per translation unit: the linker must never merge code of different instruction sets

constexpr size_t kCacheLine = 64;

void fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

void copy(void* target, const void* source, size_t bytes, bool nontemporal) {
    if (!nontemporal || bytes < 256) {
        std::memcpy(target, source, bytes);
        return;
    }
    auto* to = static_cast<std::byte*>(target);
    const auto* from = static_cast<const std::byte*>(source);
    const size_t head = -reinterpret_cast<uintptr_t>(to) % 64;
    std::memcpy(to, from, head);
    size_t done = head;
    for (; done + 256 <= bytes; done += 256) {
        stream64(to + done, from + done);
        stream64(to + done + 64, from + done + 64);
        stream64(to + done + 128, from + done + 128);
        stream64(to + done + 192, from + done + 192);
    }
    for (; done + 64 <= bytes; done += 64) stream64(to + done, from + done);
    std::memcpy(to + done, from + done, bytes - done);
}

// The hardware's prefetchers stop at the end of a page and start anew where the next piece lies; with them alone a
// scattered copy waits for memory a quarter to a third longer.
void copy_ahead(void* target, const void* source, size_t bytes, const void* next) {
    constexpr size_t kAhead = 2048;
    if (bytes < kAhead) {
        copy(target, source, bytes, true);
        return;
    }
    auto* to = static_cast<std::byte*>(target);
    const auto* from = static_cast<const std::byte*>(source);
    const size_t head = -reinterpret_cast<uintptr_t>(to) % 64;
    std::memcpy(to, from, head);
    size_t done = head;
    for (; done + 256 <= bytes; done += 256) {
        const size_t later = done + kAhead;
        const auto* ahead = later < bytes ? from + later : static_cast<const std::byte*>(next) + (later - bytes);
        for (int line = 0; line < 4; ++line) __builtin_prefetch(ahead + 64 * line);
        stream64(to + done, from + done);
        stream64(to + done + 64, from + done + 64);
        stream64(to + done + 128, from + done + 128);
        stream64(to + done + 192, from + done + 192);
    }
    for (; done + 64 <= bytes; done += 64) stream64(to + done, from + done);
    std::memcpy(to + done, from + done, bytes - done);
}

void zero(void* target, size_t bytes) { std::memset(target, 0, bytes); }

// Calls `body(Type{})` with the element type; opaque rows never get here.
template <class Body>
auto with_dtype(Dtype dtype, Body&& body) {
    switch (dtype) {
        case Dtype::bfloat16:
            return body(Bfloat16{});
        case Dtype::float16:
            return body(Float16{});
        default:
            return body(Float32{});
    }
}

// Writes groups of 64 bytes; with `nontemporal` around the caches, which needs an aligned target.
template <class Type, int kVectors>
inline void store_group(typename Type::Storage* target, const F32 (&value)[kVectors], bool nontemporal) {
    if (!nontemporal) {
        for (int i = 0; i < kVectors; ++i) Type::store16(target + i * kLanes, value[i]);
        return;
    }
    alignas(64) typename Type::Storage staged[kVectors * kLanes];
    for (int i = 0; i < kVectors; ++i) Type::store16(staged + i * kLanes, value[i]);
    for (size_t at = 0; at < sizeof staged; at += 64) {
        stream64(reinterpret_cast<std::byte*>(target) + at, reinterpret_cast<const std::byte*>(staged) + at);
    }
}

template <class Type>
void reduce_rows(void* out, const void* const* rows, const float* weights, int count, const void* bias, int64_t hidden,
                 bool nontemporal) {
    using Storage = typename Type::Storage;
    constexpr int kVectors = 8, kStep = kVectors * kLanes;
    constexpr size_t kAhead = 1024;
    auto* target = static_cast<Storage*>(out);
    const auto* extra = static_cast<const Storage*>(bias);
    nontemporal = nontemporal && reinterpret_cast<uintptr_t>(out) % 64 == 0;
    int64_t at = 0;
    for (; at + kStep <= hidden; at += kStep) {
        F32 sum[kVectors] = {};
        for (int row = 0; row < count; ++row) {
            const auto* source = static_cast<const Storage*>(rows[row]) + at;
            // As many streams as experts, each broken at every page: more than the hardware's prefetchers follow. Half
            // as much again at 2048 tokens x 8 rows; past a row's end it is wasted, and harmless.
            for (size_t line = 0; line < kStep * sizeof(Storage); line += kCacheLine) {
                __builtin_prefetch(reinterpret_cast<const std::byte*>(source) + kAhead + line);
            }
            if (weights) {
                const F32 weight = splat(weights[row]);
                for (int i = 0; i < kVectors; ++i) sum[i] = sum[i] + weight * Type::load16(source + i * kLanes);
            } else {
                for (int i = 0; i < kVectors; ++i) sum[i] = sum[i] + Type::load16(source + i * kLanes);
            }
        }
        if (extra) {
            for (int i = 0; i < kVectors; ++i) sum[i] = sum[i] + Type::load16(extra + at + i * kLanes);
        }
        store_group<Type, kVectors>(target + at, sum, nontemporal);
    }
    for (; at < hidden; at += kLanes) {
        const int64_t left = std::min<int64_t>(kLanes, hidden - at);
        F32 sum = {};
        for (int row = 0; row < count; ++row) {
            const F32 value = load_tail<Type>(static_cast<const Storage*>(rows[row]) + at, left);
            sum = sum + (weights ? splat(weights[row]) * value : value);
        }
        if (extra) sum = sum + load_tail<Type>(extra + at, left);
        store_tail<Type>(target + at, sum, left);
    }
}

void reduce(void* out, const void* const* rows, const float* weights, int count, const void* bias, int64_t hidden,
            Dtype dtype, bool nontemporal) {
    with_dtype(dtype,
               [&](auto type) { reduce_rows<decltype(type)>(out, rows, weights, count, bias, hidden, nontemporal); });
}

void scale(void* target, const void* source, float weight, int64_t hidden, Dtype dtype, bool nontemporal) {
    reduce(target, &source, &weight, 1, nullptr, hidden, dtype, nontemporal);
}

float dot(const void* a, const void* b, int64_t hidden, Dtype dtype) {
    return with_dtype(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* left = static_cast<const typename Type::Storage*>(a);
        const auto* right = static_cast<const typename Type::Storage*>(b);
        F32 sum = {};
        int64_t at = 0;
        for (; at + kLanes <= hidden; at += kLanes) sum = sum + Type::load16(left + at) * Type::load16(right + at);
        if (at < hidden) {
            sum = sum + load_tail<Type>(left + at, hidden - at) * load_tail<Type>(right + at, hidden - at);
        }
        for (int width = kLanes / 2; width > 0; width /= 2) {
            for (int lane = 0; lane < width; ++lane) sum[lane] = sum[lane] + sum[lane + width];
        }
        return sum[0];
    });
}

inline F32 absolute(F32 value) { return bits<F32>(bits<U32>(value) & 0x7fffffffu); }

// The largest magnitude. Magnitudes compare as integers, where NaN is above infinity: a NaN in a row is not lost, it
// becomes the row's scale.
template <class Type>
float amax(const typename Type::Storage* source, int64_t count) {
    I32 most = {};
    const auto see = [&](F32 value) {
        const I32 magnitude = bits<I32>(value) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    };
    int64_t at = 0;
    for (; at + kLanes <= count; at += kLanes) see(Type::load16(source + at));
    if (at < count) see(load_tail<Type>(source + at, count - at));
    int32_t result = 0;
    for (int lane = 0; lane < kLanes; ++lane) result = std::max(result, most[lane]);
    return bits<float>(result);
}

// To the nearest integer, ties to even, for |value| < 2^22: adding 1.5 * 2^23 leaves no fraction bits.
inline F32 round_half_even(F32 value) {
    const F32 magic = splat(12582912.0f);
    return (value + magic) - magic;
}

float quant_int8(int8_t* q, const void* x, int64_t hidden, Dtype dtype) {
    return with_dtype(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* source = static_cast<const typename Type::Storage*>(x);
        const float scale = amax<Type>(source, hidden) / 127.0f;
        if (scale == 0.0f) {
            std::memset(q, 0, hidden);
            return 0.0f;
        }
        // A scale that is denormal can make x / scale exceed 127 by rounding: clamp.
        const F32 divisor = splat(scale), top = splat(127.0f), bottom = splat(-127.0f);
        const auto quantise = [&](F32 value) {
            F32 rounded = round_half_even(value / divisor);
            rounded = rounded > top ? top : rounded;
            rounded = rounded < bottom ? bottom : rounded;
            rounded = rounded != rounded ? F32{} : rounded;
            return __builtin_convertvector(__builtin_convertvector(rounded, I32), I8);
        };
        int64_t at = 0;
        for (; at + kLanes <= hidden; at += kLanes) store(q + at, quantise(Type::load16(source + at)));
        if (at < hidden) {
            const I8 tail = quantise(load_tail<Type>(source + at, hidden - at));
            std::memcpy(q + at, &tail, hidden - at);
        }
        return scale;
    });
}

// fp32 -> float8_e4m3fn, nearest even, saturating to +-448; NaN -> 0x7f.
inline U8 to_e4m3(F32 value) {
    const U32 sign = (bits<U32>(value) >> 24) & 0x80u;
    F32 magnitude = absolute(value);
    const auto nan = magnitude != magnitude;
    magnitude = magnitude > splat(448.0f) ? splat(448.0f) : magnitude;
    // Normal range (>= 2^-6): keep 3 mantissa bits and rebias the exponent from 127 to 7.
    const U32 raw = bits<U32>(magnitude);
    const U32 normal = ((raw + 0x7ffffu + ((raw >> 20) & 1u)) >> 20) - (120u << 3);
    // Below, the step is 2^-9: adding 2^14 (whose last bit is 2^-9) rounds to it, and leaves the multiple in the low
    // bits.
    const U32 small = bits<U32>(magnitude + splat(16384.0f)) - bits<U32>(splat(16384.0f));
    U32 code = bits<U32>(magnitude < splat(0.015625f) ? bits<I32>(small) : bits<I32>(normal));
    code = bits<U32>(nan ? bits<I32>(code * 0u + 0x7fu) : bits<I32>(code));
    return __builtin_convertvector(code | sign, U8);
}

void quant_fp8(uint8_t* q, float* scales, const void* x, int64_t hidden, Dtype dtype) {
    with_dtype(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* source = static_cast<const typename Type::Storage*>(x);
        for (int64_t begin = 0; begin < hidden; begin += kFp8Group) {
            const int64_t end = std::min(hidden, begin + kFp8Group);
            const float scale = std::max(amax<Type>(source + begin, end - begin), 1e-4f) / 448.0f;
            scales[begin / kFp8Group] = scale;
            int64_t at = begin;
            for (; at + kLanes <= end; at += kLanes) store(q + at, to_e4m3(Type::load16(source + at) / splat(scale)));
            if (at < end) {
                const U8 tail = to_e4m3(load_tail<Type>(source + at, end - at) / splat(scale));
                std::memcpy(q + at, &tail, end - at);
            }
        }
    });
}

constexpr RowKernels table(const char* isa) {
    return {isa, copy, copy_ahead, zero, fence, quant_int8, quant_fp8, reduce, scale, dot};
}

}  // namespace
}  // namespace cam
