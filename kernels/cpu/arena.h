// The owner's allocator over the arena part of its segment.
//
// Only the owner allocates; peers learn offsets from its messages. Bookkeeping is private memory, so a peer can
// corrupt data at worst, never the allocator. Blocks are reference counted: a tensor over a block holds a
// shared_ptr to it, and the block returns to the arena with the tensor's last view, from any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "segment.h"

namespace cam {

class Arena;

class Block {
public:
    Block(std::shared_ptr<Arena> arena, size_t offset, size_t bytes) noexcept
        : arena_(std::move(arena)), offset_(offset), bytes_(bytes) {}
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    std::byte* data() const;
    size_t offset() const { return offset_; }  // in the segment: what a peer needs
    size_t bytes() const { return bytes_; }
    // Never reuse this memory: a peer that we gave up on may still write to it.
    void quarantine() { quarantined_ = true; }

private:
    std::shared_ptr<Arena> arena_;
    size_t offset_, bytes_;
    bool quarantined_ = false;
};

struct ArenaStats {
    size_t allocated, peak, resident, limit, blocks;
};

class Arena : public std::enable_shared_from_this<Arena> {
public:
    Arena(int fd, int world, size_t limit, size_t retain);
    ~Arena();

    // Throws Error(out_of_memory).
    std::shared_ptr<Block> allocate(size_t bytes);
    // The segment offset of [ptr, ptr + bytes), or -1 where that is not wholly inside the arena.
    int64_t offset_of(const void* ptr, size_t bytes) const;
    ArenaStats stats() const;
    void trim();

    Segment& segment() const { return *segment_; }
    const std::shared_ptr<Segment>& shared_segment() const { return segment_; }

private:
    friend class Block;
    void release(size_t offset, size_t bytes);
    void make_resident(size_t offset, size_t bytes);
    void give_back(size_t offset, size_t bytes, size_t keep);
    void insert_free(size_t offset, size_t bytes);
    void erase_free(std::map<size_t, size_t>::iterator position);

    int fd_;
    pid_t owner_;
    size_t start_, limit_, retain_;
    std::shared_ptr<Segment> segment_;
    mutable std::mutex mutex_;
    std::map<size_t, size_t> free_by_offset_;
    std::set<std::pair<size_t, size_t>> free_by_size_;
    std::vector<bool> resident_chunks_;
    size_t resident_ = 0, allocated_ = 0, peak_ = 0, blocks_ = 0;
};

}  // namespace cam
