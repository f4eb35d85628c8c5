// Moves of bytes. See collectives.h.
#include "collectives.h"

namespace cam {
namespace {

int64_t sum(const std::vector<int64_t>& values) {
    int64_t total = 0;
    for (const int64_t value : values) total += value;
    return total;
}

int64_t most(const std::vector<int64_t>& values) {
    int64_t result = 0;
    for (const int64_t value : values) result = std::max(result, value);
    return result;
}

void check_sizes(Endpoint& endpoint, size_t pointers, const std::vector<int64_t>& bytes, const char* what) {
    if (pointers != static_cast<size_t>(endpoint.world()) || bytes.size() != pointers) {
        bad_input(std::string(what) + " takes one tensor per rank (" + std::to_string(endpoint.world()) + "), got " +
                  std::to_string(pointers));
    }
    for (const int64_t size : bytes) {
        if (size < 0) bad_input(std::string(what) + ": a size is " + std::to_string(size));
    }
}

Facts facts_of(const Tuning& tuning) {
    Facts facts;
    facts.value[Facts::algorithm] = static_cast<int64_t>(tuning.algorithm);
    facts.value[Facts::piece] = static_cast<int64_t>(tuning.piece);
    return facts;
}

// Each rank shows everybody the same bytes[rank] bytes; a rank reads those of the peers for which outs is not null.
void show(Endpoint& endpoint, Operation operation, const void* in, const std::vector<int64_t>& bytes,
          const std::vector<void*>& outs, int root, const Tuning& tuning, double timeout_s) {
    const int world = endpoint.world(), me = endpoint.rank();
    Facts facts = facts_of(tuning);
    facts.value[Facts::count] = sum(bytes);
    facts.value[Facts::root] = root + 1;
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (const int64_t size : bytes) hash = (hash ^ static_cast<uint64_t>(size)) * 0x100000001b3;
    facts.value[Facts::sizes] = static_cast<int64_t>(hash);
    const int64_t longest = most(bytes);
    const auto step = static_cast<int64_t>(piece_bytes(tuning, longest, world));
    int64_t incoming = 0;
    for (int peer = 0; peer < world; ++peer) incoming += outs[peer] ? bytes[peer] : 0;
    const bool nontemporal = static_cast<size_t>(incoming) > endpoint.nontemporal_threshold();
    run_collective(endpoint, operation, timeout_s, [&](Collective& call) {
        Staged staged(call, facts, step);
        int64_t begin = 0;
        do {
            const auto within = [&](int rank) { return std::clamp<int64_t>(bytes[rank] - begin, 0, step); };
            std::byte* half = staged.begin("pieces");
            const auto* mine = static_cast<const std::byte*>(in) + begin;
            if (half) copy_bytes(endpoint, half, mine, within(me), false);
            staged.finish();
            for (int i = 0; i < world; ++i) {
                const int peer = (me + i) % world;  // each begins elsewhere
                if (!outs[peer] || within(peer) == 0) continue;
                auto* target = static_cast<std::byte*>(outs[peer]) + begin;
                copy_bytes(endpoint, target, peer == me ? mine : staged.theirs(peer), within(peer), nontemporal);
            }
            begin += step;
        } while (begin < longest);
        endpoint.rows().fence();
        call.add_bytes(incoming);
        return 0;
    });
}

// What each rank says about its sizes: to each peer, then from each peer. Every rank checks every pair.
int64_t compare_pairs(Collective& call, const Staged& staged) {
    const int world = call.endpoint().world(), me = call.endpoint().rank();
    int64_t longest = 0;
    for (int from = 0; from < world; ++from) {
        for (int to = 0; to < world; ++to) {
            const int64_t sent = staged.table(from)[to], expected = staged.table(to)[world + from];
            longest = std::max(longest, sent);
            if (sent == expected) continue;
            Error error(Failure::parameter_mismatch, "rank " + std::to_string(from) + " sends rank " +
                                                         std::to_string(to) + " " + std::to_string(sent) +
                                                         " bytes, which expects " + std::to_string(expected));
            error.field = "bytes from rank " + std::to_string(from) + " to rank " + std::to_string(to);
            error.mine = std::to_string(to == me ? expected : sent);
            error.theirs = std::to_string(to == me ? sent : expected);
            error.ranks = {to == me ? from : to};
            call.fail_agreed(error);
        }
    }
    return longest;
}

// Each rank has bytes of its own for every other rank.
void deliver(Endpoint& endpoint, Operation operation, const std::vector<const void*>& ins,
             const std::vector<int64_t>& in_bytes, const std::vector<void*>& outs,
             const std::vector<int64_t>& out_bytes, int root, const Tuning& tuning, double timeout_s) {
    const int world = endpoint.world(), me = endpoint.rank();
    Facts facts = facts_of(tuning);
    facts.value[Facts::root] = root + 1;
    std::vector<int64_t> table = in_bytes;
    table.insert(table.end(), out_bytes.begin(), out_bytes.end());
    // Ranks may send different amounts, so they cannot all know the longest part before the first round, whose pieces
    // must nevertheless lie where the peers look for them.
    const auto whole = static_cast<int64_t>(piece_bytes(tuning, SIZE_MAX / 2, world));
    const int64_t step = whole / world;
    const bool nontemporal = static_cast<size_t>(sum(out_bytes)) > endpoint.nontemporal_threshold();
    run_collective(endpoint, operation, timeout_s, [&](Collective& call) {
        Staged staged(call, facts, whole, table);
        int64_t begin = 0, longest = 0;
        do {
            const auto within = [&](int64_t bytes) { return std::clamp<int64_t>(bytes - begin, 0, step); };
            std::byte* half = staged.begin("pieces");
            for (int peer = 0; half && peer < world; ++peer) {
                if (peer == me || within(in_bytes[peer]) == 0) continue;
                const auto* from = static_cast<const std::byte*>(ins[peer]) + begin;
                copy_bytes(endpoint, half + peer * step, from, within(in_bytes[peer]), false);
            }
            staged.finish();
            if (begin == 0) longest = compare_pairs(call, staged);
            for (int i = 0; i < world; ++i) {
                const int peer = (me + i) % world;  // each begins elsewhere
                if (within(out_bytes[peer]) == 0) continue;
                const auto* from =
                    peer == me ? static_cast<const std::byte*>(ins[me]) + begin : staged.theirs(peer) + me * step;
                copy_bytes(endpoint, static_cast<std::byte*>(outs[peer]) + begin, from, within(out_bytes[peer]),
                           nontemporal);
            }
            begin += step;
        } while (begin < longest);
        endpoint.rows().fence();
        call.add_bytes(sum(out_bytes));
        return 0;
    });
}

void check_root(Endpoint& endpoint, int root) {
    if (root < 0 || root >= endpoint.world()) bad_input("root " + std::to_string(root) + " is not a rank");
}

}  // namespace

void all_gather(Endpoint& endpoint, const void* in, const std::vector<int64_t>& bytes, const std::vector<void*>& outs,
                const Tuning& tuning, double timeout_s) {
    check_sizes(endpoint, outs.size(), bytes, "all_gather");
    show(endpoint, Operation::all_gather, in, bytes, outs, -1, tuning, timeout_s);
}

void gather(Endpoint& endpoint, const void* in, const std::vector<int64_t>& bytes, const std::vector<void*>& outs,
            int root, const Tuning& tuning, double timeout_s) {
    check_root(endpoint, root);
    const bool receives = root == endpoint.rank();
    check_sizes(endpoint, receives ? outs.size() : bytes.size(), bytes, "gather");
    const std::vector<void*> nothing(endpoint.world(), nullptr);
    show(endpoint, Operation::gather, in, bytes, receives ? outs : nothing, root, tuning, timeout_s);
}

void broadcast(Endpoint& endpoint, void* data, int64_t bytes, int root, const Tuning& tuning, double timeout_s) {
    check_root(endpoint, root);
    std::vector<int64_t> sizes(endpoint.world(), 0);
    std::vector<void*> outs(endpoint.world(), nullptr);
    sizes[root] = bytes;
    if (root != endpoint.rank()) outs[root] = data;
    show(endpoint, Operation::broadcast, data, sizes, outs, root, tuning, timeout_s);
}

void all_to_all(Endpoint& endpoint, const std::vector<const void*>& ins, const std::vector<int64_t>& in_bytes,
                const std::vector<void*>& outs, const std::vector<int64_t>& out_bytes, const Tuning& tuning,
                double timeout_s) {
    check_sizes(endpoint, ins.size(), in_bytes, "all_to_all");
    check_sizes(endpoint, outs.size(), out_bytes, "all_to_all");
    deliver(endpoint, Operation::all_to_all, ins, in_bytes, outs, out_bytes, -1, tuning, timeout_s);
}

void scatter(Endpoint& endpoint, const std::vector<const void*>& ins, const std::vector<int64_t>& in_bytes, void* out,
             int64_t out_bytes, int root, const Tuning& tuning, double timeout_s) {
    check_root(endpoint, root);
    std::vector<int64_t> sent(endpoint.world(), 0), received(endpoint.world(), 0);
    std::vector<const void*> from(endpoint.world(), nullptr);
    std::vector<void*> outs(endpoint.world(), nullptr);
    if (root == endpoint.rank()) {
        check_sizes(endpoint, ins.size(), in_bytes, "scatter");
        sent = in_bytes;
        from = ins;
    }
    received[root] = out_bytes;
    outs[root] = out;
    deliver(endpoint, Operation::scatter_parts, from, sent, outs, received, root, tuning, timeout_s);
}

}  // namespace cam
