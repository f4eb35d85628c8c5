// The rank's end of the group: its peers' memory and lives. See endpoint.h.
#include "endpoint.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "futex.h"

namespace cam {
namespace {

int duplicate(int fd) { return fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3); }

bool process_ended(int pidfd) {
    if (pidfd < 0) return false;
    pollfd entry{pidfd, POLLIN, 0};
    return poll(&entry, 1, 0) == 1 && (entry.revents & (POLLIN | POLLHUP));
}

}  // namespace

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

std::map<std::string, OperationStats> Endpoint::stats() const {
    std::lock_guard lock(stats_mutex_);
    return stats_;
}

}  // namespace cam
