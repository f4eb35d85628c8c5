/* What the native form of an Ascend kernel needs from outside: scratch memory, strided copies, and a fence.
 *
 * Linked into every native kernel; everything but the two entry points at the end is hidden, so that many kernels can
 * live in one process. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORTED __attribute__((visibility("default")))

/* Scratch memory: what is UB on a device. One bump allocator per thread, emptied before each program id. The buffers of
 * a program are never freed one by one, because MLIR's deallocation pipeline crashes on kernels that store through
 * addresses taken from memory. */
typedef struct Chunk {
    struct Chunk *next;
    size_t size, used;
    char data[];
} Chunk;

static __thread Chunk *first, *current;
enum { ALIGNMENT = 64, CHUNK = 1 << 20 };

HIDDEN void *cam_scratch_allocate(size_t bytes) {
    bytes = (bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
    while (current && current->used + bytes + ALIGNMENT > current->size) {
        if (!current->next) break;
        current = current->next;
        current->used = 0;
    }
    if (!current || current->used + bytes + ALIGNMENT > current->size) {
        size_t size = bytes + ALIGNMENT > CHUNK ? bytes + ALIGNMENT : CHUNK;
        Chunk *chunk = malloc(sizeof(Chunk) + size);
        if (!chunk) abort(); /* the kernel ABI has no way to report failure */
        chunk->next = NULL;
        chunk->size = size;
        chunk->used = 0;
        if (current) current->next = chunk; else first = chunk;
        current = chunk;
    }
    uintptr_t start = (uintptr_t)current->data + current->used;
    uintptr_t aligned = (start + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1);
    current->used = aligned + bytes - (uintptr_t)current->data;
    return (void *)aligned;
}

/* Names that MLIR's use-generic-functions option emits. */
HIDDEN void *_mlir_memref_to_llvm_alloc(size_t bytes) { return cam_scratch_allocate(bytes); }
HIDDEN void *_mlir_memref_to_llvm_aligned_alloc(size_t alignment, size_t bytes) {
    (void)alignment;
    return cam_scratch_allocate(bytes);
}
HIDDEN void _mlir_memref_to_llvm_free(void *pointer) { (void)pointer; }

/* Copies between strided memrefs of equal shape. A memref of rank r is: allocated, aligned, offset, sizes[r],
 * strides[r], in units of elements. */
typedef struct {
    int64_t rank;
    int64_t *descriptor;
} AnyMemref;

static void copy_dimension(int64_t dimension, int64_t rank, int64_t element, char *to, const int64_t *to_strides,
                           const char *from, const int64_t *from_strides, const int64_t *sizes) {
    if (dimension == rank) {
        memcpy(to, from, (size_t)element);
        return;
    }
    int innermost = dimension == rank - 1;
    if (innermost && to_strides[dimension] == 1 && from_strides[dimension] == 1) {
        memcpy(to, from, (size_t)(sizes[dimension] * element));
        return;
    }
    for (int64_t i = 0; i < sizes[dimension]; i++)
        copy_dimension(dimension + 1, rank, element, to + i * to_strides[dimension] * element, to_strides,
                       from + i * from_strides[dimension] * element, from_strides, sizes);
}

HIDDEN void memrefCopy(int64_t element, AnyMemref *from, AnyMemref *to) {
    int64_t rank = from->rank;
    int64_t *f = from->descriptor, *t = to->descriptor;
    for (int64_t i = 0; i < rank; i++)
        if (f[3 + i] == 0) return;
    copy_dimension(0, rank, element, (char *)t[1] + t[2] * element, t + 3 + rank, (const char *)f[1] + f[2] * element,
                   f + 3 + rank, f + 3);
}

/* hivm.hir.pointer_cast: an address read from memory becomes a memref of one dimension. */
typedef struct {
    void *allocated, *aligned;
    int64_t offset, size, stride;
} Memref1;

HIDDEN void _mlir_ciface_cam_pointer_cast(Memref1 *result, int64_t address, int64_t size) {
    result->allocated = result->aligned = (void *)address;
    result->offset = 0;
    result->size = size;
    result->stride = 1;
}

/* tl.debug_barrier(): on the device pipe_barrier[PIPE_ALL]. The call is opaque to LLVM, so no load or store moves
 * across it and a polling loop that contains it reads memory every time. */
HIDDEN void cam_fence(void) { __sync_synchronize(); }

/* Called by the launcher before each program id. */
EXPORTED void cam_begin_program(void) {
    current = first;
    if (current) current->used = 0;
}

/* Gives a thread's scratch memory back. */
EXPORTED void cam_release_scratch(void) {
    while (first) {
        Chunk *next = first->next;
        free(first);
        first = next;
    }
    current = NULL;
}
