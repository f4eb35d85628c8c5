// Route: each rank tells the sources of its rows where those rows are. See ep.h.
#include "ep_rows.h"

namespace cam {

std::shared_ptr<Block> route(Endpoint& endpoint, const RouteCall& call) {
    const int world = endpoint.world(), me = endpoint.rank();
    for (int64_t row = 0; row < call.rows; ++row) {
        const int32_t source = call.source[row * 3];
        if (source >= 0 && source < world) continue;
        bad_input("row " + std::to_string(row) + " names source rank " + std::to_string(source) + " in a group of " +
                  std::to_string(world));
    }
    struct Head {
        MemoryStatus memory;
        uint64_t offset;
        int64_t tokens, topk;
    };
    struct Verdict {
        int64_t bad_row = -1, source = 0, token = 0, k = 0, tokens = 0, topk = 0;
    };
    return run_collective(endpoint, Operation::route, call.timeout_s, [&](Collective& collective) {
        std::shared_ptr<Block> table;
        const MemoryStatus memory =
            try_allocate([&] { table = endpoint.arena().allocate(call.tokens * call.topk * sizeof(int64_t)); });
        if (!memory.failed) {
            collective.lend(table);
            std::fill_n(reinterpret_cast<int64_t*>(table->data()), call.tokens * call.topk, int64_t{-1});
        }
        std::vector<Head> heads(world);
        std::vector<int64_t> nothing;
        const auto no_table = [&](int) -> auto& { return nothing; };
        MemoryVerdict memory_verdict;
        exchange_tables<Head>(
            collective, "grants", 0,
            [&](int) { return Head{memory, memory.failed ? 0 : table->offset(), call.tokens, call.topk}; },
            [&](int peer, const Head& head) {
                memory_verdict.see(peer, head.memory);
                heads[peer] = head;
            },
            [&] { memory_verdict.settle(collective); }, no_table, no_table);
        Verdict verdict;
        for (int64_t row = 0; row < call.rows; ++row) {
            const int32_t* source = call.source + row * 3;
            const Head& head = heads[source[0]];
            if (source[1] < 0 || source[1] >= head.tokens || source[2] < 0 || source[2] >= head.topk) {
                verdict = {row, source[0], source[1], source[2], head.tokens, head.topk};
                break;
            }
            at<int64_t>(endpoint.peer_base(source[0]), head.offset)[source[1] * head.topk + source[2]] =
                pack_route(me, row);
        }
        Verdict worst;
        int worst_rank = -1;
        exchange_tables<Verdict>(
            collective, "rows", 0, [&](int) { return verdict; },
            [&](int peer, const Verdict& theirs) {
                if (theirs.bad_row < 0 || worst_rank >= 0) return;
                worst = theirs;
                worst_rank = peer;
            },
            [&] {
                if (worst_rank < 0) return;
                Error error(Failure::bad_input,
                            "row " + std::to_string(worst.bad_row) + " of rank " + std::to_string(worst_rank) +
                                " names token " + std::to_string(worst.token) + ", k " + std::to_string(worst.k) +
                                " of rank " + std::to_string(worst.source) + ", which has " +
                                std::to_string(worst.tokens) + " tokens and top-k " + std::to_string(worst.topk));
                error.ranks = {worst_rank};
                collective.fail_agreed(error);
            },
            no_table, no_table);
        return table;
    });
}

}  // namespace cam
