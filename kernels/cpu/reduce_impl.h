// Elementwise reduction over ranks, written once and compiled once per instruction set (see reduce_avx512.cpp,
// reduce_avx2.cpp, reduce_portable.cpp). Each element has its own fixed order of additions, so all builds give the same
// bits, however the elements are split over ranks, chunks and threads.
#pragma once

#include <algorithm>

#include "elements.h"
#include "lanes.h"

namespace cam {
namespace {  // one copy per translation unit, as in lanes.h

// 64 bytes of a type that is reduced as it is.
template <class T>
struct Plain {
    using Storage = T;
    typedef T Vector __attribute__((vector_size(64)));
    static constexpr int kWidth = 64 / sizeof(T);
    static Vector load_wide(const T* source) { return load<Vector>(source); }
    static void store_wide(T* target, Vector value) { store(target, value); }
};

// 16 elements of a type that is reduced in fp32.
template <class Half>
struct Widened {
    using Storage = uint16_t;
    using Vector = F32;
    static constexpr int kWidth = kLanes;
    static Vector load_wide(const uint16_t* source) { return Half::load16(source); }
    static void store_wide(uint16_t* target, Vector value) { Half::store16(target, value); }
};

// A reduction: what is done to each element first, to two of them, and to the result.
struct Unchanged {
    template <class V>
    static V first(V value, double) {
        return value;
    }
    template <class V>
    static V last(V value, int) {
        return value;
    }
};
struct Sum : Unchanged {
    template <class V>
    static V pair(V a, V b) {
        return a + b;
    }
};
struct Average : Sum {
    template <class V>
    static V last(V value, int count) {
        using Scalar = std::remove_cv_t<std::remove_reference_t<decltype(value[0])>>;
        return value / (V{} + static_cast<Scalar>(count));
    }
};
// Integers wrap around, which only unsigned ones do by definition.
template <class Unsigned>
struct WrappedAverage : Average {
    template <class V>
    static V pair(V a, V b) {
        using U = typename Plain<Unsigned>::Vector;
        return bits<V>(bits<U>(a) + bits<U>(b));
    }
};
struct PremulSum : Sum {
    template <class V>
    static V first(V value, double factor) {
        using Scalar = std::remove_cv_t<std::remove_reference_t<decltype(value[0])>>;
        return value * (V{} + static_cast<Scalar>(factor));
    }
};
struct Product : Unchanged {
    template <class V>
    static V pair(V a, V b) {
        return a * b;
    }
};
struct Minimum : Unchanged {
    template <class V>
    static V pair(V a, V b) {
        return ((b < a) | (b != b)) ? b : a;
    }
};
struct Maximum : Unchanged {
    template <class V>
    static V pair(V a, V b) {
        return ((b > a) | (b != b)) ? b : a;
    }
};
struct BitAnd : Unchanged {
    template <class V>
    static V pair(V a, V b) {
        return a & b;
    }
};
struct BitOr : Unchanged {
    template <class V>
    static V pair(V a, V b) {
        return a | b;
    }
};
struct BitXor : Unchanged {
    template <class V>
    static V pair(V a, V b) {
        return a ^ b;
    }
};

template <class Type, class Op, int kVectors>
inline void reduce_step(typename Type::Storage* out, const void* const* sources, int count, int64_t at, double factor) {
    using Storage = typename Type::Storage;
    typename Type::Vector value[kVectors];
    const auto* source = static_cast<const Storage*>(sources[0]) + at;
    for (int i = 0; i < kVectors; ++i) value[i] = Op::first(Type::load_wide(source + i * Type::kWidth), factor);
    for (int rank = 1; rank < count; ++rank) {
        source = static_cast<const Storage*>(sources[rank]) + at;
        for (int i = 0; i < kVectors; ++i) {
            value[i] = Op::pair(value[i], Op::first(Type::load_wide(source + i * Type::kWidth), factor));
        }
    }
    for (int i = 0; i < kVectors; ++i) Type::store_wide(out + at + i * Type::kWidth, Op::last(value[i], count));
}

template <class Type, class Op>
void reduce_elements(void* out, const void* const* sources, int count, int64_t elements, double factor) {
    using Storage = typename Type::Storage;
    constexpr int kVectors = 4, kStep = kVectors * Type::kWidth;
    auto* target = static_cast<Storage*>(out);
    int64_t at = 0;
    for (; at + kStep <= elements; at += kStep) reduce_step<Type, Op, kVectors>(target, sources, count, at, factor);
    for (; at + Type::kWidth <= elements; at += Type::kWidth) {
        reduce_step<Type, Op, 1>(target, sources, count, at, factor);
    }
    if (at == elements) return;
    // What is left goes through padded copies; all sources are read before out, which may be one of them, is written.
    const size_t bytes = (elements - at) * sizeof(Storage);
    typename Type::Vector value{};
    for (int rank = 0; rank < count; ++rank) {
        Storage padded[Type::kWidth] = {};
        std::memcpy(padded, static_cast<const Storage*>(sources[rank]) + at, bytes);
        const auto each = Op::first(Type::load_wide(padded), factor);
        value = rank == 0 ? each : Op::pair(value, each);
    }
    Storage padded[Type::kWidth];
    Type::store_wide(padded, Op::last(value, count));
    std::memcpy(target + at, padded, bytes);
}

using ReduceFunction = void (*)(void*, const void* const*, int, int64_t, double);

template <class Type>
ReduceFunction floating(Reduction reduction) {
    switch (reduction) {
        case Reduction::average:
            return reduce_elements<Type, Average>;
        case Reduction::product:
            return reduce_elements<Type, Product>;
        case Reduction::minimum:
            return reduce_elements<Type, Minimum>;
        case Reduction::maximum:
            return reduce_elements<Type, Maximum>;
        case Reduction::premul_sum:
            return reduce_elements<Type, PremulSum>;
        default:
            return reduce_elements<Type, Sum>;
    }
}

// Where two's complement gives the same bits with and without sign, the unsigned type does it: it wraps by definition.
template <class Signed, class Unsigned>
ReduceFunction integer(Reduction reduction) {
    switch (reduction) {
        case Reduction::average:
            return reduce_elements<Plain<Signed>, WrappedAverage<Unsigned>>;
        case Reduction::minimum:
            return reduce_elements<Plain<Signed>, Minimum>;
        case Reduction::maximum:
            return reduce_elements<Plain<Signed>, Maximum>;
        case Reduction::product:
            return reduce_elements<Plain<Unsigned>, Product>;
        case Reduction::bit_and:
            return reduce_elements<Plain<Unsigned>, BitAnd>;
        case Reduction::bit_or:
            return reduce_elements<Plain<Unsigned>, BitOr>;
        case Reduction::bit_xor:
            return reduce_elements<Plain<Unsigned>, BitXor>;
        default:
            return reduce_elements<Plain<Unsigned>, Sum>;
    }
}

// Of 0 and 1.
ReduceFunction boolean(Reduction reduction) {
    switch (reduction) {
        case Reduction::product:
        case Reduction::minimum:
        case Reduction::bit_and:
            return reduce_elements<Plain<uint8_t>, BitAnd>;
        case Reduction::bit_xor:
            return reduce_elements<Plain<uint8_t>, BitXor>;
        default:
            return reduce_elements<Plain<uint8_t>, BitOr>;
    }
}

ReduceFunction chosen(const ReduceSpec& spec) {
    switch (spec.element) {
        case Element::bfloat16:
            return floating<Widened<Bfloat16>>(spec.reduction);
        case Element::float16:
            return floating<Widened<Float16>>(spec.reduction);
        case Element::float32:
            return floating<Plain<float>>(spec.reduction);
        case Element::float64:
            return floating<Plain<double>>(spec.reduction);
        case Element::int8:
            return integer<int8_t, uint8_t>(spec.reduction);
        case Element::uint8:
            return integer<uint8_t, uint8_t>(spec.reduction);
        case Element::int16:
            return integer<int16_t, uint16_t>(spec.reduction);
        case Element::int32:
            return integer<int32_t, uint32_t>(spec.reduction);
        case Element::int64:
            return integer<int64_t, uint64_t>(spec.reduction);
        default:
            return boolean(spec.reduction);
    }
}

void reduce_ranks(void* out, const void* const* sources, int count, int64_t elements, const ReduceSpec& spec) {
    chosen(spec)(out, sources, count, elements, spec.factor);
}

}  // namespace
}  // namespace cam
