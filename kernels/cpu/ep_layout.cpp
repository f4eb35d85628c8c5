#include "ep_layout.h"

#include <string>

#include "errors.h"

namespace cam {

ExpertMap::ExpertMap(int64_t total, int world) : total_(total), first_(world + 1, 0), owner_(total) {
    for (int rank = 0; rank < world; ++rank) {
        first_[rank + 1] = first_[rank] + total / world + (rank < total % world ? 1 : 0);
        for (int64_t expert = first_[rank]; expert < first_[rank + 1]; ++expert) owner_[expert] = rank;
    }
}

SendCounts count_selections(const Selection& selection, const ExpertMap& experts, int world, Layout layout) {
    SendCounts counts{std::vector<int64_t>(experts.total(), 0), std::vector<int64_t>(world, 0)};
    std::vector<int64_t> last_token(world, -1);
    for (int64_t token = 0; token < selection.tokens; ++token) {
        for (int64_t k = 0; k < selection.topk; ++k) {
            const int64_t expert = selection.at(token, k);
            if (expert == -1) continue;
            if (expert < -1 || expert >= experts.total()) {
                bad_input("topk_idx[" + std::to_string(token) + ", " + std::to_string(k) + "] is " +
                          std::to_string(expert) + "; allowed are -1 (not selected) and 0.." +
                          std::to_string(experts.total() - 1) + " (knob: num_experts)");
            }
            ++counts.per_expert[expert];
            if (layout == Layout::expert) continue;
            const int owner = experts.owner(expert);
            if (last_token[owner] == token) continue;
            last_token[owner] = token;
            ++counts.per_rank[owner];
        }
    }
    return counts;
}

Placement place(const std::vector<std::vector<int64_t>>& received, int64_t local_experts, Layout layout,
                int64_t alignment) {
    const size_t world = received.size();
    Placement result;
    result.expert_counts.assign(local_experts, 0);
    result.starts.resize(world);
    if (layout == Layout::rank) {
        for (size_t source = 0; source < world; ++source) {
            result.starts[source] = {result.rows};
            result.rows += received[source][0];
            result.source_counts.push_back(received[source][0]);
            for (int64_t expert = 0; expert < local_experts; ++expert) {
                result.expert_counts[expert] += received[source][1 + expert];
            }
        }
        return result;
    }
    for (auto& starts : result.starts) starts.resize(local_experts);
    result.source_counts.resize(local_experts * world);
    for (int64_t expert = 0; expert < local_experts; ++expert) {
        const int64_t first = result.rows;
        for (size_t source = 0; source < world; ++source) {
            result.starts[source][expert] = result.rows;
            result.source_counts[expert * world + source] = received[source][expert];
            result.rows += received[source][expert];
        }
        result.expert_counts[expert] = result.rows - first;
        result.rows = first + (result.expert_counts[expert] + alignment - 1) / alignment * alignment;
    }
    return result;
}

void assign_routes(const Selection& selection, const ExpertMap& experts, Layout layout,
                   const std::vector<std::vector<int64_t>>& granted, int64_t* route) {
    auto next = granted;
    const size_t world = granted.size();
    std::vector<int64_t> last_token(world, -1), current(world, -1);
    for (int64_t token = 0; token < selection.tokens; ++token) {
        for (int64_t k = 0; k < selection.topk; ++k, ++route) {
            const int64_t expert = selection.at(token, k);
            if (expert < 0) {
                *route = -1;
                continue;
            }
            const int owner = experts.owner(expert);
            if (layout == Layout::expert) {
                *route = pack_route(owner, next[owner][expert - experts.begin(owner)]++);
                continue;
            }
            if (last_token[owner] != token) {
                last_token[owner] = token;
                current[owner] = next[owner][0]++;
            }
            *route = pack_route(owner, current[owner]);
        }
    }
}

}  // namespace cam
