// The two collectives that move nothing but messages: barrier and exchange. See endpoint.h.
#include <algorithm>

#include "endpoint.h"

namespace cam {

void Endpoint::barrier(double timeout_s) {
    run_collective(*this, Operation::barrier, timeout_s, [](Collective& call) {
        call.synchronise("arrival");
        return 0;
    });
}

std::vector<std::string> Endpoint::exchange(const std::vector<std::string_view>& payloads, const std::string& name,
                                            double timeout_s) {
    if (payloads.size() != static_cast<size_t>(world_)) {
        bad_input("exchange takes one payload per rank (" + std::to_string(world_) + "), got " +
                  std::to_string(payloads.size()));
    }
    struct Head {
        char name[48] = {};
        uint64_t longest = 0;  // payload that this rank sends to anybody: how many rounds it takes
        uint64_t piece = 0;    // bytes of this message
    };
    constexpr size_t kPiece = kSlotCapacity - sizeof(Head);
    return run_collective(*this, Operation::exchange, timeout_s, [&](Collective& call) {
        call.set_name(name);
        Head mine;
        copy_text(mine.name, sizeof mine.name, name);
        for (const auto& payload : payloads) mine.longest = std::max<uint64_t>(mine.longest, payload.size());
        std::vector<std::string> received(world_);
        uint64_t longest_anywhere = mine.longest;
        for (size_t offset = 0; offset == 0 || offset < longest_anywhere; offset += kPiece) {
            call.begin("payloads");
            for (int peer = 0; peer < world_; ++peer) {
                const auto& payload = payloads[peer];
                const auto piece = payload.substr(std::min(offset, payload.size()), kPiece);
                mine.piece = piece.size();
                Writer message = call.outgoing(peer);
                message.put(mine);
                message.put_array(piece.data(), piece.size());
                call.set_length(peer, message);
            }
            call.finish();
            for (int peer = 0; peer < world_; ++peer) {
                Reader message = call.incoming(peer);
                const Head head = message.get<Head>();
                if (std::strncmp(head.name, mine.name, sizeof head.name) != 0) {
                    Error error(Failure::parameter_mismatch, "ranks are in different exchanges");
                    error.field = "operation";
                    error.mine = mine.name;
                    error.theirs = std::string(head.name, strnlen(head.name, sizeof head.name));
                    error.ranks = {peer};
                    call.fail_agreed(error);
                }
                longest_anywhere = std::max(longest_anywhere, head.longest);
                const size_t had = received[peer].size();
                received[peer].resize(had + std::min<uint64_t>(head.piece, kPiece));
                message.get_array(received[peer].data() + had, received[peer].size() - had);
            }
        }
        return received;
    });
}

}  // namespace cam
