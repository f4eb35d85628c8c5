#include "pool.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "errors.h"

namespace cam {

Pool::Pool(int threads) {
    try {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { run(i); });
    } catch (const std::system_error& error) {
        const size_t started = workers_.size() + 1;
        stop();  // threads must be joined, or their end is the process's
        bad_input("cannot run " + std::to_string(threads) + " threads, only " + std::to_string(started) + ": " +
                  error.what() + " (knob: threads)");
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
}

void Pool::run(int index) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
        if (stop_) return;
        seen = generation_;
        const auto* body = body_;
        const int64_t count = count_;
        lock.unlock();
        run_range(index, *body, count);
        lock.lock();
        if (--running_ == 0) done_.notify_one();
    }
}

void Pool::run_range(int index, const std::function<void(int64_t, int64_t)>& body, int64_t count) {
    const int64_t parts = threads(), begin = count * index / parts, end = count * (index + 1) / parts;
    if (begin == end) return;
    try {
        body(begin, end);
    } catch (...) {
        std::lock_guard lock(mutex_);
        if (!failure_) failure_ = std::current_exception();
    }
}

void Pool::parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
    if (workers_.empty() || count < grain) {
        if (count > 0) body(0, count);
        return;
    }
    {
        std::lock_guard lock(mutex_);
        body_ = &body;
        count_ = count;
        running_ = static_cast<int>(workers_.size());
        ++generation_;
    }
    wake_.notify_all();
    run_range(0, body, count);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace cam
