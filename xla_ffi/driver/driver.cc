// Calls the handlers of a library as XLA does, without JAX: for sanitizers and profilers.
//
//   driver LIBRARY cases                          odd little leaves in all kinds of formats; checks every code
//   driver LIBRARY profile NAME [chain] [LEAVES]  a few steps of leaves of 16.8M elements, on a GPU
//   driver names                                  the combinations of formats
//
// Exit status: 0, 1 where something is wrong, 2 where it cannot run.

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"
#include "reference.h"
#include "runtime.h"

namespace optax_lowprec::driver {
namespace {

// --- formats and shapes ---------------------------------------------------------------------------------------------

constexpr PartFormat kFp8 = {kE4M3, kBlock};
constexpr PartFormat kFp8Root = {kE4M3, kBlock, true};
constexpr PartFormat kFp8Stochastic = {kE4M3, kBlock, false, true};
constexpr PartFormat kFp8RootStochastic = {kE4M3, kBlock, true, true};
constexpr PartFormat kHalf = {kF16, kBlock};
constexpr PartFormat kFloat = {kF32};
constexpr PartFormat kR16 = {kRemainder16};
constexpr PartFormat kR8 = {kRemainder8};
constexpr PartFormat kNone = {};

constexpr PartFormat Blocks(DType d, int64_t length, bool sqrt = false) { return {d, kBlock, sqrt, false, length}; }
constexpr PartFormat Tensor(DType d, bool sqrt = false, bool stochastic = false) {
  return {d, kTensor, sqrt, stochastic};
}
constexpr PartFormat Stochastic(PartFormat f) {
  f.stochastic = true;
  return f;
}

std::vector<Combination> Combinations() {
  std::vector<Combination> all;
  // Those with kernels of their own on a GPU, for both dtypes of gradients.
  for (const auto& [suffix, g] : {std::pair{"", kBF16}, std::pair{"_g32", kF32}}) {
    const auto add = [&, s = suffix, g = g](const char* name, DType p, PartFormat mu, PartFormat nu,
                                            PartFormat master) {
      all.push_back({std::string(name) + s, g, p, {mu, nu, master}});
    };
    add("bf16_remainder16_fp8_fp8", kBF16, kFp8, kFp8Root, kR16);
    add("bf16_remainder8_fp8_fp8", kBF16, kFp8, kFp8Root, kR8);
    add("bf16_f16_fp8_fp8", kBF16, kFp8, kFp8Root, kHalf);
    add("f32_fp8_fp8", kF32, kFp8, kFp8Root, kNone);
    // The defaults: mu to nearest, nu stochastically.
    add("bf16_remainder16_fp8_fp8_default", kBF16, kFp8, kFp8RootStochastic, kR16);
    add("bf16_remainder8_fp8_fp8_default", kBF16, kFp8, kFp8RootStochastic, kR8);
    add("bf16_f16_fp8_fp8_default", kBF16, kFp8, kFp8RootStochastic, kHalf);
    add("f32_fp8_fp8_default", kF32, kFp8, kFp8RootStochastic, kNone);
    add("bf16_remainder16_fp8_fp8_stochastic", kBF16, kFp8Stochastic, kFp8RootStochastic, kR16);
    add("bf16_remainder8_fp8_fp8_stochastic", kBF16, kFp8Stochastic, kFp8RootStochastic, kR8);
    add("bf16_f16_fp8_fp8_stochastic", kBF16, kFp8Stochastic, kFp8RootStochastic, kHalf);
    add("f32_fp8_fp8_stochastic", kF32, kFp8Stochastic, kFp8RootStochastic, kNone);
    add("bf16_remainder16_fp8_f16", kBF16, kFp8, kHalf, kR16);
    add("bf16_remainder8_fp8_f16", kBF16, kFp8, kHalf, kR8);
    add("bf16_f16_fp8_f16", kBF16, kFp8, kHalf, kHalf);
    add("f32_fp8_f16", kF32, kFp8, kHalf, kNone);
    add("f32_f32_f32", kF32, kFloat, kFloat, kNone);
    add("bf16_f32_f32_f32", kBF16, kFloat, kFloat, kFloat);
  }
  // The rest: formats read at run time, blocks of every kind, tensor scales.
  const PartFormat bf16 = {kBF16};
  for (Combination c : std::initializer_list<Combination>{
           {"bf16_remainder16_e5m2_fp8", kBF16, kBF16, {Blocks(kE5M2, 128), kFp8Root, kR16}},
           {"f16_remainder16_fp8_fp8", kF16, kF16, {kFp8, kFp8Root, kR16}},
           {"f16_remainder8_fp8_f16", kF16, kF16, {kFp8, kHalf, kR8}},
           {"f16_f16_fp8_fp8", kF32, kF16, {kFp8, kFp8Root, kHalf}},
           {"f16_bf16_bf16", kF16, kF16, {bf16, bf16, kNone}},
           {"f32_g16_fp8_fp8", kF16, kF32, {kFp8, kFp8Root, kNone}},
           {"bf16_bf16_bf16_bf16", kBF16, kBF16, {bf16, bf16, bf16}},
           {"bf16_e5m2_e5m2", kBF16, kBF16, {Blocks(kE5M2, 64), Blocks(kE5M2, 64), kNone}},
           {"blocks_of_48", kBF16, kBF16, {Blocks(kE5M2, 48), bf16, kR16}},
           {"blocks_of_8", kBF16, kBF16, {Blocks(kE4M3, 8), Blocks(kE4M3, 8, true), kR16}},
           {"blocks_of_256", kF32, kF32, {Blocks(kE4M3, 256), Blocks(kF16, 256), kNone}},
           {"blocks_of_200", kBF16, kBF16, {Blocks(kE4M3, 200), Blocks(kE4M3, 200, true), kR8}},
           {"blocks_of_700", kBF16, kBF16, {Blocks(kE4M3, 700), kFloat, kR8}},
           {"unlike_blocks", kBF16, kBF16, {kFp8, Blocks(kE4M3, 32, true), Blocks(kF16, 48)}},
           {"unlike_blocks_f32", kF32, kF32, {Blocks(kE5M2, 96), Blocks(kF16, 64, true), Blocks(kBF16, 128)}},
           {"scaled_bf16_f32", kBF16, kBF16, {Blocks(kBF16, 128), Blocks(kBF16, 128, true), Blocks(kF32, 128)}},
           {"unscaled_fp8", kBF16, kBF16, {{kE4M3}, {kE5M2, kUnscaled, true}, {kF16}}},
           {"tensor_fp8_fp8_f16", kBF16, kBF16, {Tensor(kE4M3), Tensor(kE4M3, true), Tensor(kF16)}},
           {"tensor_e5m2_bf16", kF32, kF32, {Tensor(kE5M2), Tensor(kBF16), kNone}},
           {"tensor_and_blocks", kBF16, kBF16, {kFp8, Tensor(kE4M3, true), Blocks(kF16, 200)}},
           {"tensor_stochastic", kBF16, kBF16, {Tensor(kE4M3, false, true), Tensor(kE4M3, true, true), kR8}},
           {"stochastic_remainder16", kBF16, kBF16, {kFp8, kFp8Root, Stochastic(kR16)}},
           {"stochastic_remainder8", kBF16, kBF16, {kFp8Stochastic, kFp8RootStochastic, Stochastic(kR8)}},
           {"stochastic_f16_remainder8", kF16, kF16, {kFp8, kFp8Root, Stochastic(kR8)}},
           {"stochastic_masters", kBF16, kBF16, {bf16, Stochastic(bf16), Stochastic(kHalf)}},
           {"stochastic_bf16_master", kBF16, kBF16, {Stochastic(Blocks(kE5M2, 128)), kHalf, Stochastic(bf16)}},
       }) {
    all.push_back(c);
  }
  for (const char* name : {"bf16_remainder16_fp8_fp8_default", "bf16_remainder8_fp8_fp8_stochastic",
                           "stochastic_remainder8"}) {
    const auto whole = std::find_if(all.begin(), all.end(), [&](const Combination& c) { return c.name == name; });
    Combination shards = *whole;
    shards.name += "_shards";
    shards.sharded = true;
    all.push_back(shards);
  }
  all.push_back({"direction_fp8_fp8", kBF16, kBF16, {kFp8, kFp8Root, kNone}, true});
  all.push_back({"direction_f32_f32", kF32, kF32, {kFloat, kFloat, kNone}, true});
  return all;
}

// Whole blocks, rows that blocks do not divide, misaligned rows, short axes that join, scalars, nothing at all.
const Shape kShapes[] = {{1, 1},       {7, 7, 7},        {15, 15, 3},    {64 * 257, 257}, {4608, 32},
                         {0, 0},       {16384, 128},     {11 * 1358, 1358}, {9 * 129, 129}, {3001, 3001},
                         {65 * 256, 256}, {1500, 1500, 3}, {5 * 1000, 1000}};

// --- data -----------------------------------------------------------------------------------------------------------

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint32_t Word() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return Mix(static_cast<uint32_t>(state_ >> 32));
  }
  float Uniform() { return static_cast<float>(Word() >> 8) * 0x1p-24f; }
  float Normal() { return (Uniform() + Uniform() + Uniform() + Uniform() - 2.0f) * 1.7320508f; }

 private:
  uint64_t state_;
};

void FillGradient(const LeafSpec& leaf, Random& random, bool spoiled, Arrays& arrays) {
  // Whole leaves and single blocks whose moments fade away, or are out of the quick paths' range.
  const float magnitudes[] = {1e-2f, 1.0f, 1e-3f, 1e-13f, 1e-3f, 0.0f, 1e-3f, 1e-24f, 1e2f};
  const float magnitude = magnitudes[leaf.index % std::size(magnitudes)];
  std::vector<uint8_t>& g = arrays[kGrad];
  g.resize(leaf.bytes(kGrad));
  for (int64_t i = 0; i < leaf.shape.size; ++i) {
    const int64_t stretch = i / 640 % 7;
    float x = random.Normal() * magnitude;
    if (stretch == 3) x = 0.0f;
    if (stretch == 5) x *= 1e-18f;
    StoreCode(leaf.formats->g, g.data(), i, CastTo(x, leaf.formats->g));
  }
  if (!spoiled || leaf.shape.size < 100) return;
  const float infinity = std::numeric_limits<float>::infinity();
  const auto put = [&](int64_t i, float x) { StoreCode(leaf.formats->g, g.data(), i, CastTo(x, leaf.formats->g)); };
  for (int64_t i = 77; i < leaf.shape.size; i += 401) put(i, infinity);
  for (int64_t i = 200; i < leaf.shape.size; i += 1009) put(i, std::numeric_limits<float>::quiet_NaN());
  put(leaf.shape.size - 1, -infinity);
}

// Valid codes of every part, whose values are of the order of magnitude that training has.
void FillState(const LeafSpec& leaf, Random& random, Arrays& arrays) {
  const int64_t n = leaf.shape.size;
  for (int a = kParam; a < kSlots; ++a) arrays[a].assign(a == kOut ? 0 : leaf.bytes(a), 0);
  if (leaf.flags & kHasParam) {
    for (int64_t i = 0; i < n; ++i) {
      StoreCode(leaf.formats->p, arrays[kParam].data(), i, CastTo(random.Normal() * 0.05f, leaf.formats->p));
    }
  }
  for (int k = 0; k < kParts; ++k) {
    const PartFormat& f = leaf.formats->part[k];
    if (f.dtype == kAbsent) continue;
    const FloatSpec spec = SpecOf(f.dtype);
    const bool scaled = f.scaling != kUnscaled;
    const float magnitude = scaled ? (Saturates(spec) ? 0.8f / spec.inverse_max : 0.8f) : k == kMaster ? 0.1f : 1e-3f;
    for (int64_t i = 0; i < n; ++i) {
      float x = (2.0f * random.Uniform() - 1.0f) * magnitude;
      if (k == kNu) x = scaled ? x : x * magnitude;
      if (k == kNu) x = x < 0.0f ? -x : x;
      const uint32_t code = IsRemainder(f.dtype) ? random.Word() : Encode(x, spec, false, 0);
      StoreCode(f.dtype, arrays[kCodes + k].data(), i, code);
    }
    for (int64_t b = 0; scaled && b < leaf.count(kScales + k); ++b) {
      const float scale = (0.1f + random.Uniform()) * (k == kMaster ? 0.05f : 1e-3f) / magnitude;
      std::memcpy(arrays[kScales + k].data() + 4 * b, &scale, 4);
    }
  }
}

Hyper HyperOf(int step, bool nesterov, bool eps_root, uint32_t key) {
  Hyper h = {};
  const double b1 = 0.9, b2 = 0.999;
  h.learning_rate = 1e-2f;
  h.b1 = static_cast<float>(b1);
  h.one_minus_b1 = static_cast<float>(1 - b1);
  h.b2 = static_cast<float>(b2);
  h.one_minus_b2 = static_cast<float>(1 - b2);
  h.eps = 1e-8f;
  h.eps_root = eps_root ? 1e-9f : 0.0f;
  h.weight_decay = 0.1f;
  const double c1 = 1 - std::pow(b1, step + 1), c1_next = 1 - std::pow(b1, step + 2), c2 = 1 - std::pow(b2, step + 1);
  h.mu_factor = static_cast<float>(nesterov ? b1 / c1_next : 1 / c1);
  h.grad_factor = static_cast<float>(nesterov ? (1 - b1) / c1 : 0.0);
  h.nu_factor = static_cast<float>(1 / c2);
  h.sqrt_nu_factor = std::sqrt(h.nu_factor);
  h.grad_scale = step == 1 ? 0.37f : 1.0f;
  h.key = key;
  h.phase = static_cast<uint32_t>(step) * kGolden;
  return h;
}

// --- a library and calls of it --------------------------------------------------------------------------------------

struct Library {
  XLA_FFI_Handler* step;
  XLA_FFI_Handler* absmax;
  XLA_FFI_Handler* init;  // CUDA only
  int api_version;
  bool cuda() const { return init != nullptr; }
};

Library Open(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) Die(path, dlerror());
  const auto find = [&](const char* name) { return dlsym(library, name); };
  const auto version = reinterpret_cast<int (*)()>(find("optax_lowprec_ffi_api_version"));
  Library found = {reinterpret_cast<XLA_FFI_Handler*>(find("OptaxLowprecStep")),
                   reinterpret_cast<XLA_FFI_Handler*>(find("OptaxLowprecAbsmax")),
                   reinterpret_cast<XLA_FFI_Handler*>(find("OptaxLowprecInit")), version ? version() : -1};
  if (!found.step || !found.absmax || !version) Die(path, "a symbol is missing");
  return found;
}

// The leaves of one call and their arrays, on the host and where the library reads them.
class Step {
 public:
  Step(const Library& library, Memory& memory, Context context, std::vector<LeafSpec> specs, bool misaligned)
      : library_(library), memory_(memory), context_(context), specs_(std::move(specs)), misaligned_(misaligned) {
    for (const LeafSpec& spec : specs_) {
      tensor_ = tensor_ || std::any_of(spec.formats->part, spec.formats->part + kParts,
                                       [](const PartFormat& f) { return f.scaling == kTensor; });
      bases_ = bases_ || spec.sharded();
    }
    words_.resize(kHyperWords + (bases_ ? specs_.size() : 0));
    for (size_t i = kHyperWords; i < words_.size(); ++i) words_[i] = Mix(static_cast<uint32_t>(i));
    absmax_.resize(kParts * specs_.size());
    host_.resize(specs_.size());
  }

  std::vector<LeafSpec>& specs() { return specs_; }
  std::vector<Arrays>& host() { return host_; }
  bool tensor() const { return tensor_; }
  int64_t codes() const { return codes_; }
  int64_t wrong() const { return wrong_; }

  // Runs one step on the library and on the reference, compares, and makes the result the state. The first step's
  // results are apart from the operands; later ones have the addresses of what they replace, as donated arrays do.
  void Run(Hyper hyper) {
    std::memcpy(words_.data(), &hyper, sizeof(hyper));
    const bool in_place = !operands_.empty();
    if (in_place) {
      memory_.Put(blocks_.front().data(), words_.data(), words_.size() * 4);
      for (size_t i = 0; i < specs_.size(); ++i) {
        memory_.Put(operands_[i][kGrad].data, host_[i][kGrad].data(), host_[i][kGrad].size());
        for (int a = 0; a < kSlots; ++a) {
          if (a != kOut && Replaced(specs_[i], a)) operands_[i][a] = results_[i][a == kParam ? kOut : a];
        }
      }
    } else {
      Allocate();
    }
    Call call = MakeCall();
    std::vector<Arrays> want = Want(hyper);
    if (tensor_) RunAbsmax(call);
    const Outcome outcome = call.Run(library_.step, context_);
    if (!outcome.ok()) return Wrong("step: " + outcome.message);
    memory_.Wait();
    for (size_t i = 0; i < specs_.size(); ++i) {
      const LeafSpec& spec = specs_[i];
      for (int a = 0; a < kSlots; ++a) {
        if (spec.dtype(a) == kAbsent) continue;
        if (a >= kOut) Compare(spec, a, Fetch(results_[i][a], spec.bytes(a)), want[i][a]);
        if (a == kOut || (in_place && Replaced(spec, a))) continue;
        if (Fetch(operands_[i][a], spec.bytes(a)) != host_[i][a]) Wrong("an operand was written: " + Name(spec, a));
      }
      want[i][kGrad] = host_[i][kGrad];
      want[i][kParam] = spec.flags & kFused ? want[i][kOut] : host_[i][kParam];
      host_[i] = std::move(want[i]);
    }
  }

  // Frames that a handler must refuse. There must be no empty leaf, whose arrays of scales may have any size.
  int64_t Refuse() {
    std::memcpy(words_.data(), &hyper_, sizeof(hyper_));
    Allocate();
    const Call good = MakeCall();
    int64_t calls = 0;
    const auto refuse = [&](const Call& call, const std::string& what,
                            XLA_FFI_ExecutionStage stage = XLA_FFI_ExecutionStage_EXECUTE) {
      ++calls;
      const Outcome outcome = call.Run(library_.step, context_, stage);
      memory_.Wait();
      if (outcome.code != XLA_FFI_Error_Code_INVALID_ARGUMENT) {
        Wrong("not refused (" + std::to_string(outcome.code) + " " + outcome.message + "): " + what);
      }
    };
    for (size_t n = 0; n < good.args.size(); ++n) {
      Call call = good;
      call.args.resize(n);
      refuse(call, "only " + std::to_string(n) + " operands");
      call = good;
      call.args[n].dtype = XLA_FFI_DataType_F64;
      refuse(call, "the dtype of operand " + std::to_string(n));
      for (int64_t more : {-1, 1}) {
        call = good;
        // Of a gradient: then the leaf's other operands are wrong.
        call.args[n].count += more;
        if (call.args[n].count < 0) continue;
        refuse(call, "the size of operand " + std::to_string(n));
      }
    }
    for (size_t n = 0; n < good.rets.size(); ++n) {
      Call call = good;
      call.rets.resize(n);
      refuse(call, "only " + std::to_string(n) + " results");
      call = good;
      call.rets[n].count += 1;
      refuse(call, "the size of result " + std::to_string(n));
      call = good;
      call.rets[n].dtype = XLA_FFI_DataType_PRED;
      refuse(call, "the dtype of result " + std::to_string(n));
    }
    Call call = good;
    call.args.push_back(good.args.back());
    refuse(call, "one operand more");
    call = good;
    call.leaves.pop_back();
    refuse(call, "one number less");
    call = good;
    call.with_tensor = false;
    refuse(call, "an attribute less");
    call = good;
    call.tensor = 1;
    refuse(call, "an absmax that is not there");
    refuse(good, "another stage", XLA_FFI_ExecutionStage_PREPARE);
    return calls;
  }

  // Frames with one number changed. Most are refused; no other does harm.
  int64_t Survive() {
    std::memcpy(words_.data(), &hyper_, sizeof(hyper_));
    Allocate();
    const Call good = MakeCall();
    int64_t calls = 0;
    for (size_t n = 0; n < good.leaves.size(); ++n) {
      for (int64_t number : {int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{7}, int64_t{255}, int64_t{1} << 62,
                             std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
        Call call = good;
        call.leaves[n] = number;
        call.Run(library_.step, context_);
        memory_.Wait();
        ++calls;
      }
    }
    return calls;
  }

 private:
  static bool Replaced(const LeafSpec& spec, int a) {
    return spec.dtype(a) != kAbsent && (a >= kCodes || (a == kParam && (spec.flags & kFused)));
  }

  std::vector<uint8_t> Fetch(const Buffer& buffer, int64_t bytes) {
    std::vector<uint8_t> host(bytes);
    if (bytes) memory_.Get(host.data(), buffer.data, bytes);
    return host;
  }

  Buffer Place(const LeafSpec& spec, int a) {
    const int64_t count = spec.count(a);
    // XLA may give an empty array no address.
    if (count == 0) return {nullptr, WireType(spec.dtype(a)), 0};
    const size_t offset = misaligned_ && a < kScales ? Bytes(spec.dtype(a)) : 0;
    blocks_.emplace_back(memory_, spec.bytes(a), offset);
    return {blocks_.back().data(), WireType(spec.dtype(a)), count};
  }

  // Memory for operands, with the host's arrays in it, and for results.
  void Allocate() {
    blocks_.clear();
    operands_.assign(specs_.size(), {});
    results_.assign(specs_.size(), {});
    blocks_.emplace_back(memory_, words_.size() * 4);
    memory_.Put(blocks_.front().data(), words_.data(), words_.size() * 4);
    blocks_.emplace_back(memory_, absmax_.size() * 4);
    largest_ = {blocks_.back().data(), XLA_FFI_DataType_F32, static_cast<int64_t>(absmax_.size())};
    for (size_t i = 0; i < specs_.size(); ++i) {
      for (int a = 0; a < kSlots; ++a) {
        if (specs_[i].dtype(a) == kAbsent) continue;
        if (a >= kOut) results_[i][a] = Place(specs_[i], a);
        if (a == kOut) continue;
        operands_[i][a] = Place(specs_[i], a);
        memory_.Put(operands_[i][a].data, host_[i][a].data(), host_[i][a].size());
      }
    }
  }

  // In the order of the interface; without absmax.
  Call MakeCall() const {
    Call call;
    call.tensor = tensor_;
    call.args.push_back({blocks_.front().data(), XLA_FFI_DataType_U32, static_cast<int64_t>(words_.size())});
    for (size_t i = 0; i < specs_.size(); ++i) {
      for (int a = 0; a < kSlots; ++a) {
        if (specs_[i].dtype(a) == kAbsent) continue;
        if (a != kOut) call.args.push_back(operands_[i][a]);
        if (a >= kOut) call.rets.push_back(results_[i][a]);
      }
      const std::vector<int64_t> numbers = specs_[i].Numbers();
      call.leaves.insert(call.leaves.end(), numbers.begin(), numbers.end());
    }
    return call;
  }

  std::vector<Arrays> Want(const Hyper& hyper) {
    std::vector<Arrays> want(specs_.size());
    std::fill(absmax_.begin(), absmax_.end(), 0.0f);
    FlushingSubnormals([&] {
      for (size_t i = 0; i < specs_.size(); ++i) {
        const LeafSpec& spec = specs_[i];
        for (int a = kOut; a < kSlots; ++a) want[i][a].resize(spec.dtype(a) == kAbsent ? 0 : spec.bytes(a));
        const Leaf leaf = spec.View(host_[i], want[i], words_.data() + kHyperWords + (bases_ ? i : 0));
        if (tensor_) ReferenceAbsmax(leaf, hyper, &absmax_[kParts * i]);
        if (hyper.skip && (leaf.flags & kSkippable)) {
          for (int a = kCodes; a < kSlots; ++a) want[i][a] = host_[i][a];
          if (leaf.flags & kFused) want[i][kOut] = host_[i][kParam];
        } else {
          ReferenceStep(leaf, hyper, &absmax_[kParts * i]);
        }
      }
    });
    return want;
  }

  // Adds the absmax operand to the call.
  void RunAbsmax(Call& call) {
    Call first = call;
    first.with_tensor = false;
    first.rets = {largest_};
    const Outcome outcome = first.Run(library_.absmax, context_);
    if (!outcome.ok()) Wrong("absmax: " + outcome.message);
    memory_.Wait();
    std::vector<float> got(absmax_.size());
    memory_.Get(got.data(), largest_.data, got.size() * 4);
    for (size_t i = 0; i < got.size(); ++i) {
      const LeafSpec& spec = specs_[i / kParts];
      if (spec.formats->part[i % kParts].scaling != kTensor) continue;
      ++codes_;
      if (Bits(got[i]) != Bits(absmax_[i])) {
        Wrong("absmax of " + Name(spec, static_cast<int>(kCodes + i % kParts)) + " is " + std::to_string(got[i]) +
              " instead of " + std::to_string(absmax_[i]));
      }
    }
    call.args.insert(call.args.begin() + 1, largest_);
  }

  void Compare(const LeafSpec& spec, int a, const std::vector<uint8_t>& got, const std::vector<uint8_t>& want) {
    const DType d = spec.dtype(a);
    if (d == kAbsent) return;
    const int64_t n = spec.count(a);
    int64_t different = 0;
    std::string first;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t x = WithOneNan(d, LoadCode(d, got.data(), i));
      const uint32_t y = WithOneNan(d, LoadCode(d, want.data(), i));
      if (x == y) continue;
      if (!different++) {
        char text[96];
        std::snprintf(text, sizeof(text), "first at %" PRId64 ": %X instead of %X", i, x, y);
        first = text;
      }
    }
    codes_ += n;
    if (different) Wrong(std::to_string(different) + " codes differ in " + Name(spec, a) + ", " + first);
  }

  static std::string Name(const LeafSpec& spec, int a) {
    static const char* const names[kSlots] = {"gradient", "parameter", "result",   "mu",          "nu",
                                              "master",   "mu_scale",  "nu_scale", "master_scale"};
    return std::string(names[a]) + " of leaf " + std::to_string(spec.index) + " (" + std::to_string(spec.shape.size) +
           " elements in rows of " + std::to_string(spec.shape.row) + ")";
  }

  void Wrong(const std::string& what) {
    if (++wrong_ <= 3) std::printf("  %s: %s\n", specs_[0].formats->name.c_str(), what.c_str());
  }

  const Library& library_;
  Memory& memory_;
  Context context_;
  std::vector<LeafSpec> specs_;
  bool misaligned_;
  bool tensor_ = false;
  bool bases_ = false;
  std::vector<uint32_t> words_;
  std::vector<float> absmax_;
  std::vector<Arrays> host_;
  std::vector<Block> blocks_;
  Buffer largest_ = {};  // the library's absmax
  std::vector<std::array<Buffer, kSlots>> operands_, results_;
  Hyper hyper_ = HyperOf(0, false, false, 1);
  int64_t codes_ = 0;
  int64_t wrong_ = 0;
};

std::vector<LeafSpec> SpecsOf(const Combination& formats, bool fused, const std::vector<Shape>& shapes, int variant) {
  std::vector<LeafSpec> specs;
  for (size_t i = 0; i < shapes.size(); ++i) {
    uint32_t flags = kSkippable;
    if (formats.direction) {
      flags |= kDirection | (variant % 2 ? uint32_t{kHasParam} : 0);
    } else {
      flags |= kHasParam | (fused ? uint32_t{kFused} : 0) | (i % 2 ? 0 : uint32_t{kDecay});
    }
    if (variant % 2) flags |= kNesterov;
    if (i % 3 == 0) flags |= kEpsRoot;
    const auto index = static_cast<uint32_t>(i);
    specs.push_back({&formats, shapes[i], flags, index, index});
  }
  return specs;
}

// --- cases ----------------------------------------------------------------------------------------------------------

int Cases(const Library& library) {
  const std::unique_ptr<Memory> memory = MemoryFor(library.cuda());
  ThreadPool pool(3);
  const Context context = {memory->stream(), &pool};
  int64_t steps = 0, codes = 0, wrong = 0;

  for (XLA_FFI_Handler* handler : {library.step, library.absmax, library.init}) {
    if (!handler) continue;
    const XLA_FFI_Metadata metadata = MetadataOf(handler);
    const int version = metadata.api_version.major_version * 65536 + metadata.api_version.minor_version;
    const bool captured = metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
    if (version != library.api_version || captured != library.cuda()) {
      std::printf("  a handler states FFI API %d (the library %d), command buffers %d\n", version, library.api_version,
                  captured);
      ++wrong;
    }
  }
  if (library.init) {
    const Outcome outcome = Call().Run(library.init, context, XLA_FFI_ExecutionStage_INITIALIZE);
    if (!outcome.ok()) Die("initialize", outcome.message.c_str());
  }

  const std::vector<Combination> combinations = Combinations();
  const std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
  const auto run = [&](const Combination& formats, bool fused, const std::vector<Shape>& of, int variant,
                       bool misaligned) {
    Step step(library, *memory, context, SpecsOf(formats, fused, of, variant), misaligned);
    Random random(variant * 977 + fused);
    for (size_t i = 0; i < step.specs().size(); ++i) FillState(step.specs()[i], random, step.host()[i]);
    // Apart, in place, with infinities and NaNs, skipped.
    for (int t = 0; t < 4; ++t) {
      for (size_t i = 0; i < step.specs().size(); ++i) {
        FillGradient(step.specs()[i], random, t == 2, step.host()[i]);
      }
      Hyper hyper = HyperOf(t, variant % 2, variant % 3 == 0, Mix(variant * 8 + t));
      hyper.skip = t == 3;
      step.Run(hyper);
      ++steps;
    }
    codes += step.codes();
    wrong += step.wrong();
  };
  int variant = 0;
  for (const Combination& formats : combinations) {
    for (const bool fused : {true, false}) {
      if (!(fused && formats.direction)) run(formats, fused, shapes, variant, false);
    }
    ++variant;
  }
  const Combination& first = combinations[0];
  // Addresses that are only as aligned as their dtypes.
  const std::vector<Shape> aligned = {{16384, 128}, {4608, 32}, {5 * 1000, 1000}};
  for (size_t i = 0; i < combinations.size(); i += 3) run(combinations[i], true, aligned, 1, true);
  // More leaves than one launch takes; more thread blocks than a wave has.
  std::vector<Shape> many;
  for (int64_t i = 0; i < 230; ++i) many.push_back(i % 5 == 4 ? Shape{8 * (i + 1), 8} : Shape{3 * i + 1, 3 * i + 1});
  run(first, true, many, 2, false);
  run(combinations[3], false, {{1 << 20, 1024}, {129 * 4099, 4099}}, 3, false);

  int64_t malformed = 0;
  for (const bool empty : {false, true}) {
    for (const size_t i : {size_t{0}, size_t{3}}) {
      std::vector<Shape> few = {{300, 300}, {512, 128}};
      if (empty) few.insert(few.begin() + 1, {0, 0});
      Step step(library, *memory, context, SpecsOf(combinations[i], true, few, 0), false);
      Random random(i);
      for (size_t j = 0; j < step.specs().size(); ++j) {
        FillState(step.specs()[j], random, step.host()[j]);
        FillGradient(step.specs()[j], random, false, step.host()[j]);
      }
      malformed += empty ? step.Survive() : step.Refuse();
      wrong += step.wrong();
    }
  }
  std::printf("%zu combinations of formats, %" PRId64 " steps, %" PRId64 " codes compared, %" PRId64
              " malformed calls: %s\n",
              combinations.size(), steps, codes, malformed,
              wrong ? (std::to_string(wrong) + " WRONG").c_str() : "all as they should be");
  return wrong ? 1 : 0;
}

// --- profile --------------------------------------------------------------------------------------------------------

#if defined(OLP_DRIVER_CUDA)
// In place, as donated. All leaves hold the same values.
int Profile(const Library& library, const std::string& name, bool fused, int leaves) {
  const std::vector<Combination> combinations = Combinations();
  const auto formats =
      std::find_if(combinations.begin(), combinations.end(), [&](const Combination& c) { return c.name == name; });
  if (formats == combinations.end()) Die(name.c_str(), "no such combination");
  const std::vector<LeafSpec> specs =
      SpecsOf(*formats, fused, std::vector<Shape>(leaves, Shape{2048 * 8192, 8192}), 0);
  DeviceMemory memory;
  const Context context = {memory.stream(), nullptr};
  Random random(1);
  Arrays values;
  FillState(specs[0], random, values);
  // Every block's gradients alike: the cases are for others.
  values[kGrad].resize(specs[0].bytes(kGrad));
  for (int64_t i = 0; i < specs[0].shape.size; ++i) {
    StoreCode(formats->g, values[kGrad].data(), i, CastTo(random.Normal() * 1e-2f, formats->g));
  }

  std::vector<Block> blocks;
  Call call;
  const Hyper hyper = HyperOf(100, false, false, 7);
  blocks.emplace_back(memory, sizeof(hyper));
  memory.Put(blocks[0].data(), &hyper, sizeof(hyper));
  call.args.push_back({blocks[0].data(), XLA_FFI_DataType_U32, kHyperWords});
  double bytes = 0;  // read and written
  const auto place = [&](const LeafSpec& spec, int a, const Block* from) {
    blocks.emplace_back(memory, spec.bytes(a));
    if (from) memory.Copy(blocks.back().data(), from->data(), spec.bytes(a));
    return Buffer{blocks.back().data(), WireType(spec.dtype(a)), spec.count(a)};
  };
  std::vector<Block> original;
  for (int a = 0; a < kSlots; ++a) {
    original.emplace_back(memory, values[a].size());
    memory.Put(original[a].data(), values[a].data(), values[a].size());
  }
  bool tensor = false;
  for (LeafSpec spec : specs) {
    spec.flags |= kDecay;
    spec.flags &= ~(kEpsRoot | kSkippable);
    std::array<Buffer, kSlots> placed = {};
    for (int a = 0; a < kSlots; ++a) {
      if (a == kOut || spec.dtype(a) == kAbsent) continue;
      placed[a] = place(spec, a, &original[a]);
      call.args.push_back(placed[a]);
      bytes += static_cast<double>(spec.bytes(a)) * (a >= kCodes || (a == kParam && fused) ? 2 : 1);
    }
    if (fused) {
      call.rets.push_back(placed[kParam]);
    } else {
      call.rets.push_back(place(spec, kOut, nullptr));
      bytes += static_cast<double>(spec.bytes(kOut));
    }
    for (int a = kCodes; a < kSlots; ++a) {
      if (spec.dtype(a) != kAbsent) call.rets.push_back(placed[a]);
    }
    const std::vector<int64_t> numbers = spec.Numbers();
    call.leaves.insert(call.leaves.end(), numbers.begin(), numbers.end());
    for (const PartFormat& f : formats->part) tensor = tensor || f.scaling == kTensor;
  }
  Call absmax = call;
  if (tensor) {
    blocks.emplace_back(memory, kParts * specs.size() * 4);
    const Buffer largest = {blocks.back().data(), XLA_FFI_DataType_F32, static_cast<int64_t>(kParts * specs.size())};
    absmax.with_tensor = false;
    absmax.rets = {largest};
    call.args.insert(call.args.begin() + 1, largest);
    call.tensor = 1;
  }

  const Outcome loaded = Call().Run(library.init, context, XLA_FFI_ExecutionStage_INITIALIZE);
  if (!loaded.ok()) Die("initialize", loaded.message.c_str());
  const auto stream = static_cast<cudaStream_t>(memory.stream());
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "event");
  Check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    Check(cudaEventRecord(begin, stream), "event");
    if (tensor) {
      if (const Outcome o = absmax.Run(library.absmax, context); !o.ok()) Die("absmax", o.message.c_str());
    }
    if (const Outcome o = call.Run(library.step, context); !o.ok()) Die("step", o.message.c_str());
    Check(cudaEventRecord(end, stream), "event");
    memory.Wait();
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i > 1) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  const double ms = times[times.size() / 2];
  std::printf("{\"combination\": \"%s\", \"path\": \"%s\", \"elements\": %" PRId64
              ", \"bytes\": %.0f, \"event_ms\": %.4f, \"event_ms_min\": %.4f, \"event_ms_max\": %.4f}\n",
              name.c_str(), fused ? "fused" : "chain", specs[0].shape.size * leaves, bytes, ms, times.front(),
              times.back());
  return 0;
}
#endif

int Main(int argc, char** argv) {
  // What was found shows, also where the library then crashes.
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words == std::vector<std::string>{"names"}) {
    for (const Combination& c : Combinations()) std::printf("%s\n", c.name.c_str());
    return 0;
  }
  if (words.size() < 2) Die(argv[0], "LIBRARY cases | LIBRARY profile NAME [chain] [LEAVES] | names");
  const Library library = Open(words[0].c_str());
  if (words[1] == "cases") return Cases(library);
#if defined(OLP_DRIVER_CUDA)
  if (words[1] == "profile" && words.size() > 2 && library.cuda()) {
    const bool chain = words.size() > 3 && words[3] == "chain";
    const size_t next = chain ? 4 : 3;
    return Profile(library, words[2], !chain, words.size() > next ? std::stoi(words[next]) : 20);
  }
#endif
  Die(words[1].c_str(), "unknown, or not with this library or build");
}

}  // namespace
}  // namespace optax_lowprec::driver

int main(int argc, char** argv) { return optax_lowprec::driver::Main(argc, argv); }
