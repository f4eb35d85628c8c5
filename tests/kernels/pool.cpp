// The thread pool alone: exceptions in any range reach the caller, and too many threads are an error.
#include "pool.h"

#include <sys/resource.h>

#include <atomic>
#include <cstdio>
#include <stdexcept>

#include "errors.h"

int main() {
    cam::Pool pool(4);
    for (int64_t thrower = 0; thrower < 4; ++thrower) {
        std::atomic<int64_t> done{0};
        try {
            pool.parallel_for(4, 1, [&](int64_t begin, int64_t end) {
                if (begin == thrower) throw std::runtime_error("range " + std::to_string(begin));
                done += end - begin;
            });
            std::puts("nothing was thrown");
        } catch (const std::runtime_error& error) {
            std::printf("%s, %d others done\n", error.what(), static_cast<int>(done));
        }
    }
    std::atomic<int64_t> sum{0};
    pool.parallel_for(1000, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) sum += i;
    });
    std::printf("then %d\n", static_cast<int>(sum));
    const rlimit limit{size_t{1} << 30, size_t{1} << 30};  // of address space: 1024 stacks do not fit
    setrlimit(RLIMIT_AS, &limit);
    try {
        cam::Pool many(1024);
        std::puts("all threads were started");
    } catch (const cam::Error& error) {
        std::printf("%s\n", error.what());
    }
}
