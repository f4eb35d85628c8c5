// A few threads that split a loop over rows. One thread means: run in the caller, create nothing.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace cam {

class Pool {
public:
    // Throws Error(bad_input) where the operating system gives no more threads.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }
    // Calls body(begin, end) on disjoint ranges that cover [0, count). Loops shorter than `grain` stay in the caller.
    // Rethrows the first exception of any range, once all of them have ended.
    void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

private:
    void run(int index);
    void run_range(int index, const std::function<void(int64_t, int64_t)>& body, int64_t count);
    void stop();
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(int64_t, int64_t)>* body_ = nullptr;
    int64_t count_ = 0;
    uint64_t generation_ = 0;
    std::exception_ptr failure_;
    int running_ = 0;
    bool stop_ = false;
};

}  // namespace cam
