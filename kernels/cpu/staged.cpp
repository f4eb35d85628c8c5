#include "staged.h"

#include <bit>

namespace cam {
namespace {

constexpr size_t kSmallestHalf = 64 * 1024;
constexpr size_t kPieceWithCores = 512 * 1024, kLargestPiece = 8 * 1024 * 1024;
constexpr int64_t kCopyGrain = 512 * 1024;

}  // namespace

const char* Facts::name(int field) {
    static constexpr const char* names[kFields] = {
        "dtype",     "reduction", "factor", "root", "size", "sizes of the parts", "number of tensors",
        "algorithm", "piece"};
    return names[field];
}

std::string Facts::show(int field, int64_t value) {
    switch (field) {
        case element:
            return element_name(static_cast<Element>(value));
        case reduction:
            return reduction_name(static_cast<Reduction>(value));
        case factor:
            return std::to_string(std::bit_cast<double>(value));
        case root:
            return value == 0 ? "none" : std::to_string(value - 1);
        case algorithm:
            return value == 0 ? "auto" : value == 1 ? "flat" : "direct";
        case sizes:
            return "another list (digest " + std::to_string(static_cast<uint64_t>(value) % 10000) + ")";
        default:
            return std::to_string(value);
    }
}

Tuning::Algorithm algorithm_named(const std::string& name) {
    if (name == "auto") return Tuning::Algorithm::automatic;
    if (name == "flat") return Tuning::Algorithm::flat;
    if (name == "direct") return Tuning::Algorithm::direct;
    bad_input("collective algorithm '" + name + "' is not one of: auto, flat, direct");
}

size_t piece_bytes(const Tuning& tuning, size_t bytes, int world) {
    const size_t chosen = tuning.piece ? std::min(tuning.piece, kLargestPiece) : kPieceWithCores;
    // At least a cache line for each rank, because pieces are split over ranks.
    const size_t least = kCacheLine * 8 * static_cast<size_t>(world);
    const size_t piece = std::max(std::min(chosen, bytes), least);
    return (piece + least - 1) / least * least;
}

Staged::Staged(Collective& call, const Facts& facts, size_t half_bytes, std::vector<int64_t> table)
    : call_(call), endpoint_(call.endpoint()), table_(std::move(table)) {
    head_.facts = facts;
    head_.numbers = static_cast<int64_t>(table_.size());
    heads_.resize(endpoint_.world());
    tables_.resize(endpoint_.world());
    if (sizeof(Head) + table_.size() * sizeof(int64_t) > kSlotCapacity) {
        bad_input("a list of " + std::to_string(table_.size()) + " sizes does not fit a message");
    }
    prepare(half_bytes);
}

void Staged::prepare(size_t half_bytes) {
    Staging& staging = endpoint_.staging();
    if (staging.half < half_bytes) {
        const size_t half = std::bit_ceil(std::max(half_bytes, kSmallestHalf));
        head_.memory = try_allocate([&] {
            auto block = endpoint_.arena().allocate(half * 2);
            staging.retired = std::move(staging.block);
            staging.block = std::move(block);
            staging.half = half;
        });
    }
    if (head_.memory.failed) return;
    head_.offset = staging.block->offset();
    head_.half = staging.half;
}

std::byte* Staged::begin(const char* phase) {
    call_.begin(phase);
    if (head_.memory.failed) return nullptr;
    return endpoint_.staging().block->data() + endpoint_.round() % 2 * head_.half;
}

void Staged::finish() {
    const int world = endpoint_.world();
    for (int peer = 0; peer < world; ++peer) {
        Writer message = call_.outgoing(peer);
        if (!opened_) {
            message.put(head_);
            message.put_array(table_.data(), table_.size());
        }
        call_.set_length(peer, message);
    }
    call_.finish();
    if (opened_) return;
    opened_ = true;
    // Everybody is in this round, so nobody reads what was staged before it.
    endpoint_.staging().retired.reset();
    MemoryVerdict verdict;
    for (int peer = 0; peer < world; ++peer) {
        Reader message = call_.incoming(peer);
        heads_[peer] = message.get<Head>();
        compare(peer, heads_[peer].facts);
        verdict.see(peer, heads_[peer].memory);
    }
    verdict.settle(call_);
    for (int peer = 0; peer < world; ++peer) {
        const Head& head = heads_[peer];
        if (head.offset > endpoint_.peer_bytes(peer) || 2 * head.half > endpoint_.peer_bytes(peer) - head.offset) {
            bad_input("rank " + std::to_string(peer) + " announced staging memory outside its window");
        }
        Reader message = call_.incoming(peer);
        message.get<Head>();
        tables_[peer].resize(std::min<size_t>(head.numbers, kSlotCapacity / sizeof(int64_t)));
        message.get_array(tables_[peer].data(), tables_[peer].size());
    }
}

const std::byte* Staged::theirs(int peer) const {
    return endpoint_.peer_base(peer) + heads_[peer].offset + endpoint_.round() % 2 * heads_[peer].half;
}

void Staged::compare(int peer, const Facts& theirs) {
    const Facts& mine = head_.facts;
    for (int field = 0; field < Facts::kFields; ++field) {
        if (mine.value[field] == theirs.value[field]) continue;
        Error error(Failure::parameter_mismatch, "ranks disagree");
        error.field = Facts::name(field);
        error.mine = Facts::show(field, mine.value[field]);
        error.theirs = Facts::show(field, theirs.value[field]);
        error.ranks = {peer};
        call_.fail_agreed(error);
    }
}

void copy_bytes(Endpoint& endpoint, void* target, const void* source, size_t bytes, bool nontemporal) {
    if (bytes == 0 || target == source) return;
    auto* to = static_cast<std::byte*>(target);
    const auto* from = static_cast<const std::byte*>(source);
    if (endpoint.pool().threads() == 1 || bytes < kCopyGrain) {
        endpoint.rows().copy(to, from, bytes, nontemporal);
        return;
    }
    endpoint.pool().parallel_for(static_cast<int64_t>(bytes), kCopyGrain, [&](int64_t begin, int64_t end) {
        endpoint.rows().copy(to + begin, from + begin, end - begin, nontemporal);
        endpoint.rows().fence();
    });
}

}  // namespace cam
