// What the binding files share: arrays over window memory, addresses.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <memory>
#include <string>

#include "endpoint.h"

namespace cam {

namespace nb = nanobind;
using Array = nb::ndarray<nb::array_api>;

nb::dlpack::dtype dtype_named(const std::string& name);

// An array over part of a block, which lives as long as any view of the array.
Array view(const std::shared_ptr<Block>& block, const void* data, const std::vector<int64_t>& shape,
           const std::string& dtype);

inline Array whole(const std::shared_ptr<Block>& block, const std::vector<int64_t>& shape, const std::string& dtype) {
    return view(block, block->data(), shape, dtype);
}

template <class T>
const T* pointer(uintptr_t address) {
    return reinterpret_cast<const T*>(address);
}

// Each job's bindings, in a file of their own.
void bind_ep(nb::class_<Endpoint>& endpoint);
void bind_collectives(nb::module_& m, nb::class_<Endpoint>& endpoint);
void bind_kv(nb::module_& m);

}  // namespace cam
