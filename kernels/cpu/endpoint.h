// One rank's end of the group: rounds of small messages between all ranks, with deadlines and watched lives.
//
// Every collective is a few rounds. In a round each rank writes one message straight into every peer's mailbox, sets
// its flag, and waits for all peers' messages. Bulk data never goes through here: it is written to its final place
// between two rounds, and the later round tells that it is complete.
//
// Waiting: spin for a while, then sleep on a futex in the own control page. Every slice of sleep looks whether a
// peer has died (pidfd), left, or given up. Whatever goes wrong once a round has begun breaks the group for good: the
// ranks no longer agree where they are, and peers may still write to memory they were lent.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "arena.h"
#include "elements.h"
#include "errors.h"
#include "pool.h"
#include "rows.h"
#include "segment.h"

namespace cam {

using Clock = std::chrono::steady_clock;

inline double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// Into a fixed field of shared memory or of a message: cut to fit, always terminated.
inline void copy_text(char* target, size_t size, const std::string& text) {
    const size_t length = std::min(size - 1, text.size());
    std::memcpy(target, text.data(), length);
    target[length] = 0;
}

// The parameters of a collective that every rank must have called alike, in a fixed order with their names.
struct Signature {
    static constexpr int kFields = 12;
    enum Field {
        layout,
        dtype,
        hidden,
        topk,
        num_experts,
        quant,
        alignment,
        max_tokens,
        scale_bytes,
        weights,
        row_values,
        scaled
    };
    int64_t value[kFields] = {};
    static const char* name(int field);
    static std::string show(int field, int64_t value);
};

enum class Operation : uint32_t {
    barrier = 1,
    exchange,
    dispatch,
    combine,
    scatter,
    route,
    all_reduce,
    reduce,
    reduce_scatter,
    all_gather,
    broadcast,
    gather,
    scatter_parts,
    all_to_all
};
const char* operation_name(Operation operation);

struct OperationStats {
    int64_t calls = 0, bytes = 0;
    double wait_s = 0, total_s = 0;
};

// Window memory of this rank that its peers read between two rounds: two halves, used alternately (see staged.h).
struct Staging {
    std::shared_ptr<Block> block;
    size_t half = 0;
    std::shared_ptr<Block> retired;  // a smaller one that slow peers may still read
};

struct EndpointOptions {
    int spin_us = 50;
    int threads = 1;
    std::string isa = "auto";
    size_t nontemporal_threshold = 0;
    std::function<void()> check_interrupt;  // may throw what ends the wait; called about twenty times a second
};

class Endpoint {
public:
    Endpoint(int rank, std::shared_ptr<Arena> arena, const std::vector<int>& peer_fds,
             const std::vector<int>& peer_pidfds, EndpointOptions options);
    ~Endpoint();
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;

    int rank() const { return rank_; }
    int world() const { return world_; }
    Arena& arena() { return *arena_; }
    Pool& pool() { return *pool_; }
    const RowKernels& rows() const { return *rows_; }
    const ReduceKernels& reductions() const { return *reductions_; }
    size_t nontemporal_threshold() const { return options_.nontemporal_threshold; }
    std::byte* peer_base(int peer) const { return segments_[peer]->base(); }
    size_t peer_bytes(int peer) const { return segments_[peer]->bytes(); }
    Control& control(int peer) const { return segments_[peer]->control(); }
    uint64_t round() const { return round_; }
    Staging& staging() { return staging_; }
    // Throws if the group is closed or broken.
    void check_usable() const;
    // Whether a peer's process has ended or has left the group.
    bool gone(int peer) const;
    // Raises what a peer that gave up wrote down.
    [[noreturn]] void raise_from(int peer) const;
    void check_interrupt() const {
        if (options_.check_interrupt) options_.check_interrupt();
    }
    int spin_us() const { return options_.spin_us; }

    void barrier(double timeout_s);
    // payloads[r] goes to rank r; returns what each rank sent here. All ranks give the same name.
    std::vector<std::string> exchange(const std::vector<std::string_view>& payloads, const std::string& name,
                                      double timeout_s);
    void close();
    // Breaks the group on purpose, from any thread: waits end here and at the peers, with this message.
    void abort(const std::string& message);
    std::map<std::string, OperationStats> stats() const;  // from any thread

private:
    friend class Collective;
    void ring_all();
    void wake_all();
    // Throws if a peer gave up, or if one of `pending` is dead or has left without its message for this round.
    void watch(const std::vector<int>& pending, Clock::time_point since);
    bool arrived(int peer) const;
    void abort_group(const Error& error);

    int rank_, world_;
    std::shared_ptr<Arena> arena_;
    std::vector<std::shared_ptr<Segment>> segments_;
    std::vector<int> pidfds_;
    EndpointOptions options_;
    std::unique_ptr<Pool> pool_;
    const RowKernels* rows_;
    const ReduceKernels* reductions_;
    Staging staging_;
    uint64_t round_ = 0;
    pid_t owner_;
    mutable std::mutex stats_mutex_;
    std::map<std::string, OperationStats> stats_;
};

// Composes and reads messages: plain values one after another, bounds-checked.
class Writer {
public:
    explicit Writer(std::span<std::byte> memory) : memory_(memory) {}
    template <class T>
    void put(const T& value) {
        put_array(&value, 1);
    }
    template <class T>
    void put_array(const T* values, size_t count) {
        if (used_ + sizeof(T) * count > memory_.size()) bad_input("message exceeds a mailbox slot");
        if (count) std::memcpy(memory_.data() + used_, values, sizeof(T) * count);
        used_ += sizeof(T) * count;
    }
    size_t used() const { return used_; }

private:
    std::span<std::byte> memory_;
    size_t used_ = 0;
};

class Reader {
public:
    explicit Reader(std::span<const std::byte> memory) : memory_(memory) {}
    template <class T>
    T get() {
        T value;
        get_array(&value, 1);
        return value;
    }
    template <class T>
    void get_array(T* values, size_t count) {
        if (used_ + sizeof(T) * count > memory_.size()) bad_input("a peer's message is shorter than its call requires");
        if (count) std::memcpy(values, memory_.data() + used_, sizeof(T) * count);
        used_ += sizeof(T) * count;
    }

private:
    std::span<const std::byte> memory_;
    size_t used_ = 0;
};

// One collective call in progress: its rounds are the only way to talk to peers. Made by run_collective() only.
class Collective {
public:
    Collective(Endpoint& endpoint, Operation operation, double timeout_s);
    Collective(const Collective&) = delete;
    Collective& operator=(const Collective&) = delete;

    // Starts a round: outgoing() is the mailbox memory at a peer, in which the caller composes its message.
    void begin(const char* phase);
    Writer outgoing(int peer);
    void set_length(int peer, const Writer& message);
    // Publishes the round's messages and waits for everybody's.
    void finish();
    Reader incoming(int peer) const;
    // A round without content: all that any rank wrote before it is visible to every rank after it.
    void synchronise(const char* phase);

    // Compares the peers' signatures, which stand first in their messages, with ours. A difference is seen by every
    // rank in the same round: the error is agreed.
    void compare_signature(const Signature& mine, int peer, const Signature& theirs);
    // For an error that every rank raises in this same round: the group stays in step and usable.
    [[noreturn]] void fail_agreed(Error error);

    // Memory that peers may write to during this call: never reused if the call breaks.
    void lend(const std::shared_ptr<Block>& block) { lent_.push_back(block); }
    // What errors call the operation, where that says more than its kind.
    void set_name(std::string name) { name_ = std::move(name); }
    void add_bytes(int64_t bytes) { bytes_ += bytes; }
    Endpoint& endpoint() { return endpoint_; }

private:
    template <class Body>
    friend auto run_collective(Endpoint&, Operation, double, Body&&);
    void wait_all();
    void settle();
    void broke(const Error& error);
    [[noreturn]] void raise_timeout(const std::vector<int>& pending);

    Endpoint& endpoint_;
    Operation operation_;
    std::string name_;
    Clock::time_point started_, deadline_;
    const char* phase_ = "";
    uint32_t phase_index_ = 0;
    int64_t bytes_ = 0;
    double wait_s_ = 0;
    bool published_ = false, agreed_ = false;
    std::vector<std::shared_ptr<Block>> lent_;
};

// Runs one collective. An error before the first message is this rank's own affair; a later one that the ranks have
// not agreed on breaks the group and tells the peers.
template <class Body>
auto run_collective(Endpoint& endpoint, Operation operation, double timeout_s, Body&& body) {
    Collective collective(endpoint, operation, timeout_s);
    try {
        auto result = body(collective);
        collective.settle();
        return result;
    } catch (Error& error) {
        if (error.operation.empty()) error.operation = collective.name_;
        if (error.phase.empty()) error.phase = collective.phase_;
        if (collective.published_ && !collective.agreed_) collective.broke(error);
        throw;
    } catch (const std::exception& other) {
        Error error(Failure::aborted, other.what());
        if (collective.published_) collective.broke(error);
        throw;
    }
}

}  // namespace cam
