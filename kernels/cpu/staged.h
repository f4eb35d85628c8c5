// Rounds with a payload: what a rank stages in its own window before a round, its peers read after it.
//
// The staging memory has two halves, used alternately. What is written before round r lies in half r % 2 and is read
// between rounds r and r + 1. It is overwritten before round r + 2 at the earliest, and then every peer has sent its
// message of round r + 1, after it had finished reading. So a collective of one round needs no second one to say that
// the memory is free again, and consecutive rounds overlap. As with the mailbox slots, this holds across calls.
//
// Pieces are small enough to stay in the caches, so a large tensor is read once and written once.
#pragma once

#include "rounds.h"

namespace cam {

// What all ranks must have called alike. Fields that do not apply are 0.
struct Facts {
    enum Field { element, reduction, factor, root, count, sizes, parts, algorithm, piece };
    static constexpr int kFields = 9;
    int64_t value[kFields] = {};
    static const char* name(int field);
    static std::string show(int field, int64_t value);
};

// How a collective moves its data. 0 means: chosen by size and number of ranks.
struct Tuning {
    enum class Algorithm : int64_t { automatic, flat, direct };
    Algorithm algorithm = Algorithm::automatic;
    size_t piece = 0;  // bytes that one rank stages for one round
};
Tuning::Algorithm algorithm_named(const std::string& name);

// The piece for a call that stages `bytes` in all: rounded to a cache line and the same on all ranks.
size_t piece_bytes(const Tuning& tuning, size_t bytes, int world);

// The rounds of one call.
class Staged {
public:
    // half_bytes: the most that this rank stages before one round. table: int64 numbers that every peer gets to see.
    Staged(Collective& call, const Facts& facts, size_t half_bytes, std::vector<int64_t> table = {});

    // Starts a round. Stage into the memory that it returns; null in a first round for which there is no memory, which
    // finish() then tells every rank.
    std::byte* begin(const char* phase);
    // The first time it also compares what the ranks called, and raises on all of them if they differ.
    void finish();
    // What a peer staged before the last finished round.
    const std::byte* theirs(int peer) const;
    const std::vector<int64_t>& table(int peer) const { return tables_[peer]; }

private:
    struct Head {
        Facts facts;
        MemoryStatus memory;
        uint64_t offset = 0, half = 0;
        int64_t numbers = 0;
    };
    void prepare(size_t half_bytes);
    void compare(int peer, const Facts& theirs);

    Collective& call_;
    Endpoint& endpoint_;
    Head head_;
    std::vector<Head> heads_;
    std::vector<int64_t> table_;
    std::vector<std::vector<int64_t>> tables_;
    bool opened_ = false;
};

// Copies with the endpoint's threads and kernels. fence() after the last of them where stores were non-temporal.
void copy_bytes(Endpoint& endpoint, void* target, const void* source, size_t bytes, bool nontemporal);

}  // namespace cam
