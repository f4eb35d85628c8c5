// Moving many scattered pieces of memory in one call: the KV cache's blocks.
//
// A piece is `rows` runs of `bytes` with a stride on each side. One table of pieces serves any number of layers that
// have the same geometry: each layer adds its own base addresses. Memory of other processes is reached either because
// it is mapped here (copy) or by pid (process_vm_readv, process_vm_writev).
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "pool.h"
#include "rows.h"

namespace cam {

struct Piece {
    int64_t my_offset, their_offset, bytes, rows, my_stride, their_stride;
};
static_assert(sizeof(Piece) == 6 * sizeof(int64_t));

struct Pieces {
    const Piece* pieces;
    int64_t count;
    const int64_t* my_bases;  // [layers] addresses
    const int64_t* their_bases;
    int64_t layers;
    bool to_mine;

    int64_t steps() const { return count * layers; }  // step = layer * count + piece
};

// What may end a move early. cancel: another thread sets it to non-zero. deadline_ns: of CLOCK_MONOTONIC, 0 = none.
struct Limits {
    const uint32_t* cancel;
    int64_t deadline_ns;
};

enum class Ended : int64_t { done = 0, cancelled = 1, late = 2, failed = 3 };

// step: the first step that may not have been done; error: errno of a failed system call.
struct Outcome {
    Ended ended = Ended::done;
    int64_t step = 0;
    int error = 0;
};

class Mover {
public:
    Mover(int threads, const std::string& isa, size_t nontemporal_threshold);
    ~Mover();

    Outcome copy(const Pieces& pieces, const Limits& limits);
    // Their side is the address space of process pid.
    Outcome copy_process(pid_t pid, const Pieces& pieces, const Limits& limits);
    const char* isa() const { return rows_.isa; }

private:
    const RowKernels& rows_;
    const size_t threshold_;
    const pid_t owner_;
    std::unique_ptr<Pool> pool_;
    std::mutex pool_use_;  // one transfer at a time has the threads; others copy alone meanwhile
};

}  // namespace cam
