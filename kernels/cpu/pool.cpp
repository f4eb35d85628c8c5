#include "pool.h"

#include <algorithm>

namespace cam {

Pool::Pool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { run(i); });
}

Pool::~Pool() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::run(int index) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
        if (stop_) return;
        seen = generation_;
        const auto* body = body_;
        const int64_t count = count_, parts = threads();
        lock.unlock();
        const int64_t begin = count * index / parts, end = count * (index + 1) / parts;
        if (begin < end) (*body)(begin, end);
        lock.lock();
        if (--running_ == 0) done_.notify_one();
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
    body(0, count / threads());
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
}

}  // namespace cam
