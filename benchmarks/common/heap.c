// Counts live heap blocks of at least 64 KiB from any thread: tensors, and the buffers of the network layer.
// cc -O2 -shared -fPIC heap.c -o heap.so; LD_PRELOAD=heap.so python ...; smaller blocks are not seen.
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static const size_t smallest = 1 << 16;
static atomic_long live, peak;

static void *counted(void *block) {
    size_t bytes = block ? malloc_usable_size(block) : 0;
    if (bytes >= smallest) {
        long now = atomic_fetch_add(&live, (long)bytes) + (long)bytes, most = atomic_load(&peak);
        while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {
        }
    }
    return block;
}

static void forget(void *block) {
    size_t bytes = block ? malloc_usable_size(block) : 0;
    if (bytes >= smallest) atomic_fetch_sub(&live, (long)bytes);
}

void *malloc(size_t bytes) { return counted(__libc_malloc(bytes)); }
void *calloc(size_t count, size_t bytes) { return counted(__libc_calloc(count, bytes)); }
void *memalign(size_t align, size_t bytes) { return counted(__libc_memalign(align, bytes)); }
void *aligned_alloc(size_t align, size_t bytes) { return counted(__libc_memalign(align, bytes)); }

void *realloc(void *old, size_t bytes) {
    forget(old);
    return counted(__libc_realloc(old, bytes));
}

int posix_memalign(void **out, size_t align, size_t bytes) {
    void *block = counted(__libc_memalign(align, bytes));
    if (!block) return ENOMEM;
    *out = block;
    return 0;
}

void free(void *block) {
    forget(block);
    __libc_free(block);
}

long heap_live_bytes(void) { return atomic_load(&live); }
long heap_peak_bytes(void) { return atomic_load(&peak); }
void heap_reset_peak(void) { atomic_store(&peak, atomic_load(&live)); }
