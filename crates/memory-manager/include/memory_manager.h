/* Pinned and device memory with asynchronous copies: the C interface of memory-manager.
 *
 * Link with libmemory_manager.so, which `cargo build --release -p memory-manager` makes. CUDA is loaded
 * at run time; neither its headers nor its libraries are needed here.
 *
 * Every function may be called from any thread at any time. Each returns MM_OK or says why it failed,
 * and then nothing has changed; mm_last_error has the text. A stream is a cudaStream_t (or CUstream);
 * null is the default stream. A stream of your own must live until mm_stream_retire, which you call
 * just before you destroy it.
 */
#ifndef MEMORY_MANAGER_H
#define MEMORY_MANAGER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_manager mm_manager;
typedef void *mm_stream;

typedef int mm_status;
enum {
    MM_OK = 0,
    MM_OUT_OF_MEMORY = 1,     /* free some, or make the pool larger before its first use */
    MM_ZERO_SIZE = 2,         /* a size of 0 */
    MM_TOO_LARGE = 3,         /* more than any machine has */
    MM_UNKNOWN_ADDRESS = 4,   /* freed before, inside an allocation, or from elsewhere */
    MM_WRONG_STREAM = 5,      /* the stream is of another device than the memory */
    MM_OUT_OF_RANGE = 6,      /* a copy goes past the end of an allocation */
    MM_POOL_IN_USE = 7,       /* the size of a pool is set before its first use only */
    MM_SHUT_DOWN = 8,         /* the manager has been shut down */
    MM_UNSUPPORTED = 9,       /* the device or driver cannot do this */
    MM_DEVICE_LOST = 10,      /* there is no driver or GPU, or it is gone */
    MM_INVALID_ARGUMENT = 11, /* a null pointer or a number that means nothing */
    MM_OTHER = 12,            /* anything else; see the text */
    MM_BUG = 13,              /* a bug of the memory manager */
    MM_CAPTURING = 14         /* the stream is being captured; do it before the capture */
};

typedef int mm_mode;
enum {
    MM_MODE_CACHING = 0,              /* blocks cut from large segments by best fit */
    MM_MODE_ASYNC_STREAM_ORDERED = 1, /* cudaMallocAsync on the device's default pool */
    MM_MODE_CUDA_ASYNC_POOL = 2       /* a cudaMemPool of the manager's own */
};

typedef struct mm_stats {
    uint64_t pinned_allocated; /* bytes that you have */
    uint64_t pinned_reserved;  /* bytes held of the system */
    uint64_t device_allocated;
    uint64_t device_reserved;
} mm_stats;

/* Text of the last failure on this thread, valid until the next one. Never null. */
const char *mm_last_error(void);

/* The manager of the process, on device 0. Never destroyed. */
mm_status mm_instance(const mm_manager **manager);
/* A manager of your own on a device. */
mm_status mm_create(uint16_t device, const mm_manager **manager);
/* Ends a manager of mm_create. Memory that is still out stays valid for ever. Null is nothing. */
mm_status mm_destroy(const mm_manager *manager);

/* Page-locked memory. A null address is freed to no effect. The variants with a stream allocate near
 * its device, and free once its work so far is done. */
mm_status mm_allocate_pinned(const mm_manager *manager, uint64_t bytes, void **memory);
mm_status mm_allocate_pinned_on(const mm_manager *manager, uint64_t bytes, mm_stream stream,
                                void **memory);
mm_status mm_free_pinned(const mm_manager *manager, void *memory);
mm_status mm_free_pinned_on(const mm_manager *manager, void *memory, mm_stream stream);

/* Device memory, for the default stream or for a stream. It is handed out again when the work of its
 * own stream, and of the streams that copies, mm_record_use or the free named, is done. */
mm_status mm_allocate_device(const mm_manager *manager, uint64_t bytes, void **memory);
mm_status mm_allocate_device_on(const mm_manager *manager, uint64_t bytes, mm_stream stream,
                                void **memory);
mm_status mm_free_device(const mm_manager *manager, void *memory);
mm_status mm_free_device_on(const mm_manager *manager, void *memory, mm_stream stream);
/* Call it before work that uses the memory is queued on a stream other than its own. */
mm_status mm_record_use(const mm_manager *manager, void *memory, mm_stream stream);

/* Queued copies between pinned and device memory of this manager. Both ends may be freed at once: the
 * memory is kept until the copy is done. */
mm_status mm_copy_to_device_async(const mm_manager *manager, void *to, const void *from,
                                  uint64_t bytes, mm_stream stream);
mm_status mm_copy_to_host_async(const mm_manager *manager, void *to, const void *from,
                                uint64_t bytes, mm_stream stream);

/* The most that a pool holds; to be set before its first use. */
mm_status mm_set_pinned_pool_size(const mm_manager *manager, uint64_t bytes);
mm_status mm_set_device_pool_size(const mm_manager *manager, uint64_t bytes);
/* What stream-ordered pools keep when the host synchronises; to be set before their first use. */
mm_status mm_set_release_threshold(const mm_manager *manager, uint64_t bytes);
/* Gives unused memory of stream-ordered pools back until each holds `keep_bytes` at most. */
mm_status mm_trim_device_pools(const mm_manager *manager, uint64_t keep_bytes);

/* Where new device memory comes from. What the device lacks falls back: a private pool to the default
 * one, and that to caching. The effective mode says what is used. */
mm_status mm_set_device_allocator_mode(const mm_manager *manager, mm_mode mode);
mm_status mm_requested_device_allocator_mode(const mm_manager *manager, mm_mode *mode);
mm_status mm_effective_device_allocator_mode(const mm_manager *manager, mm_mode *mode);
mm_status mm_supports_async_device_allocator(const mm_manager *manager, int *supported);

/* Gives unused memory back. */
mm_status mm_empty_caches(const mm_manager *manager);
mm_status mm_get_stats(const mm_manager *manager, mm_stats *stats);

/* Ends the manager: later calls say MM_SHUT_DOWN, except this one. Tells how many bytes are still out
 * (either place may be null); they stay valid. */
mm_status mm_shutdown(const mm_manager *manager, uint64_t *pinned_bytes, uint64_t *device_bytes);

/* Streams, for programs without the CUDA runtime. */
mm_status mm_stream_create(const mm_manager *manager, mm_stream *stream);
mm_status mm_stream_synchronize(const mm_manager *manager, mm_stream stream);
mm_status mm_stream_destroy(const mm_manager *manager, mm_stream stream);
/* Just before you destroy a stream of your own that was passed to the manager. */
mm_status mm_stream_retire(const mm_manager *manager, mm_stream stream);

/* A data pointer: what you see, and what is owned. Whoever has it calls the deleter with the context
 * once, on any thread, if the deleter is not null; mm_data_release does so and clears the pointer. */
typedef struct mm_data_ptr {
    void *data;
    void *context;
    void (*deleter)(void *context);
    int device_type; /* 0 is the host, 1 is CUDA */
    int device_index;
} mm_data_ptr;

mm_status mm_device_data(const mm_manager *manager, uint64_t bytes, mm_stream stream,
                         mm_data_ptr *pointer);
mm_status mm_pinned_data(const mm_manager *manager, uint64_t bytes, mm_data_ptr *pointer);
mm_status mm_data_release(mm_data_ptr *pointer);

#ifdef MM_WITH_IMITATION
/* In builds with feature `fake`: a manager on an imitation of the driver, once in a process. */
mm_status mm_create_on_imitation(uint64_t device_bytes, int pools, const mm_manager **manager);
#endif

#ifdef __cplusplus
}
#endif

#endif
