// The CPU library's FFI handlers: they split the leaves of a call into pieces of work for XLA's thread pool.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "call_frame.h"
#include "cpu_kernel.h"

namespace optax_lowprec {
namespace {

// Elements of a piece of work: large enough to hide what it costs to hand out.
constexpr int64_t kPiece = 32768;

struct Piece {
  const Leaf* leaf;
  int64_t begin, end;
  int64_t unit;
};

const CpuKernel& Kernel() {
#if defined(OLP_X86_VARIANTS)
  static const CpuKernel& best = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
                                     ? kCpuAvx512
                                 : __builtin_cpu_supports("avx2") ? kCpuAvx2
                                                                  : kCpuBaseline;
  return best;
#else
  return kCpuBaseline;
#endif
}

std::vector<Piece> Split(const std::vector<Leaf>& leaves) {
  std::vector<Piece> pieces;
  for (const Leaf& leaf : leaves) {
    if (leaf.size == 0) continue;
    int64_t unit = UnitOf(leaf);
    if (unit < kTile) unit *= kTile / unit;
    // Whole rows where they are short, else whole units of a row.
    if (leaf.row <= kPiece) {
      const int64_t length = kPiece / leaf.row * leaf.row;
      for (int64_t begin = 0; begin < leaf.size; begin += length) {
        pieces.push_back({&leaf, begin, std::min(leaf.size, begin + length), unit});
      }
    } else {
      const int64_t length = unit < kPiece ? kPiece / unit * unit : unit;
      for (int64_t row = 0; row < leaf.size; row += leaf.row) {
        for (int64_t begin = 0; begin < leaf.row; begin += length) {
          pieces.push_back({&leaf, row + begin, row + std::min(leaf.row, begin + length), unit});
        }
      }
    }
  }
  return pieces;
}

// Runs task(0) ... task(count - 1) on the pool and the calling thread. The caller works too and waits only for tasks
// that someone has begun, so a pool that is busy, or that this very thread belongs to, cannot block it.
void ParallelFor(ffi::ThreadPool& pool, int64_t count, std::function<void(int64_t)> task) {
  struct Shared {
    std::function<void(int64_t)> task;
    int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable all_done;

    void Work() {
      for (int64_t i; (i = next.fetch_add(1)) < count;) {
        task(i);
        if (done.fetch_add(1) + 1 == count) {
          const std::lock_guard<std::mutex> lock(mutex);
          all_done.notify_all();
        }
      }
    }
  };
  // Owned by the scheduled tasks as well: one that starts late finds nothing to do, after this call has returned.
  const auto shared = std::make_shared<Shared>();
  shared->task = std::move(task);
  shared->count = count;
  const int64_t helpers = std::min(count, pool.num_threads()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->Work(); });
  shared->Work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done.load() == shared->count; });
}

void Copy(void* to, const void* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

void SkipLeaf(const Leaf& leaf) {
  for (const Part& part : leaf.part) {
    Copy(part.out, part.in, leaf.size * Bytes(part.dtype));
    Copy(part.scale_out, part.scale_in, ScaleCount(leaf, part) * sizeof(float));
  }
  const int64_t bytes = leaf.size * Bytes(leaf.out_dtype);
  if (leaf.flags & kFused) {
    Copy(leaf.out, leaf.p, bytes);
  } else if (bytes > 0) {
    std::memset(leaf.out, 0, bytes);
  }
}

Hyper ReadHyper(const void* words) {
  Hyper hyper;
  std::memcpy(&hyper, words, sizeof(hyper));
  return hyper;
}

ffi::Error HandleStep(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Span<const int64_t> numbers, int64_t tensor) {
  CallFrame frame(args, rets);
  if (ffi::Error e = frame.ParseStep(numbers, tensor != 0); e.failure()) return e;
  const Hyper hyper = ReadHyper(frame.words());

  std::vector<Leaf> leaves;
  for (const Leaf& leaf : frame.leaves()) {
    if (hyper.skip && (leaf.flags & kSkippable)) {
      SkipLeaf(leaf);
    } else {
      leaves.push_back(leaf);
    }
  }
  // Blocks in a unit, for the kernel's scratch.
  int64_t blocks = kTile;
  for (const Leaf& leaf : leaves) {
    for (const Part& part : leaf.part) {
      if (part.scaling == kBlock) blocks = std::max(blocks, UnitOf(leaf) / part.block + 1);
    }
  }
  const std::vector<Piece> pieces = Split(leaves);
  ParallelFor(pool, static_cast<int64_t>(pieces.size()), [&, absmax = frame.absmax()](int64_t i) {
    thread_local std::vector<float> scratch;
    scratch.resize(std::max<size_t>(scratch.size(), kParts * blocks));
    const Piece& piece = pieces[i];
    Kernel().step(*piece.leaf, hyper, absmax ? absmax + kParts * piece.leaf->slot : nullptr, piece.unit, piece.begin,
                  piece.end, scratch.data(), blocks);
  });
  // Only now: until the last element is read, the old scale may be needed.
  for (const Leaf& leaf : leaves) {
    for (int k = 0; k < kParts; ++k) {
      const Part& part = leaf.part[k];
      if (part.scaling == kTensor) {
        *part.scale_out = ScaleOf(frame.absmax()[kParts * leaf.slot + k], SpecOf(part.dtype)).scale;
      }
    }
  }
  return ffi::Error::Success();
}

ffi::Error HandleAbsmax(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Span<const int64_t> numbers) {
  CallFrame frame(args, rets);
  if (ffi::Error e = frame.ParseAbsmax(numbers); e.failure()) return e;
  const Hyper hyper = ReadHyper(frame.words());
  const std::vector<Piece> pieces = Split(frame.leaves());
  std::fill_n(frame.absmax_out(), kParts * frame.leaf_count(), 0.0f);
  std::mutex mutex;
  ParallelFor(pool, static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Piece& piece = pieces[i];
    float absmax[kParts] = {};
    Kernel().absmax(*piece.leaf, hyper, piece.begin, piece.end, absmax);
    const std::lock_guard<std::mutex> lock(mutex);
    for (int k = 0; k < kParts; ++k) {
      float& all = frame.absmax_out()[kParts * piece.leaf->slot + k];
      all = std::max(all, absmax[k]);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace optax_lowprec

OLP_EXPORT XLA_FFI_Error* OptaxLowprecStep(XLA_FFI_CallFrame*);
OLP_EXPORT XLA_FFI_Error* OptaxLowprecAbsmax(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(OptaxLowprecStep, optax_lowprec::HandleStep,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("leaves")
                                  .Attr<int64_t>("tensor"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(OptaxLowprecAbsmax, optax_lowprec::HandleAbsmax,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("leaves"));

OLP_EXPORT int optax_lowprec_ffi_api_version(void) { return optax_lowprec::kFfiApiVersion; }
