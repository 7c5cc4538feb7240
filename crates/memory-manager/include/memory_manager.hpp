// The memory manager for C++: the functions of memory_manager.h as a class.
#ifndef MEMORY_MANAGER_HPP
#define MEMORY_MANAGER_HPP

#include "memory_manager.h"

#include <cstddef>
#include <stdexcept>

namespace memory_manager {

enum class DeviceAllocatorMode {
    CACHING = MM_MODE_CACHING,
    ASYNC_STREAM_ORDERED = MM_MODE_ASYNC_STREAM_ORDERED,
    CUDA_ASYNC_POOL = MM_MODE_CUDA_ASYNC_POOL,
};

// A failed call; status() says of which kind.
class Error : public std::runtime_error {
public:
    explicit Error(mm_status status) : std::runtime_error(mm_last_error()), status_(status) {}
    mm_status status() const { return status_; }

private:
    mm_status status_;
};

// All methods may be called from any thread. Allocations, settings and frees throw Error; the copies
// return a status, as the runtime's do.
class MemoryManager {
public:
    // The manager of the process.
    static MemoryManager &getInstance() {
        static MemoryManager instance;
        return instance;
    }

    // A view of a manager that somebody else owns.
    explicit MemoryManager(const mm_manager *manager) : manager_(manager) {}

    void *allocatePinned(std::size_t size) {
        void *memory = nullptr;
        check(mm_allocate_pinned(manager_, size, &memory));
        return memory;
    }
    void freePinned(void *ptr) { check(mm_free_pinned(manager_, ptr)); }

    void *allocateDevice(std::size_t size) {
        void *memory = nullptr;
        check(mm_allocate_device(manager_, size, &memory));
        return memory;
    }
    void *allocateDevice(std::size_t size, mm_stream stream) {
        void *memory = nullptr;
        check(mm_allocate_device_on(manager_, size, stream, &memory));
        return memory;
    }
    void freeDevice(void *ptr) { check(mm_free_device(manager_, ptr)); }
    void freeDevice(void *ptr, mm_stream stream) {
        check(mm_free_device_on(manager_, ptr, stream));
    }

    mm_status copyToDeviceAsync(void *dst, const void *src, std::size_t size, mm_stream stream) {
        return mm_copy_to_device_async(manager_, dst, src, size, stream);
    }
    mm_status copyToHostAsync(void *dst, const void *src, std::size_t size, mm_stream stream) {
        return mm_copy_to_host_async(manager_, dst, src, size, stream);
    }

    void setPinnedPoolSize(std::size_t size) { check(mm_set_pinned_pool_size(manager_, size)); }
    void setDevicePoolSize(std::size_t size) { check(mm_set_device_pool_size(manager_, size)); }

    void setDeviceAllocatorMode(DeviceAllocatorMode mode) {
        check(mm_set_device_allocator_mode(manager_, static_cast<mm_mode>(mode)));
    }
    DeviceAllocatorMode getRequestedDeviceAllocatorMode() const {
        mm_mode mode = 0;
        check(mm_requested_device_allocator_mode(manager_, &mode));
        return static_cast<DeviceAllocatorMode>(mode);
    }
    DeviceAllocatorMode getEffectiveDeviceAllocatorMode() const {
        mm_mode mode = 0;
        check(mm_effective_device_allocator_mode(manager_, &mode));
        return static_cast<DeviceAllocatorMode>(mode);
    }
    bool supportsAsyncDeviceAllocator() const {
        int supported = 0;
        check(mm_supports_async_device_allocator(manager_, &supported));
        return supported != 0;
    }

    void shutdown() { check(mm_shutdown(manager_, nullptr, nullptr)); }

private:
    MemoryManager() { check(mm_instance(&manager_)); }

    static void check(mm_status status) {
        if (status != MM_OK) throw Error(status);
    }

    const mm_manager *manager_ = nullptr;
};

} // namespace memory_manager

#endif
