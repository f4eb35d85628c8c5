#include "endpoint.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "futex.h"

namespace cam {
namespace {

// How long a sleeping waiter goes without looking after its peers. Bounds how late a death is noticed.
constexpr std::chrono::milliseconds kSlice{50};

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

int duplicate(int fd) { return fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3); }

void copy_text(char* target, size_t size, const std::string& text) {
    const size_t length = std::min(size - 1, text.size());
    std::memcpy(target, text.data(), length);
    target[length] = 0;
}

bool process_ended(int pidfd) {
    if (pidfd < 0) return false;
    pollfd entry{pidfd, POLLIN, 0};
    return poll(&entry, 1, 0) == 1 && (entry.revents & (POLLIN | POLLHUP));
}

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

Endpoint::Endpoint(int rank, std::shared_ptr<Arena> arena, const std::vector<int>& peer_fds,
                   const std::vector<int>& peer_pidfds, EndpointOptions options)
    : rank_(rank),
      world_(static_cast<int>(peer_fds.size())),
      arena_(std::move(arena)),
      options_(std::move(options)),
      pool_(std::make_unique<Pool>(options_.threads)),
      rows_(&row_kernels(options_.isa)),
      reductions_(&reduce_kernels(options_.isa)),
      owner_(getpid()) {
    if (rank < 0 || rank >= world_ || peer_pidfds.size() != peer_fds.size()) {
        bad_input("rank " + std::to_string(rank) + " with " + std::to_string(peer_fds.size()) + " windows and " +
                  std::to_string(peer_pidfds.size()) + " pidfds is not a group");
    }
    for (int peer = 0; peer < world_; ++peer) {
        segments_.push_back(peer == rank ? arena_->shared_segment() : Segment::of_peer(peer_fds[peer], world_));
        pidfds_.push_back(peer == rank ? -1 : duplicate(peer_pidfds[peer]));
    }
}

Endpoint::~Endpoint() {
    if (getpid() == owner_) {
        close();
    } else {
        // In a forked child the workers do not exist, and destroying what they wait on would block for ever.
        static_cast<void>(pool_.release());
    }
    for (int fd : pidfds_) {
        if (fd >= 0) ::close(fd);
    }
}

void Endpoint::close() {
    Control& own = segments_[rank_]->control();
    State expected = State::live;
    if (own.state.compare_exchange_strong(expected, State::closed)) wake_all();
}

void Endpoint::check_usable() const {
    const Control& own = segments_[rank_]->control();
    switch (own.state.load(std::memory_order_acquire)) {
        case State::live:
            break;
        case State::closed:
            throw Error(Failure::aborted, "the group is closed");
        case State::aborted:
            throw Error(Failure::aborted, own.abort.message);
    }
    // A rank that comes late finds its peers' messages in place; it must not take them for their presence.
    for (int peer = 0; peer < world_; ++peer) {
        if (segments_[peer]->control().state.load(std::memory_order_acquire) == State::aborted) raise_from(peer);
    }
}

bool Endpoint::arrived(int peer) const {
    return segments_[rank_]->slot(peer, round_).round.load(std::memory_order_acquire) == round_;
}

// Counts down the messages that a sleeping peer waits for; the last one wakes it. A message that the peer had seen
// before it lay down may be counted as well: then it wakes early, looks, and sleeps again.
void Endpoint::ring_all() {
    // Pairs with the sleeper's store to `missing` before its last look: one of the two sees the other.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (int peer = 0; peer < world_; ++peer) {
        if (peer == rank_) continue;
        auto& missing = segments_[peer]->control().missing;
        uint32_t count = missing.load(std::memory_order_relaxed);
        while (count != 0 && !missing.compare_exchange_weak(count, count - 1)) {
        }
        if (count == 1) futex_wake(missing);
    }
}

// Whatever they wait for: this rank's state has changed.
void Endpoint::wake_all() {
    for (int peer = 0; peer < world_; ++peer) {
        if (peer == rank_) continue;
        auto& missing = segments_[peer]->control().missing;
        if (missing.exchange(0) != 0) futex_wake(missing);
    }
}

void Endpoint::abort_group(const Error& error) {
    Control& own = segments_[rank_]->control();
    if (own.state.load() != State::live) return;
    AbortRecord& record = own.abort;
    record.failure = static_cast<uint32_t>(error.failure);
    record.culprits = static_cast<int32_t>(std::min<size_t>(error.ranks.size(), kCulprits));
    std::copy_n(error.ranks.begin(), record.culprits, record.culprit);
    record.waited_s = error.waited_s;
    copy_text(record.operation, sizeof record.operation, error.operation);
    copy_text(record.phase, sizeof record.phase, error.phase);
    copy_text(record.message, sizeof record.message, error.message);
    own.state.store(State::aborted);
    wake_all();
}

void Endpoint::abort(const std::string& message) {
    Error error(Failure::aborted, message);
    error.operation = "abort";
    abort_group(error);
}

// A peer gave up. Its reason is ours too, unless we are the one it gave up on.
void Endpoint::raise_from(int peer) const {
    const AbortRecord& record = segments_[peer]->control().abort;
    const auto failure = static_cast<Failure>(record.failure);
    std::vector<int32_t> culprits(record.culprit, record.culprit + std::clamp(record.culprits, 0, kCulprits));
    const bool blames_me = std::find(culprits.begin(), culprits.end(), rank_) != culprits.end();
    const bool shared_fate = failure == Failure::wait_timeout || failure == Failure::peer_died;
    const std::string cause = std::string(record.message, strnlen(record.message, sizeof record.message));
    Error error(shared_fate && !blames_me ? failure : Failure::aborted,
                blames_me ? "rank " + std::to_string(peer) + " gave up on this rank: " + cause
                          : "rank " + std::to_string(peer) + " reported: " + cause);
    error.ranks = culprits;
    error.waited_s = record.waited_s;
    error.operation = std::string(record.operation, strnlen(record.operation, sizeof record.operation));
    error.phase = std::string(record.phase, strnlen(record.phase, sizeof record.phase));
    throw error;
}

bool Endpoint::gone(int peer) const {
    return segments_[peer]->control().state.load(std::memory_order_acquire) == State::closed ||
           process_ended(pidfds_[peer]);
}

void Endpoint::watch(const std::vector<int>& pending, Clock::time_point since) {
    for (int peer = 0; peer < world_; ++peer) {
        if (segments_[peer]->control().state.load(std::memory_order_acquire) == State::aborted) raise_from(peer);
    }
    for (int peer : pending) {
        if (!gone(peer)) continue;
        const bool left = segments_[peer]->control().state.load(std::memory_order_acquire) == State::closed;
        // It may have sent its message and then ended: what has arrived counts.
        if (arrived(peer)) continue;
        Error error(Failure::peer_died,
                    "rank " + std::to_string(peer) + (left ? " has left the group" : " died (its process ended)"));
        error.ranks = {peer};
        error.waited_s = seconds(Clock::now() - since);
        throw error;
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

std::map<std::string, OperationStats> Endpoint::stats() const {
    std::lock_guard lock(stats_mutex_);
    return stats_;
}

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
