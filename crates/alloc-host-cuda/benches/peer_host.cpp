// PyTorch's pinned allocator on the work of `benches/pinned/main.rs`: drives it through its C++ interface
// and prints one JSON line a measurement. Build: see build_peer_host.sh. Needs a CUDA GPU.
//
//   peer_host hit BYTES N                      allocate and free one size          -> ns a pair
//   peer_host recorded BYTES N                 the same with one recorded use      -> ns a pair
//   peer_host threads T SLOTS STEPS MAXLOG     T threads, random slots and sizes   -> million steps/s
//   peer_host pin BYTES                        first request, and plain cudaHostAlloc -> ms
//   peer_host copy BYTES h2d|d2h               copies one after the other          -> GB/s
//   peer_host all                              all of the above, as that bench does
//
// PYTORCH_CUDA_ALLOC_CONF applies (pinned_use_cuda_host_register, pinned_num_register_threads, ...).
#include <ATen/Context.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 8
#include <ATen/core/CachingHostAllocator.h>
#define HAS_HOST_ALLOCATOR
#else
#include <ATen/cuda/CachingHostAllocator.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;

static double nanos(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::nano>(to - from).count();
}

#define CHECK(call)                                                       \
  do {                                                                    \
    cudaError_t error = (call);                                           \
    if (error) {                                                          \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));      \
      exit(1);                                                            \
    }                                                                     \
  } while (0)

static at::DataPtr allocate(size_t bytes) {
#ifdef HAS_HOST_ALLOCATOR
  return at::getHostAllocator(at::kCUDA)->allocate(bytes);
#else
  return at::cuda::getCachingHostAllocator()->allocate(bytes);
#endif
}

static void record(const at::DataPtr& data, const c10::cuda::CUDAStream& stream) {
#ifdef HAS_HOST_ALLOCATOR
  at::getHostAllocator(at::kCUDA)->record_event(data.get(), data.get_context(), stream.unwrap());
#else
  at::cuda::CachingHostAllocator_recordEvent(data.get(), data.get_context(), stream);
#endif
}

static void print(const std::string& name, const char* unit, double value) {
  const char* conf = getenv("PYTORCH_CUDA_ALLOC_CONF");
  printf("{\"policy\":\"torch %s\",\"conf\":\"%s\",\"name\":\"%s\",\"%s\":%.2f}\n", TORCH_VERSION,
         conf ? conf : "", name.c_str(), unit, value);
  fflush(stdout);
}

static c10::cuda::CUDAStream new_stream() {
  cudaStream_t raw;
  CHECK(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking));
  return c10::cuda::getStreamFromExternal(raw, 0);
}

template <class Round>
static double nanos_per_round(long rounds, Round round) {
  for (long i = 0; i < rounds / 10 + 1; i++) round();
  auto start = Clock::now();
  for (long i = 0; i < rounds; i++) round();
  return nanos(start, Clock::now()) / rounds;
}

static void hit(size_t bytes, long rounds) {
  double value = nanos_per_round(rounds, [&] { at::DataPtr data = allocate(bytes); });
  print("hit_" + std::to_string(bytes), "ns_per_pair", value);
}

static void recorded(size_t bytes, long rounds) {
  auto stream = new_stream();
  double value = nanos_per_round(rounds, [&] {
    at::DataPtr data = allocate(bytes);
    record(data, stream);
  });
  CHECK(cudaDeviceSynchronize());
  print("recorded_" + std::to_string(bytes), "ns_per_pair", value);
}

// Knuth's MMIX generator, top 31 bits.
struct Lcg {
  uint64_t state;
  uint32_t next() {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return state >> 33;
  }
};

static size_t draw(Lcg& random, int max_log) {
  int log = 9 + random.next() % (max_log - 9);
  return (size_t(1) << log) + random.next() % (1u << log);
}

static double churn(size_t slots, long steps, int max_log, uint64_t seed) {
  std::vector<at::DataPtr> blocks(slots);
  Lcg random{seed};
  auto run = [&](long count) {
    for (long i = 0; i < count; i++) {
      auto& block = blocks[random.next() % slots];
      block.clear();
      block = allocate(draw(random, max_log));
    }
  };
  run(steps / 2);
  auto start = Clock::now();
  run(steps);
  return nanos(start, Clock::now()) / steps;
}

static void threads(int count, size_t slots, long steps, int max_log) {
  std::vector<std::thread> workers;
  std::vector<double> each(count);
  std::atomic<int> ready{0};
  for (int i = 0; i < count; i++) {
    workers.emplace_back([&, i] {
      CHECK(cudaSetDevice(0));
      ready++;
      while (ready < count) {
      }
      each[i] = churn(slots, steps, max_log, 7 + i);
    });
  }
  for (auto& worker : workers) worker.join();
  double sum = 0;
  for (double one : each) sum += 1e3 / one;
  print("threads_" + std::to_string(count), "mega_steps_per_s", sum);
}

// Has the system provide as much ordinary memory as is going to be pinned, and takes it back: on a
// fresh virtual machine the first use of memory is a matter of the hypervisor.
static void wake_memory() {
  size_t bytes = size_t(5) << 30, count = 16, share = bytes / count;
  char* memory = static_cast<char*>(calloc(bytes, 1));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; i++) {
    threads.emplace_back([=] {
      volatile char* part = memory + i * share;
      for (size_t at = 0; at < share; at += 4096) part[at] = 1;
    });
  }
  for (auto& thread : threads) thread.join();
  free(memory);
}

static void pin(size_t bytes) {
  { at::DataPtr first = allocate(1 << 20); }
  std::string size = std::to_string(bytes >> 30) + "_gib";
  auto start = Clock::now();
  { at::DataPtr data = allocate(bytes);
    print("first_pin_" + size, "ms", nanos(start, Clock::now()) / 1e6); }
  void* plain;
  start = Clock::now();
  CHECK(cudaHostAlloc(&plain, bytes, cudaHostAllocDefault));
  print("cuda_host_alloc_" + size, "ms", nanos(start, Clock::now()) / 1e6);
  CHECK(cudaFreeHost(plain));
}

static void copy(size_t bytes, bool to_device) {
  auto stream = new_stream();
  void* memory;
  CHECK(cudaMalloc(&memory, bytes));
  size_t ring = bytes > (256u << 20) ? 2 : 8;
  std::vector<at::DataPtr> buffers;
  for (size_t i = 0; i < ring; i++) buffers.push_back(allocate(bytes));
  size_t count = std::clamp<size_t>((size_t(8) << 30) / bytes, 8, 4096);
  auto run = [&](size_t rounds) {
    for (size_t i = 0; i < rounds; i++) {
      void* host = buffers[i % ring].get();
      if (to_device) {
        CHECK(cudaMemcpyAsync(memory, host, bytes, cudaMemcpyHostToDevice, stream.stream()));
      } else {
        CHECK(cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, stream.stream()));
      }
    }
    CHECK(cudaStreamSynchronize(stream.stream()));
  };
  run(ring);
  auto start = Clock::now();
  run(count);
  double seconds = nanos(start, Clock::now()) / 1e9;
  std::string way = to_device ? "h2d" : "d2h";
  print("copy_" + way + "_" + std::to_string(bytes >> 20) + "_mib", "gb_per_s",
        double(count) * bytes / seconds / 1e9);
  buffers.clear();
  CHECK(cudaFree(memory));
}

static void all() {
  for (size_t bytes : {4096, 65536, 1 << 20, 16 << 20, 64 << 20}) {
    hit(bytes, 1000000);
    recorded(bytes, 200000);
  }
  for (int count : {1, 4, 16}) threads(count, 64, 1000000, 20);
  wake_memory();
  for (size_t gib : {1, 4}) pin(gib << 30);
  for (size_t mib : {1, 4, 16, 64, 256, 1024}) {
    copy(mib << 20, true);
    copy(mib << 20, false);
  }
}

int main(int argc, char** argv) {
  std::string mode = argc > 1 ? argv[1] : "all";
  auto number = [&](int i) -> long {
    if (i >= argc) {
      fprintf(stderr, "usage: see the top of peer_host.cpp\n");
      exit(2);
    }
    return atol(argv[i]);
  };
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  CHECK(cudaSetDevice(0));
  CHECK(cudaFree(nullptr));
  if (mode == "hit") hit(number(2), number(3));
  else if (mode == "recorded") recorded(number(2), number(3));
  else if (mode == "threads") threads(number(2), number(3), number(4), number(5));
  else if (mode == "pin") wake_memory(), pin(number(2));
  else if (mode == "copy") copy(number(2), argc > 3 && !strcmp(argv[3], "h2d"));
  else if (mode == "all") all();
  else {
    fprintf(stderr, "unknown mode %s\n", mode.c_str());
    return 2;
  }
  // PyTorch's own teardown is no part of this.
  fflush(stdout);
  _Exit(0);
}
