// Messages between two ranks, beside the rounds: they neither wait for a collective nor disturb one.
//
// Each rank has an outbox in its own window: for every destination a linked list of messages, to which only the sender
// appends and which only the destination walks. A message is a copy of the sender's tensor in the sender's window, so a
// send is complete at once, whatever the receiver does, and no thread has to work on it in the background; two ranks
// that send to each other first and receive then do not block. The receiver copies a message to its final place.
//
// A message goes to the earliest posted receive of its source (or of any source) with its tag; messages of one source
// and one tag keep their order. A failure here concerns one message: the group is not broken by it.
#pragma once

#include <deque>
#include <map>
#include <mutex>

#include "endpoint.h"

namespace cam {

class Channels {
public:
    static constexpr int kAnySource = -1;

    explicit Channels(Endpoint& endpoint);
    ~Channels();
    Channels(const Channels&) = delete;
    Channels& operator=(const Channels&) = delete;

    // Waits only where the window is full of messages that were not received yet.
    void send(int to, int64_t tag, const void* data, size_t bytes, double timeout_s);

    // Posts a receive; its memory must stay valid until test() or wait() has told its end, or forget() was called.
    uint64_t post(int from, int64_t tag, void* data, size_t bytes);
    // The source rank once the message is here, else -1. Throws what went wrong with it; its end is told once.
    int test(uint64_t receive);
    int wait(uint64_t receive, double timeout_s);
    void forget(uint64_t receive);

private:
    // In shared memory. An outbox begins with one per destination, as the ends of empty lists.
    struct Message {
        std::atomic<uint64_t> next;   // offset in the sender's segment; 0: none yet
        std::atomic<uint32_t> state;  // see Progress
        uint32_t failed;              // the sender had no memory for it
        int64_t tag;
        uint64_t bytes, payload;  // payload: offset in the sender's segment
        int64_t limit, allocated;
    };
    static_assert(sizeof(Message) <= kCacheLine);
    enum Progress : uint32_t { fresh = 0, taken = 1, passed = 2 };  // taken: copied. passed: nobody follows its next

    struct Sent {
        std::shared_ptr<Block> message, payload;
    };
    struct Receive {
        int from;
        int64_t tag;
        void* data;
        size_t bytes;
        int source = -1;  // >= 0: done
        std::shared_ptr<Error> error;
    };

    Message& at(int owner, uint64_t offset) const;
    Message* follow(int owner, const Message& message) const;
    Message& append(int to, Sent sent);
    bool reclaim();
    void notify(int peer) const;
    bool progress();
    bool progress_from(int source);
    void take(int source, Message& message, Receive& receive);
    int finish(std::map<uint64_t, Receive>::iterator position);
    void watch(const Receive& receive, Clock::time_point since);
    [[noreturn]] void time_out(const Receive& receive, Clock::time_point since) const;

    Endpoint& endpoint_;
    std::mutex mutex_;
    std::shared_ptr<Block> outbox_;
    std::vector<std::deque<Sent>> sent_;
    std::vector<Message*> last_;    // of each destination's list
    std::vector<Message*> cursor_;  // of each source's list: the last message that was passed
    std::map<uint64_t, Receive> receives_;
    uint64_t next_id_ = 1;
};

}  // namespace cam
