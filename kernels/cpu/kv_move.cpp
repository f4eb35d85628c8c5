#include "kv_move.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ctime>
#include <vector>

#include "errors.h"

namespace cam {
namespace {

constexpr int64_t kLookEvery = 1 << 20;   // bytes between two looks at the limits
constexpr size_t kVectors = 1024;         // IOV_MAX
constexpr size_t kCallBytes = 32u << 20;  // of one system call, which nothing can end early

int64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

// Done unless the limits say otherwise.
Ended look(const Limits& limits) {
    if (limits.cancel != nullptr && std::atomic_ref(const_cast<uint32_t&>(*limits.cancel)).load() != 0) {
        return Ended::cancelled;
    }
    if (limits.deadline_ns != 0 && now_ns() > limits.deadline_ns) return Ended::late;
    return Ended::done;
}

std::byte* at(int64_t base, int64_t offset) { return reinterpret_cast<std::byte*>(base + offset); }

size_t total_bytes(const Pieces& pieces) {
    size_t sum = 0;
    for (int64_t i = 0; i < pieces.count; ++i)
        sum += static_cast<size_t>(pieces.pieces[i].bytes * pieces.pieces[i].rows);
    return sum * static_cast<size_t>(pieces.layers);
}

// Steps [begin, end), until a limit says stop.
Outcome copy_steps(const RowKernels& rows, const Pieces& all, const Limits& limits, bool nontemporal, int64_t begin,
                   int64_t end) {
    int64_t since = 0;
    for (int64_t step = begin; step < end; ++step) {
        const Piece& piece = all.pieces[step % all.count];
        const int64_t layer = step / all.count;
        std::byte* mine = at(all.my_bases[layer], piece.my_offset);
        std::byte* theirs = at(all.their_bases[layer], piece.their_offset);
        for (int64_t row = 0; row < piece.rows; ++row) {
            if (since >= kLookEvery) {
                since = 0;
                if (const Ended ended = look(limits); ended != Ended::done) return {ended, step, 0};
            }
            std::byte* to = all.to_mine ? mine : theirs;
            const std::byte* from = all.to_mine ? theirs : mine;
            rows.copy(to, from, static_cast<size_t>(piece.bytes), nontemporal);
            mine += piece.my_stride;
            theirs += piece.their_stride;
            since += piece.bytes;
        }
    }
    return {};
}

// Runs that wait for one system call, and the step that each byte of them belongs to.
struct Batch {
    std::vector<iovec> mine, theirs;
    std::vector<int64_t> steps;
    size_t bytes = 0;

    void add(std::byte* my_run, std::byte* their_run, size_t length, int64_t step) {
        mine.push_back({my_run, length});
        theirs.push_back({their_run, length});
        steps.push_back(step);
        bytes += length;
    }
    bool full() const { return mine.size() == kVectors || bytes >= kCallBytes; }
    void clear() {
        mine.clear();
        theirs.clear();
        steps.clear();
        bytes = 0;
    }
};

// The kernel may stop in the middle (an unmapped page, a signal): it then says how many bytes it moved.
Outcome transfer(pid_t pid, Batch& batch, bool to_mine) {
    size_t first = 0;
    while (first < batch.mine.size()) {
        const auto count = batch.mine.size() - first;
        const auto call = to_mine ? process_vm_readv : process_vm_writev;
        const ssize_t moved = call(pid, &batch.mine[first], count, &batch.theirs[first], count, 0);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return {Ended::failed, batch.steps[first], moved < 0 ? errno : EFAULT};
        auto left = static_cast<size_t>(moved);
        while (left > 0 && left >= batch.mine[first].iov_len) left -= batch.mine[first++].iov_len;
        if (left > 0) {
            for (auto* run : {&batch.mine[first], &batch.theirs[first]}) {
                run->iov_base = static_cast<std::byte*>(run->iov_base) + left;
                run->iov_len -= left;
            }
        }
    }
    batch.clear();
    return {};
}

}  // namespace

Mover::Mover(int threads, const std::string& isa, size_t nontemporal_threshold)
    : rows_(row_kernels(isa)),
      threshold_(nontemporal_threshold),
      owner_(getpid()),
      pool_(std::make_unique<Pool>(threads)) {}

Mover::~Mover() {
    if (getpid() != owner_) static_cast<void>(pool_.release());  // a forked child: its threads are the parent's
}

Outcome Mover::copy(const Pieces& pieces, const Limits& limits) {
    if (const Ended ended = look(limits); ended != Ended::done) return {ended, 0, 0};
    const bool nontemporal = total_bytes(pieces) > threshold_;
    Outcome outcome;
    std::mutex outcome_lock;
    const auto body = [&](int64_t begin, int64_t end) {
        const Outcome part = copy_steps(rows_, pieces, limits, nontemporal, begin, end);
        rows_.fence();  // before anybody is told that the bytes are there
        if (part.ended == Ended::done) return;
        std::lock_guard lock(outcome_lock);
        if (outcome.ended == Ended::done || part.step < outcome.step) outcome = part;
    };
    std::unique_lock threads(pool_use_, std::try_to_lock);
    if (threads.owns_lock() && pool_->threads() > 1 && nontemporal) {
        pool_->parallel_for(pieces.steps(), 2 * pool_->threads(), body);
    } else {
        body(0, pieces.steps());
    }
    return outcome;
}

Outcome Mover::copy_process(pid_t pid, const Pieces& all, const Limits& limits) {
    if (const Ended ended = look(limits); ended != Ended::done) return {ended, 0, 0};
    Batch batch;
    for (int64_t step = 0; step < all.steps(); ++step) {
        const Piece& piece = all.pieces[step % all.count];
        const int64_t layer = step / all.count;
        std::byte* mine = at(all.my_bases[layer], piece.my_offset);
        std::byte* theirs = at(all.their_bases[layer], piece.their_offset);
        for (int64_t row = 0; row < piece.rows; ++row) {
            // In parts, so that a single piece cannot hold a cancellation up.
            for (int64_t done = 0; done < piece.bytes; done += kCallBytes) {
                const auto length = std::min<int64_t>(piece.bytes - done, kCallBytes);
                batch.add(mine + done, theirs + done, static_cast<size_t>(length), step);
                if (!batch.full()) continue;
                if (const Outcome outcome = transfer(pid, batch, all.to_mine); outcome.ended != Ended::done)
                    return outcome;
                if (const Ended ended = look(limits); ended != Ended::done) return {ended, step, 0};
            }
            mine += piece.my_stride;
            theirs += piece.their_stride;
        }
    }
    return transfer(pid, batch, all.to_mine);
}

}  // namespace cam
