// The rounds of one collective: messages into the peers' mailboxes, and the wait for theirs. See endpoint.h.
#include <algorithm>

#include "endpoint.h"
#include "futex.h"

namespace cam {
namespace {

// How long a sleeping waiter goes without looking after its peers. Bounds how late a death is noticed.
constexpr std::chrono::milliseconds kSlice{50};

}  // namespace

const char* operation_name(Operation operation) {
    switch (operation) {
        case Operation::barrier:
            return "barrier";
        case Operation::exchange:
            return "exchange";
        case Operation::dispatch:
            return "dispatch";
        case Operation::combine:
            return "combine";
        case Operation::scatter:
            return "scatter";
        case Operation::route:
            return "route";
        case Operation::all_reduce:
            return "all_reduce";
        case Operation::reduce:
            return "reduce";
        case Operation::reduce_scatter:
            return "reduce_scatter";
        case Operation::all_gather:
            return "all_gather";
        case Operation::broadcast:
            return "broadcast";
        case Operation::gather:
            return "gather";
        case Operation::scatter_parts:
            return "scatter";
        case Operation::all_to_all:
            return "all_to_all";
    }
    return "unknown operation";
}

const char* Signature::name(int field) {
    static constexpr const char* names[kFields] = {"layout",
                                                   "dtype",
                                                   "hidden",
                                                   "topk",
                                                   "num_experts",
                                                   "quant",
                                                   "expert_alignment",
                                                   "max_tokens",
                                                   "scale bytes per row",
                                                   "topk_weights given",
                                                   "row weights given",
                                                   "rows scaled by weights"};
    return names[field];
}

std::string Signature::show(int field, int64_t value) {
    static constexpr const char* layouts[] = {"expert", "rank"};
    static constexpr const char* dtypes[] = {"bfloat16", "float16", "float32", "opaque"};
    static constexpr const char* quants[] = {"none", "int8", "fp8"};
    switch (field) {
        case layout:
            return layouts[value];
        case dtype:
            return dtypes[value];
        case quant:
            return quants[value];
        case max_tokens:
            return value < 0 ? "none" : std::to_string(value);
        case weights:
        case row_values:
        case scaled:
            return value ? "yes" : "no";
        default:
            return std::to_string(value);
    }
}

Collective::Collective(Endpoint& endpoint, Operation operation, double timeout_s)
    : endpoint_(endpoint), operation_(operation), name_(operation_name(operation)), started_(Clock::now()) {
    // A century is as good as for ever, and does not overflow.
    const double bounded = std::clamp(timeout_s, 0.0, 3e9);
    deadline_ = started_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
    endpoint_.check_usable();
}

void Collective::begin(const char* phase) {
    phase_ = phase;
    ++phase_index_;
    ++endpoint_.round_;
}

Writer Collective::outgoing(int peer) {
    Slot& slot = endpoint_.segments_[peer]->slot(endpoint_.rank_, endpoint_.round_);
    slot.length = 0;
    return Writer({slot.payload, kSlotCapacity});
}

void Collective::set_length(int peer, const Writer& message) {
    endpoint_.segments_[peer]->slot(endpoint_.rank_, endpoint_.round_).length = static_cast<uint32_t>(message.used());
}

Reader Collective::incoming(int peer) const {
    const Slot& slot = endpoint_.segments_[endpoint_.rank_]->slot(peer, endpoint_.round_);
    return Reader({slot.payload, std::min<size_t>(slot.length, kSlotCapacity)});
}

void Collective::finish() {
    const uint32_t tag = static_cast<uint32_t>(operation_) << 8 | phase_index_;
    published_ = true;
    for (int peer = 0; peer < endpoint_.world_; ++peer) {
        Slot& slot = endpoint_.segments_[peer]->slot(endpoint_.rank_, endpoint_.round_);
        slot.tag = tag;
        slot.round.store(endpoint_.round_, std::memory_order_release);
    }
    endpoint_.ring_all();
    wait_all();
    for (int peer = 0; peer < endpoint_.world_; ++peer) {
        const uint32_t theirs = endpoint_.segments_[endpoint_.rank_]->slot(peer, endpoint_.round_).tag;
        if (theirs == tag) continue;
        Error error(Failure::parameter_mismatch, "ranks are in different calls");
        error.field = "operation";
        error.mine = operation_name(operation_);
        error.theirs = operation_name(static_cast<Operation>(theirs >> 8));
        error.ranks = {peer};
        // In a first round everybody sees this, and everybody has taken part in exactly one round of its call.
        if (phase_index_ == 1 && (theirs & 0xff) == 1) fail_agreed(error);
        throw error;
    }
}

void Collective::synchronise(const char* phase) {
    begin(phase);
    for (int peer = 0; peer < endpoint_.world_; ++peer) {
        endpoint_.segments_[peer]->slot(endpoint_.rank_, endpoint_.round_).length = 0;
    }
    finish();
}

void Collective::wait_all() {
    Endpoint& e = endpoint_;
    const auto since = Clock::now();
    std::vector<int> pending;
    const auto look = [&] { std::erase_if(pending, [&](int peer) { return e.arrived(peer); }); };
    for (int peer = 0; peer < e.world_; ++peer) {
        if (!e.arrived(peer)) pending.push_back(peer);
    }
    const auto spin_until = since + std::chrono::microseconds(e.options_.spin_us);
    for (int turn = 1; !pending.empty(); ++turn) {
        cpu_relax();
        look();
        if (turn % 32 == 0 && Clock::now() > spin_until) break;  // the clock costs more than a look
    }
    auto next_watch = Clock::now() + kSlice;
    auto& missing = e.segments_[e.rank_]->control().missing;
    while (!pending.empty()) {
        const auto now = Clock::now();
        if (now >= next_watch) {
            e.watch(pending, since);
            if (e.options_.check_interrupt) e.options_.check_interrupt();
            next_watch = now + kSlice;
        }
        if (now >= deadline_) {
            look();
            if (!pending.empty()) raise_timeout(pending);
        }
        const auto count = static_cast<uint32_t>(pending.size());
        missing.store(count, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        look();
        if (pending.size() == count) {
            futex_wait(missing, count,
                       std::max<Clock::duration>(std::min(next_watch, deadline_) - now, Clock::duration(1)));
            look();
            // Woken, but not by the last message: a peer may have left or given up.
            if (!pending.empty() && missing.load(std::memory_order_relaxed) == 0) e.watch(pending, since);
        }
        missing.store(0, std::memory_order_relaxed);
    }
    wait_s_ += seconds(Clock::now() - since);
}

void Collective::raise_timeout(const std::vector<int>& pending) {
    // A death explains a silence better than lateness does.
    endpoint_.watch(pending, started_);
    std::string who;
    for (int peer : pending) who += (who.empty() ? "" : ", ") + std::to_string(peer);
    Error error(Failure::wait_timeout, "no message from rank " + who);
    error.ranks.assign(pending.begin(), pending.end());
    error.waited_s = seconds(Clock::now() - started_);
    throw error;
}

void Collective::compare_signature(const Signature& mine, int peer, const Signature& theirs) {
    for (int field = 0; field < Signature::kFields; ++field) {
        if (mine.value[field] == theirs.value[field]) continue;
        Error error(Failure::parameter_mismatch, "ranks disagree");
        error.field = Signature::name(field);
        error.mine = Signature::show(field, mine.value[field]);
        error.theirs = Signature::show(field, theirs.value[field]);
        error.ranks = {peer};
        fail_agreed(error);
    }
}

void Collective::fail_agreed(Error error) {
    agreed_ = true;
    throw error;
}

void Collective::broke(const Error& error) {
    for (auto& block : lent_) block->quarantine();
    endpoint_.abort_group(error);
}

void Collective::settle() {
    std::lock_guard lock(endpoint_.stats_mutex_);
    OperationStats& stats = endpoint_.stats_[operation_name(operation_)];
    ++stats.calls;
    stats.bytes += bytes_;
    stats.wait_s += wait_s_;
    stats.total_s += seconds(Clock::now() - started_);
}

}  // namespace cam
