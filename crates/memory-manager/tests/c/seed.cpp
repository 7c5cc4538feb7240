// The example of the interface's first description, in C++, on the imitation of the driver.
#define MM_WITH_IMITATION
#include "memory_manager.hpp"

#include <cstdio>
#include <cstring>

using namespace memory_manager;

int main() {
    const mm_manager *own = nullptr;
    if (mm_create_on_imitation(1ull << 30, 1, &own) != MM_OK) return 1;
    MemoryManager mm(own);
    mm.setPinnedPoolSize(128 * 1024 * 1024);
    mm.setDevicePoolSize(512 * 1024 * 1024);
    const std::size_t size = 1 << 16;
    for (auto mode : {DeviceAllocatorMode::CACHING, DeviceAllocatorMode::ASYNC_STREAM_ORDERED,
                      DeviceAllocatorMode::CUDA_ASYNC_POOL}) {
        mm.setDeviceAllocatorMode(mode);
        if (mm.getEffectiveDeviceAllocatorMode() != mode) return 2;
        if (mm.getRequestedDeviceAllocatorMode() != mode) return 3;
        mm_stream stream = nullptr;
        if (mm_stream_create(own, &stream) != MM_OK) return 4;
        void *h_data = mm.allocatePinned(size);
        void *d_data = mm.allocateDevice(size);
        std::memset(h_data, 0x5a, size);
        if (mm.copyToDeviceAsync(d_data, h_data, size, stream) != MM_OK) return 5;
        if (mm_stream_synchronize(own, stream) != MM_OK) return 6;
        std::memset(h_data, 0, size);
        if (mm.copyToHostAsync(h_data, d_data, size, stream) != MM_OK) return 7;
        if (mm_stream_synchronize(own, stream) != MM_OK) return 8;
        for (std::size_t i = 0; i < size; i++)
            if (static_cast<unsigned char *>(h_data)[i] != 0x5a) return 9;
        mm.freeDevice(d_data);
        mm.freePinned(h_data);
        void *on_stream = mm.allocateDevice(size, stream);
        mm.freeDevice(on_stream, stream);
        mm_stream_destroy(own, stream);
    }
    if (!mm.supportsAsyncDeviceAllocator()) return 10;
    try {
        mm.freeDevice(&mm);
        return 11;
    } catch (const Error &error) {
        if (error.status() != MM_UNKNOWN_ADDRESS) return 12;
    }
    mm.shutdown();
    std::puts("the story ended well");
    return 0;
}
