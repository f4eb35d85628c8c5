// The layout of one rank's shared segment, and its mapping.
//
//   [0, 64)              left to core: the nonce by which a peer proves that it maps the same memory
//   [64, 4096)           Control: whether this rank sleeps, whether it is alive, what broke it
//   [4096, control)      mailboxes: one pair of slots per sender; peers write here, only the owner reads
//   [control, size)      the arena: rows and whatever else the owner lends to its peers
//
// All peers map all of it. The arena part is sparse: pages exist once the owner has allocated them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace cam {

inline constexpr size_t kPage = 4096;
inline constexpr size_t kCacheLine = 64;
inline constexpr size_t kSlotBytes = 32 * 1024;
inline constexpr int kSlotsPerSender = 2;
inline constexpr int kCulprits = 16;

enum class State : uint32_t { live = 0, closed = 1, aborted = 2 };

// What broke the group, as the rank that noticed it first wrote it down for the others.
struct AbortRecord {
    uint32_t failure;
    int32_t culprits;
    int32_t culprit[kCulprits];
    double waited_s;
    char operation[32];
    char phase[32];
    char message[512];
};

struct Control {
    alignas(kCacheLine) std::atomic<uint32_t> missing;  // futex word: messages that the sleeping owner waits for
    alignas(kCacheLine) std::atomic<State> state;
    // Messages between two ranks (channels.h): where the owner's outbox is (0: nothing was ever sent), and the futex
    // word of those of the owner's threads that wait for a message.
    alignas(kCacheLine) std::atomic<uint64_t> outbox;
    alignas(kCacheLine) std::atomic<uint32_t> receiving;
    alignas(kCacheLine) AbortRecord abort;
};
static_assert(sizeof(Control) + 64 <= kPage);
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// One small message. Two per sender, used alternately: a sender writes round n + 2 only after it has the owner's
// message of round n + 1, which the owner posted after it had read round n.
struct Slot {
    std::atomic<uint64_t> round;  // written last, with release order
    uint32_t tag;                 // operation and phase, so that ranks in different calls notice
    uint32_t length;
    alignas(16) std::byte payload[kSlotBytes - 16];
};
static_assert(sizeof(Slot) == kSlotBytes);
inline constexpr size_t kSlotCapacity = sizeof(Slot::payload);

size_t control_bytes(int world);

// A mapping of a whole segment; the descriptor itself is not kept.
class Segment {
public:
    Segment(int fd, size_t bytes);
    static std::shared_ptr<Segment> of_peer(int fd, int world);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    std::byte* base() const { return base_; }
    size_t bytes() const { return bytes_; }
    Control& control() const { return *reinterpret_cast<Control*>(base_ + kCacheLine); }
    Slot& slot(int sender, uint64_t round) const {
        const size_t index = static_cast<size_t>(sender) * kSlotsPerSender + (round % kSlotsPerSender);
        return *reinterpret_cast<Slot*>(base_ + kPage + index * kSlotBytes);
    }

private:
    std::byte* base_;
    size_t bytes_;
};

}  // namespace cam
