// As much of XLA's side of the FFI as the handlers use: a call frame, a stream, a thread pool and errors. With it a
// program calls them as XLA does, without JAX.

#ifndef OPTAX_LOWPREC_DRIVER_RUNTIME_H_
#define OPTAX_LOWPREC_DRIVER_RUNTIME_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

// The type is XLA's to define.
struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};

namespace optax_lowprec::driver {

class ThreadPool {
 public:
  explicit ThreadPool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~ThreadPool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void Schedule(XLA_FFI_Task* task, void* data) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.emplace_back(task, data);
    }
    wake_.notify_one();
  }
  int64_t size() const { return static_cast<int64_t>(threads_.size()); }

 private:
  // Every task is run, also those that are left when the pool closes: each owns its data.
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const auto [task, data] = tasks_.front();
      tasks_.pop_front();
      lock.unlock();
      task(data);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::pair<XLA_FFI_Task*, void*>> tasks_;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

// What a handler gets from its execution context; which of the two depends on the platform.
struct Context {
  void* stream = nullptr;
  ThreadPool* pool = nullptr;
};

inline const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api a = {};
    a.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    a.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    a.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->message, args->errc};
    };
    a.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    a.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = reinterpret_cast<Context*>(args->ctx)->stream;
      return nullptr;
    };
    a.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
      reinterpret_cast<Context*>(args->ctx)->pool->Schedule(args->task, args->data);
      return nullptr;
    };
    a.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
      *args->num_threads = reinterpret_cast<Context*>(args->ctx)->pool->size();
      return nullptr;
    };
    return a;
  }();
  return &api;
}

struct Buffer {
  void* data;
  XLA_FFI_DataType dtype;
  int64_t count;
};

struct Outcome {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;
  bool ok() const { return code == XLA_FFI_Error_Code_OK; }
};

// One call of a handler. Every table has exactly as many entries as the frame says, so that AddressSanitizer sees a
// read beyond them.
struct Call {
  std::vector<Buffer> args, rets;
  std::vector<int64_t> leaves;  // attribute
  int64_t tensor = 0;           // attribute of the step
  bool with_tensor = true;

  Outcome Run(XLA_FFI_Handler* handler, Context context,
              XLA_FFI_ExecutionStage stage = XLA_FFI_ExecutionStage_EXECUTE) const {
    std::vector<XLA_FFI_Buffer> buffers(args.size() + rets.size());
    std::vector<int64_t> dims(buffers.size());
    std::vector<void*> arg_pointers, ret_pointers;
    for (size_t i = 0; i < buffers.size(); ++i) {
      const bool is_arg = i < args.size();
      const Buffer& b = is_arg ? args[i] : rets[i - args.size()];
      dims[i] = b.count;
      buffers[i] = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, b.dtype, b.data, 1, &dims[i]};
      (is_arg ? arg_pointers : ret_pointers).push_back(&buffers[i]);
    }
    std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);

    // Sorted by name.
    XLA_FFI_ByteSpan leaves_name = {"leaves", 6};
    XLA_FFI_ByteSpan tensor_name = {"tensor", 6};
    std::vector<int64_t> numbers = leaves;
    int64_t tensor_value = tensor;
    XLA_FFI_Array array = {XLA_FFI_DataType_S64, numbers.size(), numbers.data()};
    XLA_FFI_Scalar scalar = {XLA_FFI_DataType_S64, &tensor_value};
    std::vector<XLA_FFI_AttrType> attr_types = {XLA_FFI_AttrType_ARRAY};
    std::vector<XLA_FFI_ByteSpan*> names = {&leaves_name};
    std::vector<void*> attrs = {&array};
    if (with_tensor) {
      attr_types.push_back(XLA_FFI_AttrType_SCALAR);
      names.push_back(&tensor_name);
      attrs.push_back(&scalar);
    }

    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = Api();
    frame.ctx = reinterpret_cast<decltype(frame.ctx)>(&context);
    frame.stage = stage;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), arg_types.data(),
                  arg_pointers.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()), ret_types.data(),
                  ret_pointers.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<int64_t>(attrs.size()), attr_types.data(),
                   names.data(), attrs.data()};
    const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
    return error ? Outcome{error->code, error->message} : Outcome{};
  }
};

// What XLA asks a handler for when it is registered.
inline XLA_FFI_Metadata MetadataOf(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.extension_start = &extension.extension_base;
  const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  return error ? XLA_FFI_Metadata{} : metadata;
}

}  // namespace optax_lowprec::driver

#endif  // OPTAX_LOWPREC_DRIVER_RUNTIME_H_
