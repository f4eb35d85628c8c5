#include "segment.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "errors.h"

namespace cam {

size_t control_bytes(int world) {
    if (world < 1) bad_input("world_size must be >= 1, got " + std::to_string(world));
    return kPage + static_cast<size_t>(world) * kSlotsPerSender * kSlotBytes;
}

Segment::Segment(int fd, size_t bytes) : bytes_(bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED) {
        bad_input("cannot map a window of " + std::to_string(bytes) + " bytes: " + std::strerror(errno) +
                  " (knob: window_limit)");
    }
    base_ = static_cast<std::byte*>(memory);
    // Advice only: honoured where the administrator allows huge pages for shared memory.
    madvise(memory, bytes, MADV_HUGEPAGE);
}

std::shared_ptr<Segment> Segment::of_peer(int fd, int world) {
    struct stat status{};
    if (fstat(fd, &status) != 0) bad_input(std::string("cannot stat a peer's window: ") + std::strerror(errno));
    const auto bytes = static_cast<size_t>(status.st_size);
    if (bytes < control_bytes(world)) {
        bad_input("a peer's window has " + std::to_string(bytes) + " bytes, fewer than its control area of " +
                  std::to_string(control_bytes(world)));
    }
    return std::make_shared<Segment>(fd, bytes);
}

Segment::~Segment() { munmap(base_, bytes_); }

}  // namespace cam
