// Where a library's operands live: on the host, or on the GPU.

#ifndef OPTAX_LOWPREC_DRIVER_MEMORY_H_
#define OPTAX_LOWPREC_DRIVER_MEMORY_H_

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#if defined(OLP_DRIVER_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace optax_lowprec::driver {

[[noreturn]] inline void Die(const char* what, const char* why) {
  std::fprintf(stderr, "%s: %s\n", what, why);
  std::exit(2);
}

class Memory {
 public:
  virtual ~Memory() = default;
  // Exactly `bytes`, so that sanitizers see a step beyond the end; aligned as XLA's buffers are.
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* data) = 0;
  virtual void Put(void* to, const void* host, size_t bytes) = 0;
  virtual void Get(void* host, const void* from, size_t bytes) = 0;
  virtual void Copy(void* to, const void* from, size_t bytes) = 0;
  virtual void Wait() = 0;
  virtual void* stream() const { return nullptr; }
};

class HostMemory : public Memory {
 public:
  void* Allocate(size_t bytes) override {
    void* data = nullptr;
    if (posix_memalign(&data, 64, bytes ? bytes : 1) != 0) Die("memory", "none left");
    return data;
  }
  void Free(void* data) override { std::free(data); }
  void Put(void* to, const void* host, size_t bytes) override { Copy(to, host, bytes); }
  void Get(void* host, const void* from, size_t bytes) override { Copy(host, from, bytes); }
  void Copy(void* to, const void* from, size_t bytes) override {
    if (bytes) std::memcpy(to, from, bytes);
  }
  void Wait() override {}
};

#if defined(OLP_DRIVER_CUDA)
inline void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) Die(what, cudaGetErrorString(error));
}

class DeviceMemory : public Memory {
 public:
  DeviceMemory() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  ~DeviceMemory() override { cudaStreamDestroy(stream_); }
  void* Allocate(size_t bytes) override {
    void* data = nullptr;
    Check(cudaMalloc(&data, bytes ? bytes : 1), "cudaMalloc");
    return data;
  }
  void Free(void* data) override { Check(cudaFree(data), "cudaFree"); }
  void Put(void* to, const void* host, size_t bytes) override { Move(to, host, bytes, cudaMemcpyHostToDevice); }
  void Get(void* host, const void* from, size_t bytes) override { Move(host, from, bytes, cudaMemcpyDeviceToHost); }
  void Copy(void* to, const void* from, size_t bytes) override { Move(to, from, bytes, cudaMemcpyDeviceToDevice); }
  void Wait() override { Check(cudaStreamSynchronize(stream_), "kernels"); }
  void* stream() const override { return stream_; }

 private:
  void Move(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (bytes) Check(cudaMemcpyAsync(to, from, bytes, kind, stream_), "cudaMemcpy");
    Wait();
  }
  cudaStream_t stream_;
};
#endif

inline std::unique_ptr<Memory> MemoryFor(bool cuda) {
  if (!cuda) return std::make_unique<HostMemory>();
#if defined(OLP_DRIVER_CUDA)
  return std::make_unique<DeviceMemory>();
#else
  Die("driver", "built without CUDA");
#endif
}

// An allocation; `offset` bytes before the data make them misaligned.
class Block {
 public:
  Block(Memory& memory, size_t bytes, size_t offset = 0)
      : memory_(&memory), start_(memory.Allocate(bytes + offset)), bytes_(bytes), offset_(offset) {}
  Block(Block&& other) noexcept
      : memory_(other.memory_), start_(std::exchange(other.start_, nullptr)), bytes_(other.bytes_),
        offset_(other.offset_) {}
  Block& operator=(Block&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(start_, other.start_);
    std::swap(bytes_, other.bytes_);
    std::swap(offset_, other.offset_);
    return *this;
  }
  ~Block() {
    if (start_) memory_->Free(start_);
  }
  char* data() const { return static_cast<char*>(start_) + offset_; }
  size_t bytes() const { return bytes_; }

 private:
  Memory* memory_;
  void* start_;
  size_t bytes_, offset_;
};

}  // namespace optax_lowprec::driver

#endif  // OPTAX_LOWPREC_DRIVER_MEMORY_H_
