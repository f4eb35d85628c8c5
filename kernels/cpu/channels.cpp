#include "channels.h"

#include <algorithm>
#include <new>

#include "futex.h"

namespace cam {
namespace {

constexpr std::chrono::milliseconds kSlice{50};  // between two looks at the peers' lives
constexpr size_t kInline = 4096;                 // payloads up to this lie behind their message, in one block

Clock::time_point after(double timeout_s) {
    const double bounded = std::clamp(timeout_s, 0.0, 3e9);
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

Error failed(const char* operation, Failure failure, std::string text) {
    Error error(failure, std::move(text));
    error.operation = operation;
    error.phase = "message";
    return error;
}

}  // namespace

Channels::Channels(Endpoint& endpoint)
    : endpoint_(endpoint), sent_(endpoint.world()), last_(endpoint.world()), cursor_(endpoint.world()) {}

Channels::~Channels() {
    // A peer may still be going to read what it has not received; its memory is not for other tensors.
    for (auto& list : sent_) {
        for (Sent& sent : list) {
            sent.message->quarantine();
            if (sent.payload) sent.payload->quarantine();
        }
    }
    if (outbox_) outbox_->quarantine();
}

Channels::Message& Channels::at(int owner, uint64_t offset) const {
    if (offset > endpoint_.peer_bytes(owner) - sizeof(Message) || offset % alignof(Message) != 0) {
        throw failed("recv", Failure::aborted,
                     "rank " + std::to_string(owner) + " announced a message outside its window");
    }
    return *reinterpret_cast<Message*>(endpoint_.peer_base(owner) + offset);
}

Channels::Message* Channels::follow(int owner, const Message& message) const {
    const uint64_t next = message.next.load(std::memory_order_acquire);
    return next ? &at(owner, next) : nullptr;
}

void Channels::notify(int peer) const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    auto& word = endpoint_.control(peer).receiving;
    if (word.load(std::memory_order_relaxed) != 0 && word.exchange(0) != 0) futex_wake(word, INT_MAX);
}

// Frees what receivers are through with. Whether anything is still on its way.
bool Channels::reclaim() {
    bool pending = false;
    for (auto& list : sent_) {
        const auto state = [](const Sent& sent) {
            return reinterpret_cast<Message*>(sent.message->data())->state.load(std::memory_order_acquire);
        };
        for (Sent& sent : list) {
            if (state(sent) == fresh) {
                pending = true;
            } else {
                sent.payload.reset();
            }
        }
        while (!list.empty() && state(list.front()) == passed) list.pop_front();
    }
    return pending;
}

void Channels::send(int to, int64_t tag, const void* data, size_t bytes, double timeout_s) {
    if (to < 0 || to >= endpoint_.world()) bad_input("destination " + std::to_string(to) + " is not a rank");
    endpoint_.check_usable();
    const auto since = Clock::now(), deadline = after(timeout_s);
    const bool inlined = bytes <= kInline;
    Sent sent;
    std::shared_ptr<Error> lack;
    auto& word = endpoint_.control(endpoint_.rank()).receiving;
    for (;;) {
        word.store(1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        bool pending;
        {
            std::lock_guard lock(mutex_);
            pending = reclaim();
        }
        try {
            // The payload first: it fits where the last one lay, unless a small block has been put there.
            if (!inlined) sent.payload = endpoint_.arena().allocate(bytes);
            sent.message = endpoint_.arena().allocate(kCacheLine + (inlined ? bytes : 0));
            break;
        } catch (const Error& error) {
            if (error.failure != Failure::out_of_memory) throw;
            sent.payload.reset();
            const auto now = Clock::now();
            if (pending && now < deadline) {
                endpoint_.check_usable();
                endpoint_.check_interrupt();
                futex_wait(word, 1, std::min<Clock::duration>(kSlice, deadline - now));
                continue;
            }
            lack = std::make_shared<Error>(error);
            lack->operation = "send";
            lack->phase = "message";
            lack->ranks = {endpoint_.rank()};
            lack->waited_s = seconds(now - since);
        }
        // Tell the receiver, if there is memory for that; if not, its own deadline will.
        sent.message = endpoint_.arena().allocate(kCacheLine);
        break;
    }
    auto* message = new (sent.message->data()) Message{};
    message->tag = tag;
    message->bytes = bytes;
    if (lack) {
        message->failed = 1;
        message->limit = lack->limit;
        message->allocated = lack->allocated;
    } else {
        std::byte* payload = inlined ? sent.message->data() + kCacheLine : sent.payload->data();
        message->payload = inlined ? sent.message->offset() + kCacheLine : sent.payload->offset();
        endpoint_.rows().copy(payload, data, bytes, bytes > endpoint_.nontemporal_threshold());
        endpoint_.rows().fence();
    }
    {
        std::lock_guard lock(mutex_);
        append(to, std::move(sent));
    }
    notify(to);
    if (lack) throw *lack;
}

Channels::Message& Channels::append(int to, Sent sent) {
    if (!outbox_) {
        auto block = endpoint_.arena().allocate(kCacheLine * endpoint_.world());
        for (int peer = 0; peer < endpoint_.world(); ++peer) {
            last_[peer] = new (block->data() + kCacheLine * peer) Message{};
        }
        outbox_ = block;
        endpoint_.control(endpoint_.rank()).outbox.store(block->offset(), std::memory_order_release);
    }
    auto& message = *reinterpret_cast<Message*>(sent.message->data());
    const uint64_t offset = sent.message->offset();
    sent_[to].push_back(std::move(sent));
    last_[to]->next.store(offset, std::memory_order_release);
    last_[to] = &message;
    return message;
}

uint64_t Channels::post(int from, int64_t tag, void* data, size_t bytes) {
    if (from != kAnySource && (from < 0 || from >= endpoint_.world())) {
        bad_input("source " + std::to_string(from) + " is not a rank");
    }
    endpoint_.check_usable();
    std::lock_guard lock(mutex_);
    receives_[next_id_] = {from, tag, data, bytes, -1, nullptr};
    return next_id_++;
}

void Channels::forget(uint64_t receive) {
    std::lock_guard lock(mutex_);
    receives_.erase(receive);
}

// Gives what has arrived to the posted receives. Whether one of them has ended.
bool Channels::progress() {
    bool any = false;
    for (int source = 0; source < endpoint_.world(); ++source) any = progress_from(source) || any;
    return any;
}

bool Channels::progress_from(int source) {
    if (!cursor_[source]) {
        const uint64_t outbox = endpoint_.control(source).outbox.load(std::memory_order_acquire);
        if (!outbox) return false;
        cursor_[source] = &at(source, outbox + kCacheLine * endpoint_.rank());
    }
    bool any = false;
    Message* before = cursor_[source];
    for (Message* message = follow(source, *before); message; message = follow(source, *message)) {
        if (message->state.load(std::memory_order_relaxed) == fresh) {
            const auto match = std::find_if(receives_.begin(), receives_.end(), [&](const auto& entry) {
                const Receive& receive = entry.second;
                return receive.source < 0 && !receive.error && receive.tag == message->tag &&
                       (receive.from == source || receive.from == kAnySource);
            });
            if (match != receives_.end()) {
                take(source, *message, match->second);
                any = true;
            }
        }
        if (before == cursor_[source] && message->state.load(std::memory_order_relaxed) == taken) {
            before->state.store(passed, std::memory_order_release);
            cursor_[source] = message;
        }
        before = message;
    }
    return any;
}

void Channels::take(int source, Message& message, Receive& receive) {
    const uint64_t window = endpoint_.peer_bytes(source);
    if (message.failed) {
        receive.error = std::make_shared<Error>(
            failed("recv", Failure::out_of_memory, "the sender's window is full of messages that nobody has received"));
        receive.error->ranks = {source};
        receive.error->requested = static_cast<int64_t>(message.bytes);
        receive.error->allocated = message.allocated;
        receive.error->limit = message.limit;
    } else if (message.bytes != receive.bytes) {
        receive.error = std::make_shared<Error>(failed("recv", Failure::parameter_mismatch, "the message is lost"));
        receive.error->field = "bytes of the message";
        receive.error->mine = std::to_string(receive.bytes);
        receive.error->theirs = std::to_string(message.bytes);
        receive.error->ranks = {source};
    } else if (message.payload > window || message.bytes > window - message.payload) {
        receive.error = std::make_shared<Error>(failed("recv", Failure::aborted, "a message lies outside its window"));
    } else {
        const bool nontemporal = message.bytes > endpoint_.nontemporal_threshold();
        endpoint_.rows().copy(receive.data, endpoint_.peer_base(source) + message.payload, message.bytes, nontemporal);
        endpoint_.rows().fence();
        receive.source = source;
    }
    message.state.store(taken, std::memory_order_release);
    notify(source);  // it may wait for memory
}

int Channels::finish(std::map<uint64_t, Receive>::iterator position) {
    const Receive receive = position->second;
    receives_.erase(position);
    if (receive.error) throw *receive.error;
    return receive.source;
}

int Channels::test(uint64_t id) {
    std::lock_guard lock(mutex_);
    if (progress()) notify(endpoint_.rank());
    const auto found = receives_.find(id);
    if (found == receives_.end()) bad_input("no such receive");
    return found->second.source < 0 && !found->second.error ? -1 : finish(found);
}

int Channels::wait(uint64_t id, double timeout_s) {
    const auto since = Clock::now(), deadline = after(timeout_s);
    const auto spin_until = since + std::chrono::microseconds(endpoint_.spin_us());
    auto& word = endpoint_.control(endpoint_.rank()).receiving;
    auto next_watch = since + kSlice;
    for (;;) {
        const bool spinning = Clock::now() < spin_until;
        if (!spinning) {
            word.store(1, std::memory_order_relaxed);
            std::atomic_thread_fence(std::memory_order_seq_cst);
        }
        {
            std::lock_guard lock(mutex_);
            // Other threads may sleep for what this one has found.
            if (progress()) notify(endpoint_.rank());
            const auto found = receives_.find(id);
            if (found == receives_.end()) bad_input("no such receive");
            if (found->second.source >= 0 || found->second.error) return finish(found);
            const auto now = Clock::now();
            try {
                if (now >= next_watch) watch(found->second, since);
                if (now >= deadline) time_out(found->second, since);
            } catch (...) {
                receives_.erase(found);
                throw;
            }
            if (now >= next_watch) next_watch = now + kSlice;
        }
        if (spinning) {
            for (int i = 0; i < 32; ++i) cpu_relax();
        } else {
            const auto now = Clock::now();
            futex_wait(word, 1, std::max<Clock::duration>(std::min(next_watch, deadline) - now, Clock::duration(1)));
        }
    }
}

// Throws when the message cannot come any more. What was sent before its sender ended has been looked for already.
void Channels::watch(const Receive& receive, Clock::time_point since) {
    endpoint_.check_interrupt();
    endpoint_.check_usable();
    const int world = endpoint_.world(), me = endpoint_.rank();
    std::vector<int32_t> lost;
    for (int peer = 0; peer < world; ++peer) {
        if (endpoint_.control(peer).state.load(std::memory_order_acquire) == State::aborted) endpoint_.raise_from(peer);
        if (peer != me && (receive.from == kAnySource || receive.from == peer) && endpoint_.gone(peer)) {
            lost.push_back(peer);
        }
    }
    if (lost.empty() || (receive.from == kAnySource && static_cast<int>(lost.size()) < world - 1)) return;
    if (progress()) notify(endpoint_.rank());
    if (receive.source >= 0 || receive.error) return;
    Error error = failed("recv", Failure::peer_died, "it ended, or left the group, without a message for this rank");
    error.ranks = lost;
    error.waited_s = seconds(Clock::now() - since);
    throw error;
}

void Channels::time_out(const Receive& receive, Clock::time_point since) const {
    Error error = failed("recv", Failure::wait_timeout, "no message with tag " + std::to_string(receive.tag));
    for (int peer = 0; peer < endpoint_.world(); ++peer) {
        if (receive.from == peer || (receive.from == kAnySource && peer != endpoint_.rank()))
            error.ranks.push_back(peer);
    }
    error.waited_s = seconds(Clock::now() - since);
    throw error;
}

}  // namespace cam
