#include "arena.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>

#include "errors.h"

namespace cam {
namespace {

// Pages come from and go back to the operating system in chunks: few system calls, and a small bitmap.
constexpr size_t kChunk = 256 * 1024;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Routing varies from call to call, so row counts differ by a few percent. Sizes are rounded to 1/16 of their power
// of two, so that the next call fits the block that the last one freed, whose pages are already mapped.
size_t block_size(size_t bytes) {
    const size_t step = std::max<size_t>(kCacheLine, std::bit_floor(std::max<size_t>(bytes, 1)) / 16);
    return round_up(std::max<size_t>(bytes, 1), step);
}

}  // namespace

Block::~Block() {
    if (!quarantined_) arena_->release(offset_, bytes_);
}

std::byte* Block::data() const { return arena_->segment().base() + offset_; }

Arena::Arena(int fd, int world, size_t limit, size_t retain)
    : fd_(-1), owner_(getpid()), start_(control_bytes(world)), limit_(limit / kChunk * kChunk), retain_(retain) {
    if (limit_ < kChunk) {
        bad_input("window_limit must be at least " + std::to_string(kChunk) + " bytes, got " + std::to_string(limit));
    }
    segment_ = std::make_shared<Segment>(fd, start_ + limit_);
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (fd_ < 0) bad_input(std::string("cannot duplicate the window's descriptor: ") + std::strerror(errno));
    resident_chunks_.assign(limit_ / kChunk, false);
    insert_free(0, limit_);
}

Arena::~Arena() {
    if (fd_ >= 0) close(fd_);
}

void Arena::insert_free(size_t offset, size_t bytes) {
    free_by_offset_.emplace(offset, bytes);
    free_by_size_.emplace(bytes, offset);
}

void Arena::erase_free(std::map<size_t, size_t>::iterator position) {
    free_by_size_.erase({position->second, position->first});
    free_by_offset_.erase(position);
}

std::shared_ptr<Block> Arena::allocate(size_t bytes) {
    std::lock_guard lock(mutex_);
    size_t size = bytes <= limit_ ? block_size(bytes) : bytes;  // no rounding up of what may not even be added to
    auto best = free_by_size_.lower_bound({size, 0});
    if (best == free_by_size_.end() && bytes <= limit_) {
        size = round_up(std::max<size_t>(bytes, 1), kCacheLine);  // the last room is not lost to rounding
        best = free_by_size_.lower_bound({size, 0});
    }
    if (best == free_by_size_.end()) {
        Error error(Failure::out_of_memory, "no free range is large enough");
        error.requested = static_cast<int64_t>(std::min<size_t>(bytes, std::numeric_limits<int64_t>::max()));
        error.allocated = static_cast<int64_t>(allocated_);
        error.limit = static_cast<int64_t>(limit_);
        throw error;
    }
    const auto [free_bytes, offset] = *best;
    make_resident(offset, size);
    erase_free(free_by_offset_.find(offset));
    if (free_bytes > size) insert_free(offset + size, free_bytes - size);
    allocated_ += size;
    peak_ = std::max(peak_, allocated_);
    ++blocks_;
    return std::make_shared<Block>(shared_from_this(), start_ + offset, size);
}

// Reserving pages by fallocate makes lack of memory an error here, instead of a SIGBUS in whoever touches them first.
void Arena::make_resident(size_t offset, size_t bytes) {
    const size_t last = (offset + bytes - 1) / kChunk;
    for (size_t chunk = offset / kChunk; chunk <= last;) {
        if (resident_chunks_[chunk]) {
            ++chunk;
            continue;
        }
        size_t end = chunk;
        while (end <= last && !resident_chunks_[end]) ++end;
        int status;
        do {
            status = fallocate(fd_, 0, static_cast<off_t>(start_ + chunk * kChunk),
                               static_cast<off_t>((end - chunk) * kChunk));
        } while (status != 0 && errno == EINTR);
        if (status != 0) {
            Error error(Failure::out_of_memory,
                        std::string("the operating system gave no more memory: ") + std::strerror(errno));
            error.requested = static_cast<int64_t>(bytes);
            error.allocated = static_cast<int64_t>(allocated_);
            error.limit = static_cast<int64_t>(limit_);
            throw error;
        }
        for (size_t i = chunk; i < end; ++i) resident_chunks_[i] = true;
        resident_ += (end - chunk) * kChunk;
        chunk = end;
    }
}

// Gives whole free chunks back until no more than `keep` bytes of free memory stay resident.
void Arena::give_back(size_t offset, size_t bytes, size_t keep) {
    for (size_t chunk = (offset + kChunk - 1) / kChunk; (chunk + 1) * kChunk <= offset + bytes; ++chunk) {
        if (resident_ <= allocated_ + keep) return;
        if (!resident_chunks_[chunk]) continue;
        if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(start_ + chunk * kChunk),
                      static_cast<off_t>(kChunk)) == 0) {
            resident_chunks_[chunk] = false;
            resident_ -= kChunk;
        }
    }
}

void Arena::release(size_t segment_offset, size_t bytes) {
    // A forked child holds copies of the parent's tensors. Their end there must not touch the parent's memory, and
    // the lock may have been held by a thread that the child does not have.
    if (getpid() != owner_) return;
    std::lock_guard lock(mutex_);
    size_t offset = segment_offset - start_, size = bytes;
    auto next = free_by_offset_.lower_bound(offset);
    if (next != free_by_offset_.end() && next->first == offset + size) {
        size += next->second;
        const auto merged = next++;
        erase_free(merged);
    }
    if (next != free_by_offset_.begin()) {
        const auto previous = std::prev(next);
        if (previous->first + previous->second == offset) {
            offset = previous->first;
            size += previous->second;
            erase_free(previous);
        }
    }
    insert_free(offset, size);
    allocated_ -= bytes;
    --blocks_;
    // Chunks that the block shared with free neighbours are free as a whole now: the last of them gives the chunk back.
    const size_t first = std::max(offset, (segment_offset - start_) / kChunk * kChunk);
    const size_t end = std::min(offset + size, round_up(segment_offset - start_ + bytes, kChunk));
    give_back(first, end - first, retain_);
}

int64_t Arena::offset_of(const void* ptr, size_t bytes) const {
    const auto address = reinterpret_cast<uintptr_t>(ptr);
    const auto begin = reinterpret_cast<uintptr_t>(segment_->base() + start_);
    if (address < begin || address + bytes > begin + limit_) return -1;
    return static_cast<int64_t>(address - begin + start_);
}

ArenaStats Arena::stats() const {
    std::lock_guard lock(mutex_);
    return {allocated_, peak_, resident_, limit_, blocks_};
}

void Arena::trim() {
    if (getpid() != owner_) return;
    std::lock_guard lock(mutex_);
    for (const auto& [offset, bytes] : free_by_offset_) give_back(offset, bytes, 0);
}

}  // namespace cam
