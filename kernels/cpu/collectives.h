// Collectives over the ranks' windows: reductions and moves of bytes between ordinary memory.
//
// Each rank stages pieces of its tensor in its own window, its peers read them from there (staged.h): one copy in the
// caches more than the least possible, and no tensor has to lie in the window. All ranks get the same bits.
//
// Sizes are checked by all ranks in the first round; what differs is a parameter_mismatch on all of them, and the group
// stays usable. Every call may raise what run_collective() raises.
#pragma once

#include <vector>

#include "staged.h"

namespace cam {

// A tensor that is reduced, or one of several that are reduced together as if they were one. in may be out. out is null
// on ranks that receive nothing.
struct Span {
    const void* in;
    void* out;
    int64_t elements;
};

// flat: every rank reduces everything. direct: each reduces its share of a piece and the others fetch it from there.
void all_reduce(Endpoint& endpoint, const std::vector<Span>& spans, const ReduceSpec& spec, const Tuning& tuning,
                double timeout_s);
void reduce(Endpoint& endpoint, const std::vector<Span>& spans, const ReduceSpec& spec, int root, const Tuning& tuning,
            double timeout_s);
// parts[r]: what this rank contributes to rank r's result, of elements[r] elements. out may be parts[rank].
void reduce_scatter(Endpoint& endpoint, const std::vector<const void*>& parts, const std::vector<int64_t>& elements,
                    void* out, const ReduceSpec& spec, const Tuning& tuning, double timeout_s);

// bytes[r]: what rank r contributes; outs[r]: where it goes here. outs[rank] may be in.
void all_gather(Endpoint& endpoint, const void* in, const std::vector<int64_t>& bytes, const std::vector<void*>& outs,
                const Tuning& tuning, double timeout_s);
// outs: only looked at on the root.
void gather(Endpoint& endpoint, const void* in, const std::vector<int64_t>& bytes, const std::vector<void*>& outs,
            int root, const Tuning& tuning, double timeout_s);
void broadcast(Endpoint& endpoint, void* data, int64_t bytes, int root, const Tuning& tuning, double timeout_s);

// in_bytes[r] of ins[r] go to rank r, out_bytes[r] come from it to outs[r]. Ranks must agree pairwise.
void all_to_all(Endpoint& endpoint, const std::vector<const void*>& ins, const std::vector<int64_t>& in_bytes,
                const std::vector<void*>& outs, const std::vector<int64_t>& out_bytes, const Tuning& tuning,
                double timeout_s);
// ins and in_bytes are empty on ranks other than the root.
void scatter(Endpoint& endpoint, const std::vector<const void*>& ins, const std::vector<int64_t>& in_bytes, void* out,
             int64_t out_bytes, int root, const Tuning& tuning, double timeout_s);

}  // namespace cam
