// What collectives are built from: tables exchanged in rounds, and lack of memory that all ranks agree on.
#pragma once

#include <algorithm>
#include <utility>

#include "endpoint.h"

namespace cam {

// Whether this rank could get the memory it needs. Part of its message, so that all ranks fail alike.
struct MemoryStatus {
    int64_t failed = 0, requested = 0, allocated = 0, limit = 0;
};

// Runs `allocate` and reports lack of memory instead of throwing, because this rank must still answer its peers.
template <class Allocate>
MemoryStatus try_allocate(Allocate&& allocate) {
    try {
        allocate();
        return {};
    } catch (const Error& error) {
        if (error.failure != Failure::out_of_memory) throw;
        return {1, error.requested, error.allocated, error.limit};
    }
}

// Raises on every rank alike if any rank has no memory.
class MemoryVerdict {
public:
    void see(int peer, const MemoryStatus& status) {
        if (status.failed && rank_ < 0) {
            rank_ = peer;
            status_ = status;
        }
    }
    void settle(Collective& call) const {
        if (rank_ < 0) return;
        Error error(Failure::out_of_memory, "a rank's window is full");
        error.ranks = {rank_};
        error.requested = status_.requested;
        error.allocated = status_.allocated;
        error.limit = status_.limit;
        call.fail_agreed(error);
    }

private:
    int rank_ = -1;
    MemoryStatus status_;
};

// A round in which each rank sends every peer a head and a table of int64. Tables that exceed a mailbox take more
// rounds; `longest` is the longest table of any pair, which every rank can compute once the heads agree.
template <class Head, class MakeHead, class SeeHead, class Settle, class Outgoing, class Incoming>
void exchange_tables(Collective& call, const char* phase, int64_t longest, MakeHead&& make_head, SeeHead&& see_head,
                     Settle&& settle, Outgoing&& outgoing, Incoming&& incoming) {
    const int world = call.endpoint().world();
    constexpr int64_t kPiece = (kSlotCapacity - sizeof(Head)) / sizeof(int64_t);
    for (int64_t begin = 0; begin == 0 || begin < longest; begin += kPiece) {
        const auto piece = [&](auto& table) {
            const auto size = static_cast<int64_t>(table.size());
            const int64_t first = std::min(begin, size);
            return std::pair(table.data() + first, static_cast<size_t>(std::min(kPiece, size - first)));
        };
        call.begin(phase);
        for (int peer = 0; peer < world; ++peer) {
            Writer message = call.outgoing(peer);
            message.put<Head>(make_head(peer));
            const auto [values, count] = piece(outgoing(peer));
            message.put_array(values, count);
            call.set_length(peer, message);
        }
        call.finish();
        for (int peer = 0; peer < world; ++peer) see_head(peer, call.incoming(peer).template get<Head>());
        settle();
        for (int peer = 0; peer < world; ++peer) {
            Reader message = call.incoming(peer);
            message.template get<Head>();
            const auto [values, count] = piece(incoming(peer));
            message.get_array(values, count);
        }
    }
}

}  // namespace cam
