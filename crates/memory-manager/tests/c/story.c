/* Every function of the C interface, on the imitation of the driver. */
#define MM_WITH_IMITATION
#include "memory_manager.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                        \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, mm_last_error()); \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)
#define EXPECT(status, call) CHECK((call) == (status))

enum { SIZE = 1 << 20 };

static void fill(unsigned char *bytes, unsigned seed) {
    for (unsigned i = 0; i < SIZE; i++) bytes[i] = (unsigned char)(i * 2654435761u >> 13 ^ seed);
}

static void check_filled(const unsigned char *bytes, unsigned seed) {
    for (unsigned i = 0; i < SIZE; i++)
        CHECK(bytes[i] == (unsigned char)(i * 2654435761u >> 13 ^ seed));
}

static void copies(const mm_manager *mm, mm_mode mode, mm_mode effective) {
    mm_mode answer = -1;
    EXPECT(MM_OK, mm_set_device_allocator_mode(mm, mode));
    EXPECT(MM_OK, mm_requested_device_allocator_mode(mm, &answer));
    CHECK(answer == mode);
    EXPECT(MM_OK, mm_effective_device_allocator_mode(mm, &answer));
    CHECK(answer == effective);

    void *host = NULL, *back = NULL, *device = NULL, *other = NULL;
    mm_stream stream = NULL;
    EXPECT(MM_OK, mm_stream_create(mm, &stream));
    EXPECT(MM_OK, mm_allocate_pinned(mm, SIZE, &host));
    EXPECT(MM_OK, mm_allocate_pinned_on(mm, SIZE, stream, &back));
    EXPECT(MM_OK, mm_allocate_device(mm, SIZE, &device));
    EXPECT(MM_OK, mm_allocate_device_on(mm, 2 * SIZE, stream, &other));
    fill(host, (unsigned)mode);
    memset(back, 0, SIZE);
    EXPECT(MM_OK, mm_record_use(mm, device, stream));
    EXPECT(MM_OK, mm_copy_to_device_async(mm, device, host, SIZE, stream));
    EXPECT(MM_OK, mm_copy_to_host_async(mm, back, device, SIZE, stream));
    EXPECT(MM_OK, mm_stream_synchronize(mm, stream));
    check_filled(back, (unsigned)mode);
    /* Into the middle of one allocation, from the middle of another. */
    EXPECT(MM_OK, mm_copy_to_device_async(mm, (char *)other + SIZE, host, SIZE, stream));
    EXPECT(MM_OK, mm_copy_to_host_async(mm, (char *)back + 100, (char *)other + SIZE + 100,
                                        SIZE - 100, stream));
    EXPECT(MM_OK, mm_stream_synchronize(mm, stream));
    check_filled(back, (unsigned)mode);

    EXPECT(MM_OUT_OF_RANGE, mm_copy_to_device_async(mm, device, host, SIZE + 1, stream));
    EXPECT(MM_ZERO_SIZE, mm_copy_to_device_async(mm, device, host, 0, stream));
    EXPECT(MM_UNKNOWN_ADDRESS, mm_copy_to_device_async(mm, host, device, 1, stream));
    EXPECT(MM_UNKNOWN_ADDRESS, mm_free_device(mm, host));
    EXPECT(MM_OK, mm_free_device_on(mm, other, stream));
    EXPECT(MM_OK, mm_free_device(mm, device));
    EXPECT(MM_UNKNOWN_ADDRESS, mm_free_device(mm, device));
    CHECK(strstr(mm_last_error(), "freed before") != NULL);
    EXPECT(MM_OK, mm_free_pinned(mm, host));
    EXPECT(MM_OK, mm_free_pinned_on(mm, back, stream));
    EXPECT(MM_OK, mm_stream_destroy(mm, stream));
    EXPECT(MM_INVALID_ARGUMENT, mm_stream_destroy(mm, stream));
}

static int released;

static void release(void *context) {
    released++;
    free(context);
}

static void data_pointers(const mm_manager *mm) {
    mm_data_ptr pointer;
    EXPECT(MM_OK, mm_device_data(mm, 1000, NULL, &pointer));
    CHECK(pointer.data && pointer.context && pointer.deleter);
    CHECK(pointer.device_type == 1 && pointer.device_index == 0);
    pointer.deleter(pointer.context);
    EXPECT(MM_OK, mm_pinned_data(mm, 1000, &pointer));
    CHECK(pointer.device_type == 0);
    memset(pointer.data, 7, 1000);
    EXPECT(MM_OK, mm_data_release(&pointer));
    CHECK(!pointer.data && !pointer.context && !pointer.deleter);
    EXPECT(MM_OK, mm_data_release(&pointer));
    /* One of ours, through Rust and back to our own deleter. */
    mm_data_ptr own = {NULL, malloc(10), release, 0, 0};
    EXPECT(MM_OK, mm_data_release(&own));
    CHECK(released == 1);
    EXPECT(MM_INVALID_ARGUMENT, mm_data_release(NULL));
}

static void arguments(const mm_manager *mm) {
    void *memory = NULL;
    EXPECT(MM_INVALID_ARGUMENT, mm_allocate_pinned(NULL, 1, &memory));
    EXPECT(MM_INVALID_ARGUMENT, mm_allocate_pinned(mm, 1, NULL));
    EXPECT(MM_INVALID_ARGUMENT, mm_set_device_allocator_mode(mm, 3));
    EXPECT(MM_INVALID_ARGUMENT, mm_set_device_allocator_mode(mm, -1));
    EXPECT(MM_ZERO_SIZE, mm_allocate_pinned(mm, 0, &memory));
    EXPECT(MM_ZERO_SIZE, mm_allocate_device(mm, 0, &memory));
    EXPECT(MM_TOO_LARGE, mm_allocate_device(mm, UINT64_MAX, &memory));
    EXPECT(MM_OUT_OF_MEMORY, mm_allocate_device(mm, (uint64_t)1 << 40, &memory));
    EXPECT(MM_POOL_IN_USE, mm_set_device_pool_size(mm, 1));
    EXPECT(MM_POOL_IN_USE, mm_set_release_threshold(mm, 1));
    EXPECT(MM_OK, mm_free_pinned(mm, NULL));
    EXPECT(MM_OK, mm_free_device(mm, NULL));
    EXPECT(MM_INVALID_ARGUMENT, mm_stream_retire(mm, NULL));
    CHECK(memory == NULL);
}

static void instance(void) {
    const mm_manager *first = NULL, *second = NULL;
    mm_status status = mm_instance(&first);
    if (status != MM_OK) { /* no GPU here */
        CHECK(status == MM_DEVICE_LOST && strlen(mm_last_error()) > 0 && first == NULL);
        return;
    }
    EXPECT(MM_OK, mm_instance(&second));
    CHECK(first == second);
    EXPECT(MM_INVALID_ARGUMENT, mm_destroy(first));
}

int main(int argc, char **argv) {
    int pools = argc > 1 && strcmp(argv[1], "pools") == 0;
    instance();
    const mm_manager *mm = NULL;
    EXPECT(MM_OK, mm_create_on_imitation(256 << 20, pools, &mm));
    EXPECT(MM_OK, mm_set_pinned_pool_size(mm, 128 << 20));
    EXPECT(MM_OK, mm_set_device_pool_size(mm, 128 << 20));
    EXPECT(MM_OK, mm_set_release_threshold(mm, 64 << 20));
    int supported = -1;
    EXPECT(MM_OK, mm_supports_async_device_allocator(mm, &supported));
    CHECK(supported == pools);
    for (mm_mode mode = 0; mode < 3; mode++) copies(mm, mode, pools ? mode : MM_MODE_CACHING);
    data_pointers(mm);
    arguments(mm);

    EXPECT(MM_OK, mm_trim_device_pools(mm, 0));
    EXPECT(MM_OK, mm_empty_caches(mm));
    mm_stats stats;
    EXPECT(MM_OK, mm_get_stats(mm, &stats));
    CHECK(stats.pinned_allocated == 0 && stats.device_allocated == 0);
    CHECK(stats.pinned_reserved == 0 && stats.device_reserved == 0);
    void *host = NULL, *device = NULL;
    EXPECT(MM_OK, mm_allocate_pinned(mm, 100, &host));
    EXPECT(MM_OK, mm_allocate_device(mm, 200, &device));
    uint64_t pinned_bytes = 0, device_bytes = 0;
    for (int i = 0; i < 2; i++) EXPECT(MM_OK, mm_shutdown(mm, &pinned_bytes, &device_bytes));
    CHECK(pinned_bytes == 100 && device_bytes == 200);
    EXPECT(MM_SHUT_DOWN, mm_free_pinned(mm, host));
    memset(host, 1, 100); /* still ours */
    EXPECT(MM_OK, mm_destroy(mm));
    memset(host, 2, 100);
    EXPECT(MM_OK, mm_destroy(NULL));
    puts("the story ended well");
    return 0;
}
