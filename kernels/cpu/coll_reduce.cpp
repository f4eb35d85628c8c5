// Reductions. See collectives.h.
#include <bit>

#include "collectives.h"

namespace cam {
namespace {

constexpr int64_t kReduceGrain = 64 * 1024;  // elements
constexpr int64_t kAlign = 64;               // elements: shares of a piece begin on cache lines

// Below this many bytes a second round costs more than every rank reducing everything.
constexpr int64_t kFlatBytes = 16 * 1024;

Facts facts_of(const ReduceSpec& spec, const Tuning& tuning) {
    Facts facts;
    facts.value[Facts::element] = static_cast<int64_t>(spec.element);
    facts.value[Facts::reduction] = static_cast<int64_t>(spec.reduction);
    facts.value[Facts::factor] = spec.reduction == Reduction::premul_sum ? std::bit_cast<int64_t>(spec.factor) : 0;
    facts.value[Facts::algorithm] = static_cast<int64_t>(tuning.algorithm);
    facts.value[Facts::piece] = static_cast<int64_t>(tuning.piece);
    return facts;
}

int64_t digest(const std::vector<int64_t>& values) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (const int64_t value : values) hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3;
    return static_cast<int64_t>(hash);
}

void reduce_all(Endpoint& endpoint, void* out, const std::vector<const void*>& sources, int64_t elements,
                const ReduceSpec& spec) {
    const int count = static_cast<int>(sources.size());
    const auto reduce = endpoint.reductions().reduce;
    if (endpoint.pool().threads() == 1 || elements < kReduceGrain) {
        reduce(out, sources.data(), count, elements, spec);
        return;
    }
    const size_t size = element_bytes(spec.element);
    endpoint.pool().parallel_for(elements, kReduceGrain, [&](int64_t begin, int64_t end) {
        std::vector<const void*> parts(sources.size());
        for (size_t i = 0; i < parts.size(); ++i) parts[i] = static_cast<const std::byte*>(sources[i]) + begin * size;
        reduce(static_cast<std::byte*>(out) + begin * size, parts.data(), count, end - begin, spec);
    });
}

// Several tensors as one.
class Spans {
public:
    Spans(const std::vector<Span>& spans, size_t element_size) : spans_(spans), size_(element_size) {
        for (const Span& span : spans) {
            starts_.push_back(total_);
            total_ += span.elements;
        }
    }
    int64_t elements() const { return total_; }
    std::vector<int64_t> sizes() const {
        std::vector<int64_t> result;
        for (const Span& span : spans_) result.push_back(span.elements);
        return result;
    }
    // body(in, out, elements, offset in bytes from `begin`) for each run of memory that [begin, end) covers.
    template <class Body>
    void each(int64_t begin, int64_t end, Body&& body) const {
        if (begin >= end) return;
        size_t i = std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
        for (int64_t at = begin; at < end; ++i) {
            const int64_t within = at - starts_[i], count = std::min(end - at, spans_[i].elements - within);
            if (count <= 0) continue;
            const auto* in = static_cast<const std::byte*>(spans_[i].in) + within * size_;
            auto* out = spans_[i].out ? static_cast<std::byte*>(spans_[i].out) + within * size_ : nullptr;
            body(in, out, count, static_cast<size_t>(at - begin) * size_);
            at += count;
        }
    }

private:
    const std::vector<Span>& spans_;
    size_t size_;
    std::vector<int64_t> starts_;
    int64_t total_ = 0;
};

struct Reducing {
    Collective& call;
    const Spans& spans;
    const ReduceSpec& spec;
    Facts facts;
    int64_t piece;  // elements
    bool receives;
};

void stage(const Reducing& r, std::byte* half, int64_t begin, int64_t end) {
    if (!half) return;
    r.spans.each(begin, end, [&](const std::byte* in, std::byte*, int64_t count, size_t offset) {
        copy_bytes(r.call.endpoint(), half + offset, in, count * element_bytes(r.spec.element), false);
    });
}

// A round per piece: everybody stages it, and whoever receives reduces it from all windows.
void reduce_flat(const Reducing& r) {
    Endpoint& endpoint = r.call.endpoint();
    const int world = endpoint.world(), me = endpoint.rank();
    Staged staged(r.call, r.facts, r.piece * element_bytes(r.spec.element));
    std::vector<const void*> sources(world);
    int64_t begin = 0;
    do {
        const int64_t end = std::min(begin + r.piece, r.spans.elements());
        stage(r, staged.begin("pieces"), begin, end);
        staged.finish();
        if (r.receives) {
            r.spans.each(begin, end, [&](const std::byte* in, std::byte* out, int64_t count, size_t offset) {
                for (int peer = 0; peer < world; ++peer) {
                    sources[peer] = peer == me ? in : staged.theirs(peer) + offset;
                }
                reduce_all(endpoint, out, sources, count, r.spec);
            });
        }
        begin = end;
    } while (begin < r.spans.elements());
}

// A round per piece and one more. Before round j each rank stages piece j, and reduces its share of piece j - 1 into
// the same half; after the round it fetches all shares of piece j - 1.
void reduce_direct(const Reducing& r) {
    Endpoint& endpoint = r.call.endpoint();
    const int world = endpoint.world(), me = endpoint.rank();
    const size_t size = element_bytes(r.spec.element);
    const int64_t total = r.spans.elements(), pieces = std::max<int64_t>((total + r.piece - 1) / r.piece, 1);
    const int64_t share = ((r.piece + world - 1) / world + kAlign - 1) / kAlign * kAlign;
    const size_t results = r.piece * size;  // where in a half the reduced share lies
    Staged staged(r.call, r.facts, results + share * size);
    std::vector<const void*> sources(world);
    const auto share_of = [&](int rank, int64_t length) {
        return std::pair(std::min(rank * share, length), std::min((rank + 1) * share, length));
    };
    for (int64_t j = 0; j <= pieces; ++j) {
        for (int peer = 0; j > 0 && peer < world; ++peer) sources[peer] = staged.theirs(peer);
        std::byte* half = staged.begin("pieces");
        const int64_t begin = (j - 1) * r.piece, length = std::min(r.piece, total - begin);
        if (j > 0) {
            const auto [first, last] = share_of(me, length);
            for (auto& source : sources) source = static_cast<const std::byte*>(source) + first * size;
            if (first < last) reduce_all(endpoint, half + results, sources, last - first, r.spec);
        }
        if (j < pieces) stage(r, half, j * r.piece, std::min((j + 1) * r.piece, total));
        staged.finish();
        if (j == 0 || !r.receives) continue;
        for (int i = 0; i < world; ++i) {
            const int peer = (me + i) % world;  // each begins elsewhere
            const auto [first, last] = share_of(peer, length);
            r.spans.each(begin + first, begin + last, [&](const std::byte*, std::byte* out, int64_t count, size_t at) {
                copy_bytes(endpoint, out, staged.theirs(peer) + results + at, count * size, false);
            });
        }
    }
}

void reduce_to(Endpoint& endpoint, Operation operation, const std::vector<Span>& spans, const ReduceSpec& spec,
               int root, const Tuning& tuning, double timeout_s) {
    check_reducible(spec);
    const size_t size = element_bytes(spec.element);
    const Spans joined(spans, size);
    const int64_t bytes = joined.elements() * static_cast<int64_t>(size);
    Facts facts = facts_of(spec, tuning);
    facts.value[Facts::count] = joined.elements();
    facts.value[Facts::sizes] = spans.size() > 1 ? digest(joined.sizes()) : 0;
    facts.value[Facts::parts] = static_cast<int64_t>(spans.size());
    facts.value[Facts::root] = root + 1;
    const auto piece = static_cast<int64_t>(piece_bytes(tuning, bytes, endpoint.world()) / size);
    const bool receives = root < 0 || root == endpoint.rank();
    bool flat = tuning.algorithm == Tuning::Algorithm::flat;
    if (tuning.algorithm == Tuning::Algorithm::automatic) flat = endpoint.world() <= 2 || bytes <= kFlatBytes;
    run_collective(endpoint, operation, timeout_s, [&](Collective& call) {
        const Reducing reducing{call, joined, spec, facts, piece, receives};
        flat ? reduce_flat(reducing) : reduce_direct(reducing);
        call.add_bytes(bytes);
        return 0;
    });
}

}  // namespace

void all_reduce(Endpoint& endpoint, const std::vector<Span>& spans, const ReduceSpec& spec, const Tuning& tuning,
                double timeout_s) {
    reduce_to(endpoint, Operation::all_reduce, spans, spec, -1, tuning, timeout_s);
}

void reduce(Endpoint& endpoint, const std::vector<Span>& spans, const ReduceSpec& spec, int root, const Tuning& tuning,
            double timeout_s) {
    if (root < 0 || root >= endpoint.world()) bad_input("root " + std::to_string(root) + " is not a rank");
    reduce_to(endpoint, Operation::reduce, spans, spec, root, tuning, timeout_s);
}

void reduce_scatter(Endpoint& endpoint, const std::vector<const void*>& parts, const std::vector<int64_t>& elements,
                    void* out, const ReduceSpec& spec, const Tuning& tuning, double timeout_s) {
    check_reducible(spec);
    const int world = endpoint.world(), me = endpoint.rank();
    if (parts.size() != static_cast<size_t>(world) || elements.size() != parts.size()) {
        bad_input("reduce_scatter takes one part per rank (" + std::to_string(world) + "), got " +
                  std::to_string(parts.size()));
    }
    const size_t size = element_bytes(spec.element);
    int64_t total = 0, longest = 0;
    for (const int64_t count : elements) {
        total += count;
        longest = std::max(longest, count);
    }
    Facts facts = facts_of(spec, tuning);
    facts.value[Facts::count] = total;
    facts.value[Facts::sizes] = digest(elements);
    // Elements of each part that one round takes.
    const auto step = static_cast<int64_t>(piece_bytes(tuning, longest * size * world, world) / world / size);
    run_collective(endpoint, Operation::reduce_scatter, timeout_s, [&](Collective& call) {
        Staged staged(call, facts, step * size * world);
        std::vector<const void*> sources(world);
        int64_t begin = 0;
        do {
            const auto within = [&](int rank) { return std::clamp<int64_t>(elements[rank] - begin, 0, step); };
            std::byte* half = staged.begin("pieces");
            for (int peer = 0; half && peer < world; ++peer) {
                if (peer == me) continue;
                const auto* from = static_cast<const std::byte*>(parts[peer]) + begin * size;
                copy_bytes(endpoint, half + peer * step * size, from, within(peer) * size, false);
            }
            staged.finish();
            for (int peer = 0; peer < world; ++peer) {
                sources[peer] = peer == me ? static_cast<const std::byte*>(parts[me]) + begin * size
                                           : staged.theirs(peer) + me * step * size;
            }
            auto* target = static_cast<std::byte*>(out) + begin * size;
            if (within(me) > 0) reduce_all(endpoint, target, sources, within(me), spec);
            begin += step;
        } while (begin < longest);
        call.add_bytes(total * static_cast<int64_t>(size));
        return 0;
    });
}

}  // namespace cam
