// The step on the GPU: one launch for many leaves, one pass over memory.
//
// Three kernels, by the geometry of a leaf's blocks:
//  - vectors: blocks of a power of two of elements, rows and addresses that suit 8 elements a thread;
//  - strided: any rows, blocks of at most 128 elements, one warp a block;
//  - general: everything else, element by element.
// The first two compute branch-free what is right for ordinary values. A thread that meets anything else (an infinity,
// a NaN, magnitudes near the ends of float32's range) notices it once, for all its elements, and does them again with
// the exact maths of element.h.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "call_frame.h"
#include "core.h"
#include "element.h"

namespace optax_lowprec {
namespace {

constexpr int kThreads = 128;
// Thread blocks of a multiprocessor. Those of the specialised kernels have 64 registers a thread: they hide the memory's
// latency best (measured on an H200 against 80 and 51 registers, 256 threads, and copies to shared memory ahead of use).
constexpr int kResident = 8;
constexpr int kResidentAny = 4;
constexpr int kWarp = 32;
constexpr int kBlockLength = 128;  // of the specialised kernels
constexpr int kVector = 8;
constexpr int kStrided = kBlockLength / kWarp;
constexpr int kGeneralThreads = 128;
constexpr int kAbsmaxElements = 4096;  // of a thread block
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// A leaf and how its elements are handed out. Without block scales, blocks are just pieces of it.
struct DeviceLeaf : Leaf {
  int64_t blocks;        // in a row
  int64_t block_length;  // for the general kernel: the length of a unit, see UnitOf
  int64_t block_count;   // in all
};

// What one launch works on, passed as a kernel parameter.
constexpr int kMaxLeaves = 100;
constexpr int kShares = 64;
struct Table {
  int leaf_count;
  int shift;                       // a share is 2^shift thread blocks
  uint8_t first_leaf[kShares];     // the leaf of each share's first thread block
  uint32_t start[kMaxLeaves + 1];  // the first thread block of each leaf, and the number of thread blocks
  DeviceLeaf leaf[kMaxLeaves];
};
static_assert(sizeof(Table) <= 32000, "kernel parameters are limited to 32764 bytes");

__device__ __forceinline__ int FindLeaf(const Table& table, uint32_t thread_block) {
  int leaf = table.first_leaf[thread_block >> table.shift];
  while (table.start[leaf + 1] <= thread_block) ++leaf;
  return leaf;
}

// XLA's buffers are aligned; four loads instead of thirteen.
__device__ __forceinline__ Hyper ReadHyper(const Hyper* words) {
  Hyper h;
#pragma unroll
  for (int i = 0; i < kHyperWords / 4; ++i) {
    reinterpret_cast<uint4*>(&h)[i] = __ldg(reinterpret_cast<const uint4*>(words) + i);
  }
  return h;
}

__device__ __forceinline__ float AbsmaxOf(const float* absmax, const Leaf& leaf, int k) {
  return absmax[kParts * leaf.slot + k];
}

// --- memory ---------------------------------------------------------------------------------------------------------

// V elements of a thread, packed as in memory. How many words of w are used depends on the dtype.
template <int V>
struct alignas(16) Words {
  uint32_t w[V];
};

// V consecutive elements at an address that suits vector loads.
struct VectorAccess {
  static constexpr int kV = kVector;
  int64_t first;
  bool any;

  __device__ int64_t element(int k) const { return first + k; }
  __device__ bool has(int) const { return any; }

  template <int kBytes>
  __device__ void Load(const void* from, Words<kV>& x) const {
    if (!any) return;
    const char* p = static_cast<const char*>(from) + first * kBytes;
    if constexpr (kBytes == 1) {
      *reinterpret_cast<uint2*>(x.w) = __ldcs(reinterpret_cast<const uint2*>(p));
    } else if constexpr (kBytes == 2) {
      *reinterpret_cast<uint4*>(x.w) = __ldcs(reinterpret_cast<const uint4*>(p));
    } else {
      reinterpret_cast<uint4*>(x.w)[0] = __ldcs(reinterpret_cast<const uint4*>(p));
      reinterpret_cast<uint4*>(x.w)[1] = __ldcs(reinterpret_cast<const uint4*>(p) + 1);
    }
  }

  template <int kBytes>
  __device__ void Store(void* to, const Words<kV>& x) const {
    if (!any) return;
    char* p = static_cast<char*>(to) + first * kBytes;
    if constexpr (kBytes == 1) {
      __stcs(reinterpret_cast<uint2*>(p), *reinterpret_cast<const uint2*>(x.w));
    } else if constexpr (kBytes == 2) {
      __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(x.w));
    } else {
      __stcs(reinterpret_cast<uint4*>(p), reinterpret_cast<const uint4*>(x.w)[0]);
      __stcs(reinterpret_cast<uint4*>(p) + 1, reinterpret_cast<const uint4*>(x.w)[1]);
    }
  }
};

// Every 32nd element from `first` on, as far as there are `count` elements.
struct StridedAccess {
  static constexpr int kV = kStrided;
  int64_t first;
  int64_t count;

  __device__ int64_t element(int k) const { return first + k * kWarp; }
  __device__ bool has(int k) const { return k * kWarp < count; }

  template <int kBytes>
  __device__ void Load(const void* from, Words<kV>& x) const {
#pragma unroll
    for (int k = 0; k < kV; ++k) {
      const int64_t i = element(k);
      if constexpr (kBytes == 4) {
        if (has(k)) x.w[k] = static_cast<const uint32_t*>(from)[i];
      } else if constexpr (kBytes == 2) {
        const uint32_t code = has(k) ? static_cast<const uint16_t*>(from)[i] : 0;
        x.w[k / 2] |= code << (16 * (k % 2));
      } else {
        const uint32_t code = has(k) ? static_cast<const uint8_t*>(from)[i] : 0;
        x.w[k / 4] |= code << (8 * (k % 4));
      }
    }
  }

  template <int kBytes>
  __device__ void Store(void* to, const Words<kV>& x) const {
#pragma unroll
    for (int k = 0; k < kV; ++k) {
      if (!has(k)) continue;
      const int64_t i = element(k);
      if constexpr (kBytes == 4) {
        static_cast<uint32_t*>(to)[i] = x.w[k];
      } else if constexpr (kBytes == 2) {
        static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(x.w[k / 2] >> (16 * (k % 2)));
      } else {
        static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(x.w[k / 4] >> (8 * (k % 4)));
      }
    }
  }
};

template <typename Access>
__device__ __forceinline__ Words<Access::kV> LoadWords(const Access& at, DType d, const void* from) {
  Words<Access::kV> x = {};
  switch (Bytes(d)) {
    case 1: at.template Load<1>(from, x); break;
    case 2: at.template Load<2>(from, x); break;
    case 4: at.template Load<4>(from, x); break;
  }
  return x;
}

template <typename Access>
__device__ __forceinline__ void StoreWords(const Access& at, DType d, void* to, const Words<Access::kV>& x) {
  switch (Bytes(d)) {
    case 1: at.template Store<1>(to, x); break;
    case 2: at.template Store<2>(to, x); break;
    case 4: at.template Store<4>(to, x); break;
  }
}

// Puts the code of element k among packed ones. Every index is a constant once loops are unrolled: an array with others
// lives in memory.
template <int V>
__device__ __forceinline__ void Insert(DType d, Words<V>& x, int k, uint32_t code) {
  switch (Bytes(d)) {
    case 1: x.w[k / 4] |= (code & 0xFFu) << (8 * (k % 4)); break;
    case 2: x.w[k / 2] |= (code & 0xFFFFu) << (16 * (k % 2)); break;
    default: x.w[k] |= code;
  }
}

// --- quick codecs, for finite values --------------------------------------------------------------------------------

__device__ __forceinline__ float2 Float8Pair(uint32_t codes, __nv_fp8_interpretation_t kind) {
  const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), kind);
  return __half22float2(__half2(half));
}

template <int V>
__device__ __forceinline__ void DecodeWords(DType d, const Words<V>& x, float (&out)[V]) {
  if (d == kF32) {
#pragma unroll
    for (int k = 0; k < V; ++k) out[k] = __uint_as_float(x.w[k]);
  } else if (d == kBF16) {
#pragma unroll
    for (int k = 0; k < V; ++k) out[k] = __uint_as_float(k % 2 ? x.w[k / 2] & 0xFFFF0000u : x.w[k / 2] << 16);
  } else if (d == kF16) {
#pragma unroll
    for (int k = 0; k < V; k += 2) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&x.w[k / 2]));
      out[k] = pair.x;
      out[k + 1] = pair.y;
    }
  } else {
    const __nv_fp8_interpretation_t kind = d == kE4M3 ? __NV_E4M3 : __NV_E5M2;
#pragma unroll
    for (int k = 0; k < V; k += 2) {
      const float2 pair = Float8Pair((x.w[k / 4] >> (8 * (k % 4))) & 0xFFFFu, kind);
      out[k] = pair.x;
      out[k + 1] = pair.y;
    }
  }
}

// Two values to float16, nearest even, saturating.
__device__ __forceinline__ uint32_t SaturatedHalfPair(float low, float high) {
  const float limit = 65504.0f;
  const __half2 pair = __floats2half2_rn(fminf(fmaxf(low, -limit), limit), fminf(fmaxf(high, -limit), limit));
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Nearest even; float8 and float16 saturate.
template <int V>
__device__ __forceinline__ Words<V> EncodeWords(DType d, const float (&x)[V]) {
  Words<V> out = {};
  if (d == kF32) {
#pragma unroll
    for (int k = 0; k < V; ++k) out.w[k] = __float_as_uint(x[k]);
  } else if (d == kBF16) {
#pragma unroll
    for (int k = 0; k < V; k += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[k], x[k + 1]);
      out.w[k / 2] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else if (d == kF16) {
#pragma unroll
    for (int k = 0; k < V; k += 2) out.w[k / 2] = SaturatedHalfPair(x[k], x[k + 1]);
  } else {
    const __nv_fp8_interpretation_t kind = d == kE4M3 ? __NV_E4M3 : __NV_E5M2;
#pragma unroll
    for (int k = 0; k < V; k += 4) {
      const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(x[k], x[k + 1]), __NV_SATFINITE, kind);
      const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(x[k + 2], x[k + 3]), __NV_SATFINITE, kind);
      out.w[k / 4] = low | high << 16;
    }
  }
  return out;
}

// Parameters and updates do not saturate.
template <int V>
__device__ __forceinline__ Words<V> CastWords(DType d, const float (&x)[V]) {
  if (d != kF16) return EncodeWords(d, x);
  Words<V> out = {};
#pragma unroll
  for (int k = 0; k < V; k += 2) {
    const __half2 pair = __floats2half2_rn(x[k], x[k + 1]);
    out.w[k / 2] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return out;
}

// A finite value with noise below float8_e4m3fn's last place, cut off: the conversion is then exact. The first is for
// values that are normal as such, and for zeros.
__device__ __forceinline__ float DitheredNormal(float x, uint32_t noise32) {
  return __uint_as_float((__float_as_uint(x) + (noise32 >> 12)) & 0xFFF00000u);
}
__device__ __forceinline__ float Dithered(float x, uint32_t noise32) {
  const float min_normal = 0x1p-6f;
  const float small = DitheredNormal(fabsf(x) + min_normal, noise32) - min_normal;
  return fabsf(x) < min_normal ? copysignf(small, x) : DitheredNormal(x, noise32);
}

// --- quick maths ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float MaxOrNan(float a, float b) {
  float c;
  asm("max.NaN.ftz.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float ApproximateRsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float ApproximateReciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The correctly rounded square root of 0 or of a finite x from 2^-100 on: the instructions that the compiler emits for
// sqrt.rn after it has checked the range, without the check.
constexpr float kMinRadicand = 0x1p-100f;
__device__ __forceinline__ float QuickSqrt(float x) {
  const float y = ApproximateRsqrt(fmaxf(x, kMinRadicand));
  const float root = x * y;
  return fmaf(fmaf(-root, root, x), 0.5f * y, root);
}

// The correctly rounded quotient for a positive divisor, likewise; see Quick for the ranges. The signs are such that a
// zero keeps its own.
__device__ __forceinline__ float QuickDivide(float a, float b) {
  float y = ApproximateReciprocal(b);
  y = fmaf(y, fmaf(-b, y, 1.0f), y);
  const float q = a * y;
  return fmaf(-y, fmaf(b, q, -a), q);
}

// The scale of a block of a saturating format: its reciprocal needs no care, being a normal number.
__device__ __forceinline__ Scale QuickScale(float absmax, FloatSpec f) {
  if (!Saturates(f)) return ScaleOf(absmax, f);
  const float scale = fmaxf(absmax * f.inverse_max, Float(PowerBits(-126 - MinPositiveExponent(f))));
  float y = ApproximateReciprocal(scale);
  y = fmaf(y, fmaf(-scale, y, 1.0f), y);
  return absmax > 0.0f ? Scale{scale, y} : Scale{0.0f, 0.0f};
}

// What has to hold for a thread's elements so that the quick maths are exact.
struct Quick {
  // Of nonzero magnitudes, as integers less 1, so that 0 is the largest of all.
  uint32_t min_radicand = 0xFFFFFFFFu;
  uint32_t min_numerator = 0xFFFFFFFFu;
  float max_mu = 0.0f, max_root = 0.0f, max_numerator = 0.0f, max_denominator = 0.0f, max_master = 0.0f;
  float min_denominator = 0x1p127f;

  __device__ void Radicand(float x) { min_radicand = min(min_radicand, __float_as_uint(x) - 1u); }
  __device__ void Numerator(float a) { min_numerator = min(min_numerator, 2u * __float_as_uint(a) - 1u); }

  // Written so that a NaN anywhere fails.
  __device__ bool Holds() const {
    return min_radicand >= PowerBits(-100) - 1u && min_numerator >= 2u * PowerBits(-96) - 1u && max_mu < 0x1p127f &&
           max_root < 0x1p127f && max_numerator < 0x1p60f && max_denominator < 0x1p30f &&
           min_denominator > 0x1p-60f && max_master < 0x1p127f;
  }
};

// A signed byte of a word times 2^8.
__device__ __forceinline__ uint32_t ByteTimes256(uint32_t word, int byte) {
  const uint32_t sign = 8 | byte;
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(word), "r"(0), "r"(sign << 12 | sign << 8 | byte << 4 | 4));
  return x;
}

// The same words, but the compiler does not know: it shall decode them again and not keep what they decoded to.
template <int V>
__device__ __forceinline__ Words<V> Opaque(Words<V> x) {
#pragma unroll
  for (int i = 0; i < V; ++i) asm("" : "+r"(x.w[i]));
  return x;
}

// --- a thread's elements of a block ---------------------------------------------------------------------------------

constexpr int kAny = -1;

// The formats a kernel is compiled for; kAny reads them from the leaf. Specialised kernels write updates in the
// parameter's dtype, have blocks for every float8 and float16 part and none for others; only float8 moments may be
// stochastic.
template <int kG, int kP, int kMuType, int kNuType, int kNuRoot, int kMasterType>
struct Formats {
  static constexpr bool kRunTime = kG == kAny;

  __device__ static DType g(const Leaf& leaf) { return kRunTime ? leaf.g_dtype : static_cast<DType>(kG); }
  __device__ static DType p(const Leaf& leaf) { return kRunTime ? leaf.p_dtype : static_cast<DType>(kP); }
  __device__ static DType out(const Leaf& leaf) { return kRunTime ? leaf.out_dtype : static_cast<DType>(kP); }
  __device__ static DType part(const Leaf& leaf, int k) {
    if (kRunTime) return leaf.part[k].dtype;
    return static_cast<DType>(k == kMu ? kMuType : k == kNu ? kNuType : kMasterType);
  }
  __device__ static Scaling scaling(const Leaf& leaf, int k) {
    if (kRunTime) return leaf.part[k].scaling;
    const DType d = part(leaf, k);
    return d == kE4M3 || d == kF16 ? kBlock : kUnscaled;
  }
  __device__ static bool directional(const Leaf& leaf) { return kRunTime && (leaf.flags & kDirection); }
  __device__ static bool nu_root(const Leaf& leaf) { return kRunTime ? leaf.part[kNu].sqrt : kNuRoot != 0; }
  __device__ static bool stochastic(const Leaf& leaf, int k) {
    return (kRunTime || (k != kMaster && part(leaf, k) == kE4M3)) && leaf.part[k].stochastic;
  }
  static bool Fits(const Leaf& leaf) {
    if (kRunTime) return true;
    const auto part_fits = [&](int k, int d) {
      const Part& part = leaf.part[k];
      return int{part.dtype} == d && (!part.stochastic || (k != kMaster && d == kE4M3)) &&
             part.scaling == (d == kE4M3 || d == kF16 ? kBlock : kUnscaled);
    };
    return !(leaf.flags & kDirection) && int{leaf.g_dtype} == kG && int{leaf.p_dtype} == kP &&
           int{leaf.out_dtype} == kP && part_fits(kMu, kMuType) && part_fits(kNu, kNuType) &&
           part_fits(kMaster, kMasterType) && leaf.part[kNu].sqrt == (kNuRoot != 0);
  }
};

__device__ __forceinline__ uint32_t Scrambled(const Leaf& leaf, const Hyper* words, int64_t i) {
  return Scramble(LeafKey(words->key, leaf.index), Position(leaf.layout, i));
}

__device__ __noinline__ uint32_t ExactCode(const Leaf& leaf, const Hyper* words, int k, float source, float inverse,
                                          int64_t i) {
  return EncodePart(leaf.part[k], k, source, inverse, Scrambled(leaf, words, i), words->phase);
}

__device__ __noinline__ Remainder ExactRemainder(const Leaf& leaf, const Hyper* words, float master, int64_t i) {
  const Part& part = leaf.part[kMaster];
  const uint32_t noise32 = NoiseOf(kMaster, Scrambled(leaf, words, i), words->phase);
  return EncodeRemainder(master, leaf.p_dtype, RemainderBits(part.dtype), part.stochastic, noise32);
}

// The largest of `x` in a group of lanes (a power of two).
__device__ __forceinline__ float GroupMax(float x, int lanes) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    if (offset < lanes) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  }
  return x;
}

// Where block number `block` of a leaf begins, and how many elements it has.
struct Extent {
  int64_t first;
  int64_t length;
};
__device__ __forceinline__ Extent ExtentOf(const DeviceLeaf& leaf, int64_t block) {
  int64_t row = 0;
  int64_t in_row = block;
  if (leaf.row != leaf.size) {
    // Rarely does a leaf have so many blocks that 64 bits must be divided.
    row = block >> 32 ? block / leaf.blocks : static_cast<uint32_t>(block) / static_cast<uint32_t>(leaf.blocks);
    in_row = block - row * leaf.blocks;
  }
  const int64_t column = in_row * leaf.block_length;
  return {row * leaf.row + column, min(leaf.block_length, leaf.row - column)};
}

// One part of the elements [first, last), which are one block where the part has blocks, by one warp. The master's pass
// writes the parameter or update too, and comes before the moments', which it reads.
__device__ void ExactPart(const DeviceLeaf& leaf, const Hyper* words, const float* absmax, int k, int64_t first,
                          int64_t last) {
  const Hyper h = ReadHyper(words);
  const Part& part = leaf.part[k];
  const int lane = threadIdx.x % kWarp;
  Scale s = {1.0f, 1.0f};
  if (part.scaling == kBlock) {
    float region_max = 0.0f;
    for (int64_t i = first + lane; i < last; i += kWarp) {
      region_max = fmaxf(region_max, Float(FiniteMagnitude(SourceOf(leaf, k, StepElement(leaf, h, i)))));
    }
    s = ScaleOf(GroupMax(region_max, kWarp), SpecOf(part.dtype));
  } else if (part.scaling == kTensor) {
    s = ScaleOf(AbsmaxOf(absmax, leaf, k), SpecOf(part.dtype));
  }
  for (int64_t i = first + lane; i < last; i += kWarp) {
    const Element e = StepElement(leaf, h, i);
    if (k != kMaster) {
      StoreCode(part.dtype, part.out, i, ExactCode(leaf, words, k, SourceOf(leaf, k, e), s.inverse, i));
      continue;
    }
    const float p = leaf.flags & kHasParam ? LoadFloat(leaf.p_dtype, leaf.p, i) : 0.0f;
    uint32_t param = 0;
    if (IsRemainder(part.dtype)) {
      const Remainder r = ExactRemainder(leaf, words, e.master, i);
      StoreCode(part.dtype, part.out, i, static_cast<uint32_t>(r.rest));
      param = r.param;
    } else if (part.dtype != kAbsent) {
      StoreCode(part.dtype, part.out, i, ExactCode(leaf, words, k, e.master, s.inverse, i));
      param = CastTo(e.master, leaf.p_dtype);
    }
    StoreCode(leaf.out_dtype, leaf.out, i, EncodeResult(leaf, e, param, p));
  }
  // No lane needs the block's old scale any more.
  __syncwarp();
  if (part.scaling == kBlock && lane == 0) part.scale_out[BlockOf(leaf, part, first)] = s.scale;
}

// Blocks [block, block + count) of a leaf by one warp, from their inputs on: where the quick maths may be wrong. Nothing
// of a block may have been written. Not inlined, so that it costs the usual path nothing.
__device__ __noinline__ void ExactBlocks(const DeviceLeaf& leaf, const Hyper* words, const float* absmax, int64_t block,
                                         int count) {
  for (const int64_t end = min(block + count, leaf.block_count); block < end; ++block) {
    const Extent extent = ExtentOf(leaf, block);
    for (const int k : {kMaster, kMu, kNu}) ExactPart(leaf, words, absmax, k, extent.first, extent.first + extent.length);
  }
}

// What a thread reads of a block.
template <int V>
struct Inputs {
  Words<V> g, p, mu, nu, master;
  float scale[kParts];
};

// What a kernel does with a leaf: steps it, or measures the parts that have a scale for the whole tensor.
enum Task { kStep, kMeasure };

// Whether there is a master to step, which may be the parameter.
template <typename F, Task kTask>
__device__ __forceinline__ bool StepsMaster(const Leaf& leaf) {
  if (kTask == kMeasure && leaf.part[kMaster].scaling != kTensor) return false;
  return !F::directional(leaf);
}

// Beside a float master, the old parameter counts only for the difference to the new one.
template <typename F, Task kTask>
__device__ __forceinline__ bool NeedsParam(const Leaf& leaf) {
  const DType master = F::part(leaf, kMaster);
  if (!StepsMaster<F, kTask>(leaf) || kTask == kMeasure) return false;
  return master == kAbsent || IsRemainder(master) || !(leaf.flags & kFused);
}

template <typename F>
__device__ __forceinline__ void LoadScales(const Leaf& leaf, int64_t block, bool exists, float (&scale)[kParts]) {
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    const Scaling scaling = F::scaling(leaf, k);
    scale[k] = scaling == kUnscaled || !exists ? 1.0f : leaf.part[k].scale_in[scaling == kBlock ? block : 0];
  }
}

template <typename F, Task kTask, typename Access>
__device__ __forceinline__ Inputs<Access::kV> LoadInputs(const Leaf& leaf, const Access& at, int64_t block) {
  Inputs<Access::kV> x;
  x.g = LoadWords(at, F::g(leaf), leaf.g);
  x.p = NeedsParam<F, kTask>(leaf) ? LoadWords(at, F::p(leaf), leaf.p) : Words<Access::kV>{};
  x.mu = LoadWords(at, F::part(leaf, kMu), leaf.part[kMu].in);
  x.nu = LoadWords(at, F::part(leaf, kNu), leaf.part[kNu].in);
  x.master = kTask == kStep || StepsMaster<F, kTask>(leaf)
                 ? LoadWords(at, F::part(leaf, kMaster), leaf.part[kMaster].in)
                 : Words<Access::kV>{};
  LoadScales<F>(leaf, block, at.has(0), x.scale);
  return x;
}

// Takes note of a warp's largest magnitudes. The same in every lane, they compare as integers.
__device__ __forceinline__ void Measured(const Leaf& leaf, const float* absmax, const float (&region_max)[kParts]) {
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    if (leaf.part[k].scaling != kTensor) continue;
    const int warp_max = __float_as_int(GroupMax(region_max[k], kWarp));
    int* const largest = reinterpret_cast<int*>(const_cast<float*>(absmax)) + kParts * leaf.slot + k;
    // Seldom more than what was found so far: that can be read by all at once, unlike the maximum be updated.
    if (threadIdx.x % kWarp == 0 && warp_max > __ldcg(largest)) atomicMax(largest, warp_max);
  }
}

__device__ __forceinline__ void MeasureElement(const Leaf& leaf, const Hyper& h, int64_t i, float (&region_max)[kParts]) {
  const Element e = StepElement(leaf, h, i);
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    region_max[k] = fmaxf(region_max[k], Float(FiniteMagnitude(SourceOf(leaf, k, e))));
  }
}

__device__ __noinline__ void MeasureBlocks(const DeviceLeaf& leaf, const Hyper* words, const float* absmax, int64_t block,
                                           int count) {
  const Hyper h = ReadHyper(words);
  float region_max[kParts] = {};
  for (const int64_t end = min(block + count, leaf.block_count); block < end; ++block) {
    const Extent extent = ExtentOf(leaf, block);
    const int64_t last = extent.first + extent.length;
    for (int64_t i = extent.first + threadIdx.x % kWarp; i < last; i += kWarp) MeasureElement(leaf, h, i, region_max);
  }
  Measured(leaf, absmax, region_max);
}

// threadIdx.x, read anew: keeping what follows from it would cost registers that the step needs.
__device__ __forceinline__ int Thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// What a thread computed of a block. `stored` is what nu stores.
template <int V>
struct Outputs {
  const float (&mu)[V];
  const float (&stored)[V];
  const float (&w)[V];
  const float (&update)[V];
};

// Encodes and writes the new state and the result, where the quick maths hold.
template <typename F, typename Access>
__device__ __forceinline__ void StoreBlock(const DeviceLeaf& leaf, const Hyper* words, const Hyper& h,
                                           const float* absmax, const Access& at, const Words<Access::kV>& p_words,
                                           const Outputs<Access::kV>& of, const float (&region_max)[kParts],
                                           const Quick& quick, int64_t first_block, int lanes) {
  constexpr int V = Access::kV;
  const bool fused = leaf.flags & kFused;
  const DType master_type = F::part(leaf, kMaster);
  const bool remainder = IsRemainder(master_type);
  const bool exists = at.has(0);
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    const DType d = F::part(leaf, k);
    if (d == kAbsent || IsRemainder(d)) continue;
    const Scaling scaling = F::scaling(leaf, k);
    Scale s = {1.0f, 1.0f};
    if (scaling == kBlock) {
      s = QuickScale(GroupMax(region_max[k], lanes), SpecOf(d));
      if (exists && Thread() % lanes == 0) leaf.part[k].scale_out[first_block + Thread() / lanes] = s.scale;
    } else if (scaling == kTensor) {
      s = ScaleOf(AbsmaxOf(absmax, leaf, k), SpecOf(d));
    }
    const float(&source)[V] = k == kMu ? of.mu : k == kNu ? of.stored : of.w;
    const bool dithers = F::stochastic(leaf, k);
    Words<V> codes = {};
    const bool quick_noise = d == kE4M3;
    if (F::kRunTime && ((dithers && !quick_noise) || (k == kNu && !Saturates(SpecOf(d)) && scaling != kUnscaled))) {
#pragma unroll
      for (int i = 0; i < V; ++i) Insert(d, codes, i, ExactCode(leaf, words, k, source[i], s.inverse, at.element(i)));
    } else {
      float x[V];
#pragma unroll
      for (int i = 0; i < V; ++i) x[i] = scaling == kUnscaled ? source[i] : source[i] * s.inverse;
      bool tiny = true;
      if (k == kNu && Saturates(SpecOf(d))) {
        const float min_nu = __uint_as_float(quick.min_radicand + 1u);
        const float min_stored = F::nu_root(leaf) ? min_nu * ApproximateRsqrt(fmaxf(min_nu, kMinRadicand)) : min_nu;
        tiny = min_stored * s.inverse < 1.01f * Float(PowerBits(SpecOf(d).min_exponent));
        if (tiny) {
          // A positive value is never stored as 0. Rarely is one so small.
          const float least = Float(PowerBits(MinPositiveExponent(SpecOf(d))));
#pragma unroll
          for (int i = 0; i < V; ++i) x[i] = source[i] > 0.0f ? fmaxf(x[i], least) : x[i];
        }
      }
      if (dithers && quick_noise) {
        const uint32_t key = LeafKey(h.key, leaf.index);
        const uint32_t position = Position(leaf.layout, at.first);  // a block lies within a run
        uint32_t noise[V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
          noise[i] = NoiseOf(k, Scramble(key, position + static_cast<uint32_t>(at.element(i) - at.first)), h.phase);
        }
        if (tiny) {
#pragma unroll
          for (int i = 0; i < V; ++i) x[i] = Dithered(x[i], noise[i]);
        } else {
#pragma unroll
          for (int i = 0; i < V; ++i) x[i] = DitheredNormal(x[i], noise[i]);
        }
      }
      codes = EncodeWords(d, x);
    }
    StoreWords(at, d, leaf.part[k].out, codes);
  }

  Words<V> result;
  if (master_type == kAbsent) {
    float x[V];  // not `fused ? of.w : of.update`: arrays that are chosen between live in memory
#pragma unroll
    for (int k = 0; k < V; ++k) x[k] = fused ? of.w[k] : of.update[k];
    result = CastWords(F::out(leaf), x);
  } else {
    const DType p_type = F::p(leaf);
    Words<V> param = {};
    if (remainder) {
      const bool wide = master_type == kRemainder16;
      Words<V> rest = {};
      if (F::kRunTime && (p_type == kF16 || F::stochastic(leaf, kMaster))) {
#pragma unroll
        for (int k = 0; k < V; ++k) {
          const Remainder r = ExactRemainder(leaf, words, of.w[k], at.element(k));
          Insert(p_type, param, k, r.param);
          Insert(master_type, rest, k, static_cast<uint32_t>(r.rest));
        }
      } else {
        // The bits of the master are those of the parameter and the remainder, but for what rounding carries. Half of
        // the parameter's last place flips just the upper bit of 8 bits below it.
        uint32_t rounded[V];
#pragma unroll
        for (int k = 0; k < V; ++k) rounded[k] = __float_as_uint(of.w[k]) + (wide ? 0x8000u : 0x8080u);
#pragma unroll
        for (int k = 0; k < V; k += 2) {
          param.w[k / 2] = __byte_perm(rounded[k], rounded[k + 1], 0x7632);
          if (wide) rest.w[k / 2] = __byte_perm(__float_as_uint(of.w[k]), __float_as_uint(of.w[k + 1]), 0x5410);
        }
        if (!wide) {
#pragma unroll
          for (int k = 0; k < V; k += 4) {
            const uint32_t low = __byte_perm(rounded[k], rounded[k + 1], 0x0051);
            const uint32_t high = __byte_perm(rounded[k + 2], rounded[k + 3], 0x0051);
            rest.w[k / 4] = __byte_perm(low, high, 0x5410) ^ 0x80808080u;
          }
        }
      }
      StoreWords(at, master_type, leaf.part[kMaster].out, rest);
    } else {
      param = CastWords(p_type, of.w);
    }
    if (fused) {
      result = param;
    } else {
      float x[V], p[V];
      DecodeWords(p_type, param, x);
      DecodeWords(p_type, Opaque(p_words), p);
#pragma unroll
      for (int k = 0; k < V; ++k) x[k] = x[k] - p[k];
      result = CastWords(F::out(leaf), x);
    }
  }
  StoreWords(at, fused ? F::p(leaf) : F::out(leaf), leaf.out, result);
}

// Steps a thread's elements of one block; `lanes` threads share the block, and the first ones of the thread block have
// the leaf's block `first_block`.
template <typename F, Task kTask, typename Access>
__device__ __forceinline__ void StepBlock(const DeviceLeaf& leaf, const Hyper* words, const Hyper& h,
                                          const float* absmax, const Access& at, const Inputs<Access::kV>& in,
                                          int64_t first_block, int lanes) {
  constexpr int V = Access::kV;
  const uint32_t flags = leaf.flags;
  const DType master_type = F::part(leaf, kMaster);
  const bool remainder = IsRemainder(master_type);

  float mu[V], nu[V], stored[V], w[V], update[V];
  Quick quick;
  {
    float g[V], numerator[V], denominator[V];
    DecodeWords(F::g(leaf), in.g, g);
    DecodeWords(F::part(leaf, kMu), in.mu, mu);
    DecodeWords(F::part(leaf, kNu), in.nu, nu);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      g[k] = g[k] * h.grad_scale;
      mu[k] = StepMu(h, g[k], mu[k] * in.scale[kMu]);
      const float old = nu[k] * in.scale[kNu];
      nu[k] = StepNu(h, g[k], F::nu_root(leaf) ? old * old : old);
      quick.Radicand(nu[k]);
      const float root = QuickSqrt(nu[k]);
      denominator[k] = root * h.sqrt_nu_factor;
      numerator[k] = mu[k] * h.mu_factor;
      quick.max_mu = MaxOrNan(quick.max_mu, fabsf(mu[k]));
      quick.max_root = MaxOrNan(quick.max_root, root);
      stored[k] = F::nu_root(leaf) ? root : nu[k];
    }
    quick.max_numerator = quick.max_mu * h.mu_factor;
    if (flags & kNesterov) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        numerator[k] = numerator[k] + g[k] * h.grad_factor;
        quick.max_numerator = MaxOrNan(quick.max_numerator, fabsf(numerator[k]));
      }
    }
    if ((flags & kEpsRoot) && h.eps_root != 0.0f) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const float radicand = nu[k] * h.nu_factor + h.eps_root;
        quick.Radicand(radicand);
        denominator[k] = QuickSqrt(radicand);
        quick.max_denominator = MaxOrNan(quick.max_denominator, denominator[k]);
      }
    } else {
      quick.max_denominator = quick.max_root * h.sqrt_nu_factor;
    }
    quick.max_denominator = quick.max_denominator + h.eps;
    quick.min_denominator = h.eps;
#pragma unroll
    for (int k = 0; k < V; ++k) denominator[k] = denominator[k] + h.eps;
    if (!(h.eps > 0x1p-60f)) {
      quick.min_denominator = denominator[0];
#pragma unroll
      for (int k = 1; k < V; ++k) quick.min_denominator = fminf(quick.min_denominator, denominator[k]);
    }
#pragma unroll
    for (int k = 0; k < V; ++k) {
      quick.Numerator(numerator[k]);
      update[k] = QuickDivide(numerator[k], denominator[k]);
    }
  }

  if (!StepsMaster<F, kTask>(leaf)) {
#pragma unroll
    for (int k = 0; k < V; ++k) w[k] = 0.0f;
  } else {
    float p[V];
    DecodeWords(F::p(leaf), in.p, p);
    if (remainder) {
      const bool wide = master_type == kRemainder16;
#pragma unroll
      for (int k = 0; k < V; ++k) {
        if (F::kRunTime && F::p(leaf) == kF16) {
          const int32_t rest = wide ? static_cast<int16_t>(in.master.w[k / 2] >> (16 * (k % 2)))
                                    : static_cast<int8_t>(in.master.w[k / 4] >> (8 * (k % 4)));
          w[k] = DecodeRemainder(p[k], rest, kF16, wide ? 16 : 8);
        } else {
          const uint32_t rest = wide ? static_cast<int16_t>(in.master.w[k / 2] >> (16 * (k % 2)))
                                     : ByteTimes256(in.master.w[k / 4], k % 4);
          // A negative remainder beside a zero gives a NaN here, and so the exact way.
          w[k] = __uint_as_float(__float_as_uint(p[k]) + rest);
        }
      }
    } else if (master_type != kAbsent) {
      DecodeWords(master_type, in.master, w);
#pragma unroll
      for (int k = 0; k < V; ++k) w[k] = w[k] * in.scale[kMaster];
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) w[k] = p[k];
    }
    const bool decay = flags & kDecay;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float step = Step(h, decay, update[k], w[k]);
      w[k] = w[k] - step;
      update[k] = -step;
      quick.max_master = MaxOrNan(quick.max_master, fabsf(w[k]));
    }
  }

  const bool quick_holds = __all_sync(kAllLanes, quick.Holds());
  const int64_t warp_block = first_block + Thread() / kWarp * (kWarp / lanes);
  if (!quick_holds) {
    if constexpr (kTask == kMeasure) return MeasureBlocks(leaf, words, absmax, warp_block, kWarp / lanes);
    return ExactBlocks(leaf, words, absmax, warp_block, kWarp / lanes);
  }
  float region_max[kParts] = {quick.max_mu, F::nu_root(leaf) ? quick.max_root : 0.0f, quick.max_master};
  if (!F::nu_root(leaf)) {
#pragma unroll
    for (int k = 0; k < V; ++k) region_max[kNu] = fmaxf(region_max[kNu], nu[k]);
  }
  if constexpr (kTask == kMeasure) {
    Measured(leaf, absmax, region_max);
  } else {
    StoreBlock<F>(leaf, words, h, absmax, at, in.p, {mu, stored, w, update}, region_max, quick, first_block, lanes);
  }
}

// --- skipped steps --------------------------------------------------------------------------------------------------

__device__ void CopyBytes(void* to, const void* from, int64_t begin, int64_t end) {
  if (to == from) return;
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    static_cast<uint8_t*>(to)[i] = static_cast<const uint8_t*>(from)[i];
  }
}

// Leaves the elements [begin, end), whole blocks of every part, as they are.
__device__ __noinline__ void SkipElements(const Leaf& leaf, int64_t begin, int64_t end) {
  for (const Part& part : leaf.part) {
    const int64_t bytes = Bytes(part.dtype);
    if (part.dtype != kAbsent) CopyBytes(part.out, part.in, begin * bytes, end * bytes);
    if (part.scaling == kBlock) {
      const int64_t last = BlockOf(leaf, part, end - 1) + 1;
      CopyBytes(part.scale_out, part.scale_in, BlockOf(leaf, part, begin) * 4, last * 4);
    }
  }
  const int64_t bytes = Bytes(leaf.out_dtype);
  if (leaf.flags & kFused) return CopyBytes(leaf.out, leaf.p, begin * bytes, end * bytes);
  for (int64_t i = begin * bytes + threadIdx.x; i < end * bytes; i += blockDim.x) {
    static_cast<uint8_t*>(leaf.out)[i] = 0;
  }
}

__device__ __forceinline__ bool Skips(const Leaf& leaf, const Hyper* words) {
  return (leaf.flags & kSkippable) && words->skip;
}

// --- kernels --------------------------------------------------------------------------------------------------------

__device__ __noinline__ void SkipBlocks(const DeviceLeaf& leaf, int64_t first, int64_t count) {
  const Extent last = ExtentOf(leaf, min(first + count, leaf.block_count) - 1);
  SkipElements(leaf, ExtentOf(leaf, first).first, last.first + last.length);
}

template <typename F, Task kTask>
__global__ void __launch_bounds__(kThreads, F::kRunTime ? kResidentAny : kResident)
    VectorKernel(const __grid_constant__ Table table, const Hyper* words, const float* absmax) {
  const int index = FindLeaf(table, blockIdx.x);
  const DeviceLeaf& leaf = table.leaf[index];
  const int lanes = F::kRunTime ? static_cast<int>(leaf.block_length) / kVector : kBlockLength / kVector;
  const int blocks = kThreads / lanes;
  const int lane = threadIdx.x % lanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x - table.start[index]) * blocks;
  if (kTask == kStep && Skips(leaf, words)) return SkipBlocks(leaf, first, blocks);
  const int64_t block = first + threadIdx.x / lanes;
  Extent extent;
  if (leaf.row == leaf.size) {
    extent.first = block * (lanes * kVector);
    extent.length = leaf.size - extent.first;
  } else {
    extent = ExtentOf(leaf, block);
    if (block >= leaf.block_count) extent.length = 0;
  }
  const VectorAccess at = {extent.first + lane * kVector, lane * kVector < extent.length};
  const Hyper h = ReadHyper(words);
  const Inputs<kVector> inputs = LoadInputs<F, kTask>(leaf, at, block);
  __syncwarp();  // all loads are on their way before the first is waited for
  StepBlock<F, kTask>(leaf, words, h, absmax, at, inputs, first, lanes);
}

template <typename F>
__global__ void __launch_bounds__(kThreads, F::kRunTime ? kResidentAny : kResident)
    StridedKernel(const __grid_constant__ Table table, const Hyper* words, const float* absmax) {
  constexpr int kBlocks = kThreads / kWarp;
  const int index = FindLeaf(table, blockIdx.x);
  const DeviceLeaf& leaf = table.leaf[index];
  const int lane = threadIdx.x % kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.x - table.start[index]) * kBlocks;
  if (Skips(leaf, words)) return SkipBlocks(leaf, first, kBlocks);
  const int64_t block = first + threadIdx.x / kWarp;
  if (block >= leaf.block_count) return;
  const Extent extent = ExtentOf(leaf, block);
  const StridedAccess at = {extent.first + lane, extent.length - lane};
  StepBlock<F, kStep>(leaf, words, ReadHyper(words), absmax, at, LoadInputs<F, kStep>(leaf, at, block), first, kWarp);
}

// One thread block for each unit, one part after the other and one warp for each of its blocks. The master comes first
// because it needs the old moments; each pass only writes what later ones do not read.
__global__ void __launch_bounds__(kGeneralThreads)
    GeneralKernel(const __grid_constant__ Table table, const Hyper* words, const float* absmax) {
  const int index = FindLeaf(table, blockIdx.x);
  const DeviceLeaf& leaf = table.leaf[index];
  const int64_t unit = blockIdx.x - table.start[index];
  if (Skips(leaf, words)) return SkipBlocks(leaf, unit, 1);
  const Extent extent = ExtentOf(leaf, unit);
  const int64_t end = extent.first + extent.length;

  for (const int k : {kMaster, kMu, kNu}) {
    const Part& part = leaf.part[k];
    const int64_t length = part.scaling == kBlock ? part.block : kBlockLength;
    for (int64_t piece = threadIdx.x / kWarp; extent.first + piece * length < end; piece += kGeneralThreads / kWarp) {
      const int64_t first = extent.first + piece * length;
      ExactPart(leaf, words, absmax, k, first, min(end, first + length));
    }
    __syncthreads();
  }
}

// Tensor scales are written last, when no thread block needs the old ones.
__global__ void TensorScaleKernel(const __grid_constant__ Table table, const Hyper* words, const float* absmax) {
  for (int i = threadIdx.x; i < table.leaf_count * kParts; i += blockDim.x) {
    const Leaf& leaf = table.leaf[i / kParts];
    const int k = i % kParts;
    const Part& part = leaf.part[k];
    if (part.scaling != kTensor) continue;
    const float scale = ScaleOf(AbsmaxOf(absmax, leaf, k), SpecOf(part.dtype)).scale;
    *part.scale_out = Skips(leaf, words) ? *part.scale_in : scale;
  }
}

__global__ void __launch_bounds__(kThreads)
    AbsmaxKernel(const __grid_constant__ Table table, const Hyper* words, const float* absmax) {
  const int index = FindLeaf(table, blockIdx.x);
  const DeviceLeaf& leaf = table.leaf[index];
  const int64_t first = static_cast<int64_t>(blockIdx.x - table.start[index]) * kAbsmaxElements;
  const int64_t end = min(leaf.size, first + kAbsmaxElements);
  const Hyper h = ReadHyper(words);
  float region_max[kParts] = {};
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads) MeasureElement(leaf, h, i, region_max);
  Measured(leaf, absmax, region_max);
}

// --- which kernel a leaf gets ---------------------------------------------------------------------------------------

struct Kernel {
  const void* function;
  int threads;
  bool (*fits)(const Leaf&);  // whether the leaf has its formats
};

template <typename F, Task kTask = kStep>
Kernel Vectors() {
  return {reinterpret_cast<const void*>(&VectorKernel<F, kTask>), kThreads, &F::Fits};
}
template <typename F>
Kernel Strided() {
  return {reinterpret_cast<const void*>(&StridedKernel<F>), kThreads, &F::Fits};
}

using AnyFormats = Formats<kAny, kAny, kAny, kAny, kAny, kAny>;
template <int kG, int kP, int kMaster>
using Moments8 = Formats<kG, kP, kE4M3, kE4M3, true, kMaster>;
template <int kG, int kP, int kMaster>
using MomentsMixed = Formats<kG, kP, kE4M3, kF16, false, kMaster>;
template <int kG, int kP, int kMaster>
using Moments32 = Formats<kG, kP, kF32, kF32, false, kMaster>;

// The first that fits is taken.
template <int kG>
struct Specialised {
  static inline const Kernel kVectors[10] = {
      Vectors<Moments8<kG, kBF16, kRemainder16>>(),
      Vectors<Moments8<kG, kBF16, kRemainder8>>(),
      Vectors<Moments8<kG, kBF16, kF16>>(),
      Vectors<Moments8<kG, kF32, kAbsent>>(),
      Vectors<MomentsMixed<kG, kBF16, kRemainder16>>(),
      Vectors<MomentsMixed<kG, kBF16, kRemainder8>>(),
      Vectors<MomentsMixed<kG, kBF16, kF16>>(),
      Vectors<MomentsMixed<kG, kF32, kAbsent>>(),
      Vectors<Moments32<kG, kF32, kAbsent>>(),
      Vectors<Moments32<kG, kBF16, kF32>>(),
  };
  static inline const Kernel kStrided[4] = {
      Strided<Moments8<kG, kBF16, kRemainder16>>(),
      Strided<Moments8<kG, kBF16, kRemainder8>>(),
      Strided<Moments8<kG, kBF16, kF16>>(),
      Strided<Moments8<kG, kF32, kAbsent>>(),
  };
};
const Kernel kOthers[] = {
    Vectors<AnyFormats>(),
    Strided<AnyFormats>(),
    {reinterpret_cast<const void*>(&GeneralKernel), kGeneralThreads, nullptr},
    {reinterpret_cast<const void*>(&TensorScaleKernel), kThreads, nullptr},
    {reinterpret_cast<const void*>(&AbsmaxKernel), kThreads, nullptr},
    Vectors<AnyFormats, kMeasure>(),
};
const Kernel& kAnyVectors = kOthers[0];
const Kernel& kAnyStrided = kOthers[1];
const Kernel& kGeneral = kOthers[2];
const Kernel& kTensorScales = kOthers[3];
const Kernel& kAbsmax = kOthers[4];
const Kernel& kAnyMeasure = kOthers[5];

// --- launches -------------------------------------------------------------------------------------------------------

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The least power of two that is not smaller than n.
int64_t PowerFrom(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

bool Aligned(const Leaf& leaf) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(leaf.g) | reinterpret_cast<uintptr_t>(leaf.p) |
                   reinterpret_cast<uintptr_t>(leaf.out);
  for (const Part& part : leaf.part) {
    bits |= reinterpret_cast<uintptr_t>(part.in) | reinterpret_cast<uintptr_t>(part.out);
  }
  return bits % 16 == 0;
}

template <size_t N>
const Kernel* FirstFit(const Kernel (&kernels)[N], const Leaf& leaf) {
  const Kernel* kernel = std::find_if(kernels, kernels + N, [&](const Kernel& k) { return k.fits(leaf); });
  return kernel == kernels + N ? nullptr : kernel;
}

const Kernel* VectorKernelFor(const DeviceLeaf& leaf) {
  if (leaf.block_length != kBlockLength) return &kAnyVectors;
  const Kernel* kernel = nullptr;
  if (leaf.g_dtype == kBF16) kernel = FirstFit(Specialised<kBF16>::kVectors, leaf);
  if (leaf.g_dtype == kF32) kernel = FirstFit(Specialised<kF32>::kVectors, leaf);
  return kernel ? kernel : &kAnyVectors;
}

const Kernel* StridedKernelFor(const DeviceLeaf& leaf) {
  const Kernel* kernel = nullptr;
  if (leaf.g_dtype == kBF16) kernel = FirstFit(Specialised<kBF16>::kStrided, leaf);
  if (leaf.g_dtype == kF32) kernel = FirstFit(Specialised<kF32>::kStrided, leaf);
  return kernel ? kernel : &kAnyStrided;
}

// A leaf with its kernel, and how many groups of blocks (those that a thread block does at once) it has.
struct Work {
  const Kernel* kernel;
  DeviceLeaf leaf;
  int64_t groups;
  bool vectors = false;  // whether VectorKernel suits
};

Work Plan(const Leaf& leaf) {
  Work work = {nullptr, {leaf}, 0};
  DeviceLeaf& d = work.leaf;
  bool alike = true;
  d.block_length = 0;
  for (const Part& part : leaf.part) {
    if (part.scaling != kBlock) continue;
    alike = alike && (d.block_length == 0 || d.block_length == part.block);
    d.block_length = part.block;
  }
  if (!alike) {
    d.block_length = UnitOf(leaf);
    d.blocks = CeilDiv(leaf.row, d.block_length);
    work.kernel = &kGeneral;
    work.groups = d.block_count = leaf.size / leaf.row * d.blocks;
    return work;
  }
  const bool no_blocks = d.block_length == 0;
  if (no_blocks) d.block_length = kBlockLength;
  // Rows of whole blocks are as good as one long row, and so are any where nothing has blocks.
  if (leaf.row % d.block_length == 0 || (no_blocks && leaf.layout.run == 0)) {
    d.row = leaf.size;
    for (Part& part : d.part) part.blocks = part.scaling == kBlock ? leaf.size / part.block : 0;
  }
  d.blocks = CeilDiv(d.row, d.block_length);
  d.block_count = d.size / d.row * d.blocks;

  // A row that is shorter than a block may be spread over the threads of a longer one.
  const int64_t slot = d.blocks == 1 ? PowerFrom(d.block_length) : d.block_length;
  const bool power = (slot & (slot - 1)) == 0;
  if (power && slot >= kVector && slot <= kVector * kWarp && d.row % kVector == 0 && Aligned(leaf)) {
    d.block_length = slot;
    work.kernel = VectorKernelFor(d);
    work.vectors = true;
    work.groups = CeilDiv(d.block_count, kThreads / (slot / kVector));
  } else if (d.block_length <= kBlockLength) {
    work.kernel = StridedKernelFor(d);
    work.groups = CeilDiv(d.block_count, kThreads / kWarp);
  } else {
    work.kernel = &kGeneral;
    work.groups = d.block_count;
  }
  return work;
}

// Launches all work, as many leaves at a time as the parameters of a kernel can hold.
ffi::Error Launch(cudaStream_t stream, std::vector<Work> work, const void* words, const void* absmax) {
  std::stable_sort(work.begin(), work.end(), [](const Work& a, const Work& b) { return a.kernel < b.kernel; });
  Table table;
  const Work* const end = work.data() + work.size();
  for (const Work* next = work.data(); next != end;) {
    const Kernel& kernel = *next->kernel;
    const Work* const alike = std::find_if(next, end, [&](const Work& w) { return w.kernel != &kernel; });
    while (next != alike) {
      int64_t thread_blocks = 0;
      table.leaf_count = 0;
      for (; next != alike && table.leaf_count < kMaxLeaves; ++next) {
        const int64_t sum = thread_blocks + next->groups;
        if (sum > std::numeric_limits<int32_t>::max()) break;
        table.start[table.leaf_count] = static_cast<uint32_t>(thread_blocks);
        table.leaf[table.leaf_count++] = next->leaf;
        thread_blocks = sum;
      }
      if (table.leaf_count == 0) {
        return ffi::Error::InvalidArgument("optax_lowprec: a leaf has too many blocks for one launch");
      }
      table.start[table.leaf_count] = static_cast<uint32_t>(thread_blocks);
      table.shift = 0;
      while ((thread_blocks - 1) >> table.shift >= kShares) ++table.shift;
      for (int share = 0, leaf = 0; (static_cast<int64_t>(share) << table.shift) < thread_blocks; ++share) {
        while (table.start[leaf + 1] <= static_cast<uint32_t>(share) << table.shift) ++leaf;
        table.first_leaf[share] = static_cast<uint8_t>(leaf);
      }
      void* arguments[] = {&table, &words, &absmax};
      const cudaError_t error =
          cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(thread_blocks)), dim3(kernel.threads), arguments,
                           0, stream);
      if (error != cudaSuccess) return ffi::Error::Internal(std::string("optax_lowprec: ") + cudaGetErrorString(error));
    }
  }
  return ffi::Error::Success();
}

bool HasTensorScale(const Leaf& leaf) {
  return std::any_of(leaf.part, leaf.part + kParts, [](const Part& part) { return part.scaling == kTensor; });
}

ffi::Error HandleStep(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Span<const int64_t> numbers, int64_t tensor) {
  CallFrame frame(args, rets);
  if (ffi::Error e = frame.ParseStep(numbers, tensor != 0); e.failure()) return e;
  std::vector<Work> work;
  std::vector<Work> tensor_scales;
  for (const Leaf& leaf : frame.leaves()) {
    if (leaf.size > 0) work.push_back(Plan(leaf));
    if (HasTensorScale(leaf)) tensor_scales.push_back({&kTensorScales, {leaf}, 1});
  }
  if (ffi::Error e = Launch(stream, std::move(work), frame.words(), frame.absmax()); e.failure()) return e;
  return Launch(stream, std::move(tensor_scales), frame.words(), frame.absmax());
}

ffi::Error HandleAbsmax(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Span<const int64_t> numbers) {
  CallFrame frame(args, rets);
  if (ffi::Error e = frame.ParseAbsmax(numbers); e.failure()) return e;
  const size_t bytes = kParts * frame.leaf_count() * sizeof(float);
  if (const cudaError_t error = cudaMemsetAsync(frame.absmax_out(), 0, bytes, stream); error != cudaSuccess) {
    return ffi::Error::Internal(std::string("optax_lowprec: ") + cudaGetErrorString(error));
  }
  std::vector<Work> work;
  for (const Leaf& leaf : frame.leaves()) {
    if (leaf.size == 0 || !HasTensorScale(leaf)) continue;
    Work planned = Plan(leaf);
    if (planned.vectors) {
      planned.kernel = &kAnyMeasure;
    } else {
      planned = {&kAbsmax, {leaf}, CeilDiv(leaf.size, kAbsmaxElements)};
    }
    work.push_back(planned);
  }
  return Launch(stream, std::move(work), frame.words(), frame.absmax_out());
}

// Loads every kernel: under lazy loading the first launch does, which must not happen while a graph is captured.
ffi::Error HandleInitialize(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  cudaFuncAttributes attributes;
  const auto load = [&](const Kernel& kernel) { return cudaFuncGetAttributes(&attributes, kernel.function); };
  cudaError_t error = cudaSuccess;
  const auto load_all = [&](const auto& kernels) {
    for (const Kernel& kernel : kernels) {
      if (error == cudaSuccess) error = load(kernel);
    }
  };
  load_all(Specialised<kBF16>::kVectors);
  load_all(Specialised<kF32>::kVectors);
  load_all(Specialised<kBF16>::kStrided);
  load_all(Specialised<kF32>::kStrided);
  load_all(kOthers);
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("optax_lowprec: cannot load the kernels: ") + cudaGetErrorString(error));
}

}  // namespace
}  // namespace optax_lowprec

OLP_EXPORT XLA_FFI_Error* OptaxLowprecStep(XLA_FFI_CallFrame*);
OLP_EXPORT XLA_FFI_Error* OptaxLowprecAbsmax(XLA_FFI_CallFrame*);
OLP_EXPORT XLA_FFI_Error* OptaxLowprecInit(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(OptaxLowprecStep, optax_lowprec::HandleStep,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("leaves")
                                  .Attr<int64_t>("tensor"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(OptaxLowprecAbsmax, optax_lowprec::HandleAbsmax,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("leaves"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

// For the initialize stage of both targets.
XLA_FFI_DEFINE_HANDLER_SYMBOL(OptaxLowprecInit, optax_lowprec::HandleInitialize,
                              xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

OLP_EXPORT int optax_lowprec_ffi_api_version(void) { return optax_lowprec::kFfiApiVersion; }
// The architectures that CMake compiled for.
#define OLP_STRING(x) #x
#define OLP_STRING_OF(x) OLP_STRING(x)
OLP_EXPORT const char* optax_lowprec_cuda_archs(void) { return OLP_STRING_OF(OLP_CUDA_ARCHS); }
