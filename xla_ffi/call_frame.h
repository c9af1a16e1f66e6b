// From the operands, results and attributes of an XLA FFI call to leaves, with every size and dtype checked.

#ifndef OPTAX_LOWPREC_CALL_FRAME_H_
#define OPTAX_LOWPREC_CALL_FRAME_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "core.h"
#include "xla/ffi/api/ffi.h"

namespace optax_lowprec {

namespace ffi = xla::ffi;

// The least number of elements that holds whole blocks of every part, or a row where that is shorter. Without blocks
// the leaf has just one row (see CallFrame::ParseLeaf) and any element can stand alone.
inline int64_t UnitOf(const Leaf& leaf) {
  int64_t unit = 1;
  for (const Part& part : leaf.part) {
    if (part.scaling != kBlock) continue;
    const int64_t factor = part.block / std::gcd(unit, part.block);
    if (factor >= (leaf.row + unit - 1) / unit) return leaf.row;
    unit *= factor;
  }
  return unit;
}

inline int64_t ScaleCount(const Leaf& leaf, const Part& part) {
  if (part.scaling == kBlock) return leaf.size == 0 ? 0 : leaf.size / leaf.row * part.blocks;
  return part.scaling == kTensor ? 1 : 0;
}

// Reads a call's buffers in the order of the interface: `words`, perhaps `absmax`, then each leaf's.
class CallFrame {
 public:
  CallFrame(ffi::RemainingArgs args, ffi::RemainingRets rets) : args_(args), rets_(rets) {}

  // A step: `numbers` describes the leaves.
  ffi::Error ParseStep(ffi::Span<const int64_t> numbers, bool with_absmax) {
    with_results_ = true;
    Scalars(numbers);
    if (with_absmax) absmax_ = static_cast<const float*>(Arg(ffi::DataType::F32, kParts * leaf_count_, "absmax"));
    return Leaves(numbers);
  }

  // The same leaves, but the one result is an absmax for each of their parts.
  ffi::Error ParseAbsmax(ffi::Span<const int64_t> numbers) {
    with_results_ = false;
    Scalars(numbers);
    absmax_out_ = static_cast<float*>(Ret(ffi::DataType::F32, kParts * leaf_count_, "absmax"));
    return Leaves(numbers);
  }

  const void* words() const { return words_; }
  const float* absmax() const { return absmax_; }
  float* absmax_out() const { return absmax_out_; }
  size_t leaf_count() const { return leaf_count_; }
  const std::vector<Leaf>& leaves() const { return leaves_; }

 private:
  static constexpr size_t kLeafNumbers = 13;
  static constexpr size_t kRun = 9;  // the first number of the layout
  static constexpr const char* kPartNames[kParts] = {"mu", "nu", "master"};

  void Scalars(ffi::Span<const int64_t> numbers) {
    leaf_count_ = numbers.size() / kLeafNumbers;
    if (numbers.size() % kLeafNumbers != 0) Fail("`leaves` needs 13 numbers a leaf, not ", numbers.size(), " in all");
    // Where leaves are shards, the words of the step are followed by the position of each one's first element.
    bool shards = false;
    for (size_t i = 0; i < leaf_count_; ++i) shards = shards || numbers.begin()[i * kLeafNumbers + kRun] != 0;
    const size_t bases = shards ? leaf_count_ : 0;
    words_ = Arg(ffi::DataType::U32, static_cast<int64_t>(kHyperWords + bases), "words");
  }

  ffi::Error Leaves(ffi::Span<const int64_t> numbers) {
    for (size_t i = 0; i < leaf_count_ && error_.empty(); ++i) ParseLeaf(numbers.begin() + i * kLeafNumbers, i);
    if (error_.empty() && (next_arg_ != args_.size() || next_ret_ != rets_.size())) {
      Fail("the call has ", args_.size(), " operands and ", rets_.size(), " results, its leaves need ", next_arg_,
           " and ", next_ret_);
    }
    return error_.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument("optax_lowprec: " + error_);
  }

  // `numbers`: flags, the formats of mu, nu and master, row length, their block lengths, index of the leaf, and of a
  // shard its layout.
  void ParseLeaf(const int64_t* numbers, size_t slot) {
    leaf_name_ = "leaf " + std::to_string(numbers[8]) + " ";
    Leaf leaf = {};
    leaf.flags = static_cast<uint32_t>(numbers[0]);
    leaf.index = static_cast<uint32_t>(numbers[8]);
    leaf.slot = static_cast<uint32_t>(slot);
    const auto g = NextArg("gradient");
    if (!error_.empty()) return;
    leaf.size = static_cast<int64_t>(g.count);
    leaf.g = g.data;
    leaf.g_dtype = FloatOf(g.dtype, "gradient");
    if (leaf.flags & kHasParam) {
      const auto p = NextArg("parameter");
      CheckCount(p.count, leaf.size, "parameter");
      leaf.p = p.data;
      leaf.p_dtype = FloatOf(p.dtype, "parameter");
    }
    for (int k = 0; k < kParts; ++k) ParseFormat(numbers[1 + k], leaf.part[k], kPartNames[k]);
    ParseLayout(numbers + kRun, leaf);
    ParseGeometry(numbers[4], numbers + 5, leaf);
    CheckParts(leaf);
    if (!error_.empty()) return;

    for (int k = 0; k < kParts; ++k) {
      Part& part = leaf.part[k];
      if (part.dtype != kAbsent) part.in = Arg(StorageOf(part.dtype), leaf.size, kPartNames[k]);
    }
    for (int k = 0; k < kParts; ++k) {
      Part& part = leaf.part[k];
      if (part.scaling == kUnscaled) continue;
      part.scale_in = static_cast<const float*>(Arg(ffi::DataType::F32, ExpectedScales(leaf, part), "scale"));
    }
    if (with_results_) ParseResults(leaf);
    leaves_.push_back(leaf);
  }

  void ParseResults(Leaf& leaf) {
    const auto out = NextRet("update or parameter");
    if (!error_.empty()) return;
    CheckCount(out.count, leaf.size, "update or parameter");
    leaf.out = out.data;
    leaf.out_dtype = FloatOf(out.dtype, "update or parameter");
    if ((leaf.flags & kFused) && leaf.out_dtype != leaf.p_dtype) Fail("new and old parameter differ in dtype");
    for (int k = 0; k < kParts; ++k) {
      Part& part = leaf.part[k];
      if (part.dtype != kAbsent) part.out = Ret(StorageOf(part.dtype), leaf.size, kPartNames[k]);
    }
    for (Part& part : leaf.part) {
      if (part.scaling == kUnscaled) continue;
      part.scale_out = static_cast<float*>(Ret(ffi::DataType::F32, ExpectedScales(leaf, part), "scale"));
    }
  }

  void ParseFormat(int64_t number, Part& part, const char* name) {
    const int64_t dtype = number & 15;
    const int64_t scaling = (number >> 4) & 3;
    if (dtype > kAbsent || scaling > kTensor || number >> 8) return Fail(name, " has the unknown format ", number);
    part.dtype = static_cast<DType>(dtype);
    part.scaling = static_cast<Scaling>(scaling);
    part.sqrt = number & 64;
    part.stochastic = number & 128;
  }

  void ParseLayout(const int64_t* numbers, Leaf& leaf) {
    const int64_t run = numbers[0];
    const int64_t runs = numbers[2];
    if (run == 0) return;
    if (run < 0 || runs < 1 || leaf.size % run != 0 || leaf.size / run % runs != 0) {
      return Fail(leaf.size, " elements do not divide into groups of ", runs, " runs of ", run);
    }
    leaf.layout = {static_cast<const uint32_t*>(words_) + kHyperWords + leaf.slot, run, numbers[1], runs, numbers[3]};
  }

  void ParseGeometry(int64_t row, const int64_t* blocks, Leaf& leaf) {
    leaf.row = leaf.layout.run == 0 ? leaf.size : leaf.layout.run;
    for (int k = 0; k < kParts; ++k) {
      Part& part = leaf.part[k];
      if (part.scaling != kBlock) continue;
      if (row < 0 || blocks[k] < 1 || (leaf.size > 0 && (row == 0 || leaf.size % row != 0))) {
        return Fail(leaf.size, " elements do not divide into rows of ", row, " and blocks of ", blocks[k]);
      }
      if (leaf.layout.run != 0 && row != 0 && leaf.layout.run % row != 0) {
        return Fail("runs of ", leaf.layout.run, " elements do not divide into rows of ", row);
      }
      // An empty leaf has none, whatever their length would be.
      leaf.row = std::min(row, leaf.size);
      part.block = std::min(blocks[k], std::max<int64_t>(leaf.row, 1));
      part.blocks = (leaf.row + part.block - 1) / part.block;
    }
  }

  void CheckParts(const Leaf& leaf) {
    const Part& mu = leaf.part[kMu];
    const Part& nu = leaf.part[kNu];
    const Part& master = leaf.part[kMaster];
    if (mu.dtype > kE5M2 || nu.dtype > kE5M2) return Fail("a moment must be stored as a float");
    if (mu.sqrt || master.sqrt) return Fail("only nu can be stored as a square root");
    if (IsRemainder(master.dtype) && leaf.p_dtype == kF32) return Fail("a float32 parameter has no remainder");
    if (master.dtype > kE5M2 && master.scaling != kUnscaled) return Fail("this master has no scales");
    const bool direction = leaf.flags & kDirection;
    if (direction ? master.dtype != kAbsent || (leaf.flags & kFused) : !(leaf.flags & kHasParam)) {
      return Fail("the flags ", leaf.flags, " do not fit the master");
    }
  }

  // An empty leaf may have blocks all the same, of no elements.
  static int64_t ExpectedScales(const Leaf& leaf, const Part& part) {
    return leaf.size == 0 && part.scaling == kBlock ? kAnyCount : ScaleCount(leaf, part);
  }

  // --- buffers ---

  struct Buffer {
    void* data;
    ffi::DataType dtype;
    int64_t count;
  };
  static constexpr int64_t kAnyCount = -1;

  Buffer NextArg(const char* name) {
    const auto buffer = args_.get<ffi::AnyBuffer>(next_arg_++);
    if (!buffer.has_value()) return Missing(name, "operand");
    return {buffer->untyped_data(), buffer->element_type(), static_cast<int64_t>(buffer->element_count())};
  }

  Buffer NextRet(const char* name) {
    auto result = rets_.get<ffi::AnyBuffer>(next_ret_++);
    if (!result.has_value()) return Missing(name, "result");
    const ffi::AnyBuffer& buffer = **result;
    return {buffer.untyped_data(), buffer.element_type(), static_cast<int64_t>(buffer.element_count())};
  }

  Buffer Missing(const char* name, const char* kind) {
    Fail("the ", kind, " for its ", name, " is missing");
    return {nullptr, ffi::DataType::INVALID, 0};
  }

  void* Checked(const Buffer& buffer, ffi::DataType dtype, int64_t count, const char* name) {
    CheckCount(buffer.count, count, name);
    if (buffer.dtype != dtype) {
      Fail("its ", name, " has dtype ", static_cast<int>(buffer.dtype), " instead of ", static_cast<int>(dtype));
    }
    return buffer.data;
  }

  void* Arg(ffi::DataType dtype, int64_t count, const char* name) { return Checked(NextArg(name), dtype, count, name); }
  void* Ret(ffi::DataType dtype, int64_t count, const char* name) { return Checked(NextRet(name), dtype, count, name); }

  void CheckCount(int64_t count, int64_t expected, const char* name) {
    if (expected != kAnyCount && count != expected) {
      Fail("its ", name, " has ", count, " elements instead of ", expected);
    }
  }

  DType FloatOf(ffi::DataType dtype, const char* name) {
    switch (dtype) {
      case ffi::DataType::F32: return kF32;
      case ffi::DataType::BF16: return kBF16;
      case ffi::DataType::F16: return kF16;
      default: Fail("its ", name, " must be float32, bfloat16 or float16"); return kF32;
    }
  }

  static ffi::DataType StorageOf(DType d) {
    switch (d) {
      case kBF16: return ffi::DataType::BF16;
      case kF16: return ffi::DataType::F16;
      case kE4M3: return ffi::DataType::F8E4M3FN;
      case kE5M2: return ffi::DataType::F8E5M2;
      case kRemainder16: return ffi::DataType::S16;
      case kRemainder8: return ffi::DataType::S8;
      default: return ffi::DataType::F32;
    }
  }

  // Keeps the first error: what is read after it means nothing.
  template <typename... Words>
  void Fail(const Words&... words) {
    if (error_.empty()) error_ = (leaf_name_ + ... + Text(words));
  }
  static std::string Text(const char* text) { return text; }
  template <typename Int>
  static std::string Text(Int number) {
    return std::to_string(number);
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  size_t next_arg_ = 0;
  size_t next_ret_ = 0;
  size_t leaf_count_ = 0;
  bool with_results_ = true;
  const void* words_ = nullptr;
  const float* absmax_ = nullptr;
  float* absmax_out_ = nullptr;
  std::vector<Leaf> leaves_;
  std::string leaf_name_;
  std::string error_;
};

// For the exported optax_lowprec_ffi_api_version().
constexpr int kFfiApiVersion = XLA_FFI_API_MAJOR * 65536 + XLA_FFI_API_MINOR;

}  // namespace optax_lowprec

// The handlers are the only symbols of a library that others see.
#define OLP_EXPORT extern "C" __attribute__((visibility("default")))

#endif  // OPTAX_LOWPREC_CALL_FRAME_H_
