// Leaves on the host, and their step by the exact maths of element.h alone, one element after the other.

#ifndef OPTAX_LOWPREC_DRIVER_REFERENCE_H_
#define OPTAX_LOWPREC_DRIVER_REFERENCE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../core.h"
#include "../element.h"
#include "xla/ffi/api/c_api.h"

namespace optax_lowprec::driver {

struct PartFormat {
  DType dtype = kAbsent;
  Scaling scaling = kUnscaled;
  bool sqrt = false;
  bool stochastic = false;
  int64_t block = 128;
};

struct Combination {
  std::string name;
  DType g, p;
  PartFormat part[kParts];
  bool direction = false;  // moments only
  bool sharded = false;    // the leaves are parts of larger ones
};

// A leaf's geometry: what formats.block_geometry makes of a shape. `trail` elements belong together.
struct Shape {
  int64_t size, row;
  int64_t trail = 1;
};

// The arrays of a leaf.
enum Slot { kGrad, kParam, kOut, kCodes, kScales = kCodes + kParts, kSlots = kScales + kParts };
using Arrays = std::array<std::vector<uint8_t>, kSlots>;

struct LeafSpec {
  const Combination* formats;
  Shape shape;
  uint32_t flags;
  uint32_t index;
  uint32_t slot;

  int64_t block(int k) const {
    return std::max<int64_t>(1, formats->part[k].block / shape.trail) * shape.trail;
  }
  bool block_scaled() const {
    return std::any_of(formats->part, formats->part + kParts, [](const PartFormat& f) { return f.scaling == kBlock; });
  }
  bool sharded() const { return formats->sharded && shape.size > 0; }

  // How an array is stored; kAbsent where there is none.
  DType dtype(int array) const {
    if (array == kGrad) return formats->g;
    if (array == kParam) return flags & kHasParam ? formats->p : kAbsent;
    if (array == kOut) return formats->p;
    if (array < kScales) return formats->part[array - kCodes].dtype;
    const PartFormat& f = formats->part[array - kScales];
    return f.dtype == kAbsent || f.scaling == kUnscaled ? kAbsent : kF32;
  }
  int64_t count(int array) const {
    if (array < kScales) return shape.size;
    const int k = array - kScales;
    if (formats->part[k].scaling == kTensor) return 1;
    const int64_t length = std::min(block(k), std::max<int64_t>(shape.row, 1));
    return shape.size == 0 ? 0 : shape.size / shape.row * ((shape.row + length - 1) / length);
  }
  int64_t bytes(int array) const { return count(array) * Bytes(dtype(array)); }

  // As optax_lowprec/ffi.py's leaf_attributes.
  std::vector<int64_t> Numbers() const {
    std::vector<int64_t> numbers = {flags};
    for (const PartFormat& f : formats->part) {
      numbers.push_back(f.dtype | f.scaling << 4 | f.sqrt << 6 | f.stochastic << 7);
    }
    numbers.push_back(shape.row);
    for (int k = 0; k < kParts; ++k) numbers.push_back(formats->part[k].scaling == kBlock ? block(k) : 0);
    numbers.push_back(index);
    const int64_t run = sharded() ? shape.row : 0;
    for (int64_t x : {run, run ? 2 * run + 3 : 0, run ? int64_t{1} : 0, run ? 3 * run + 1 : 0}) numbers.push_back(x);
    return numbers;
  }

  Leaf View(Arrays& in, Arrays& out, const uint32_t* base) const {
    Leaf leaf = {};
    leaf.g = in[kGrad].data();
    leaf.p = in[kParam].data();
    leaf.out = out[kOut].data();
    leaf.size = shape.size;
    leaf.row = sharded() || block_scaled() ? shape.row : shape.size;
    leaf.flags = flags;
    leaf.index = index;
    leaf.slot = slot;
    leaf.g_dtype = formats->g;
    leaf.p_dtype = leaf.out_dtype = formats->p;
    if (sharded()) leaf.layout = {base, shape.row, 2 * shape.row + 3, 1, 3 * shape.row + 1};
    for (int k = 0; k < kParts; ++k) {
      const PartFormat& f = formats->part[k];
      const int64_t length = std::min(block(k), std::max<int64_t>(shape.row, 1));
      const bool blocks = f.scaling == kBlock;
      leaf.part[k] = {in[kCodes + k].data(),
                      out[kCodes + k].data(),
                      reinterpret_cast<const float*>(in[kScales + k].data()),
                      reinterpret_cast<float*>(out[kScales + k].data()),
                      blocks ? length : 0,
                      blocks ? (shape.row + length - 1) / length : 0,
                      f.dtype, f.scaling, f.sqrt, f.stochastic};
    }
    return leaf;
  }
};

// Calls `run` with subnormals treated as zero, as the formats ask for.
template <typename Run>
void FlushingSubnormals(const Run& run) {
  // Behind a pointer that the compiler does not see through, no arithmetic moves out of the region.
  void (*volatile call)(const Run&) = +[](const Run& r) { r(); };
#if defined(__x86_64__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040u);
  call(run);
  _mm_setcsr(saved);
#elif defined(__aarch64__)
  uint64_t saved;
  asm volatile("mrs %0, fpcr" : "=r"(saved));
  asm volatile("msr fpcr, %0" : : "r"(saved | (uint64_t{1} << 24)));
  call(run);
  asm volatile("msr fpcr, %0" : : "r"(saved));
#else
#error "How does this processor treat subnormals as zero?"
#endif
}

inline void ReferenceAbsmax(const Leaf& leaf, const Hyper& h, float* absmax) {
  for (int64_t i = 0; i < leaf.size; ++i) {
    const Element e = StepElement(leaf, h, i);
    for (int k = 0; k < kParts; ++k) {
      absmax[k] = std::max(absmax[k], Float(FiniteMagnitude(SourceOf(leaf, k, e))));
    }
  }
}

// `absmax`: of the leaf's parts, for tensor scales. Inputs and outputs are apart.
inline void ReferenceStep(const Leaf& leaf, const Hyper& h, const float* absmax) {
  std::vector<Element> elements(leaf.size);
  std::vector<uint32_t> scrambled(leaf.size);
  for (int64_t i = 0; i < leaf.size; ++i) {
    elements[i] = StepElement(leaf, h, i);
    scrambled[i] = Scramble(LeafKey(h.key, leaf.index), Position(leaf.layout, i));
  }
  std::vector<uint32_t> params(leaf.size);
  for (int k = 0; k < kParts; ++k) {
    const Part& part = leaf.part[k];
    if (part.dtype == kAbsent) continue;
    if (IsRemainder(part.dtype)) {
      for (int64_t i = 0; i < leaf.size; ++i) {
        const Remainder r = EncodeRemainder(elements[i].master, leaf.p_dtype, RemainderBits(part.dtype),
                                            part.stochastic, NoiseOf(k, scrambled[i], h.phase));
        params[i] = r.param;
        StoreCode(part.dtype, part.out, i, static_cast<uint32_t>(r.rest));
      }
      continue;
    }
    std::vector<Scale> scales;
    if (part.scaling == kBlock) {
      std::vector<float> largest(leaf.size == 0 ? 0 : leaf.size / leaf.row * part.blocks);
      for (int64_t i = 0; i < leaf.size; ++i) {
        float& m = largest[BlockOf(leaf, part, i)];
        m = std::max(m, Float(FiniteMagnitude(SourceOf(leaf, k, elements[i]))));
      }
      for (float m : largest) scales.push_back(ScaleOf(m, SpecOf(part.dtype)));
    } else {
      scales.push_back(part.scaling == kTensor ? ScaleOf(absmax[k], SpecOf(part.dtype)) : Scale{1.0f, 1.0f});
    }
    for (int64_t i = 0; i < leaf.size; ++i) {
      const Scale& s = scales[part.scaling == kBlock ? BlockOf(leaf, part, i) : 0];
      const float source = SourceOf(leaf, k, elements[i]);
      StoreCode(part.dtype, part.out, i, EncodePart(part, k, source, s.inverse, scrambled[i], h.phase));
      if (k == kMaster) params[i] = CastTo(elements[i].master, leaf.p_dtype);
    }
    if (part.scaling == kUnscaled) continue;
    for (size_t b = 0; b < scales.size(); ++b) part.scale_out[b] = scales[b].scale;
  }
  for (int64_t i = 0; i < leaf.size; ++i) {
    const float p = leaf.flags & kHasParam ? LoadFloat(leaf.p_dtype, leaf.p, i) : 0.0f;
    StoreCode(leaf.out_dtype, leaf.out, i, EncodeResult(leaf, elements[i], params[i], p));
  }
}

// Signs and payloads of NaNs depend on the processor.
inline uint32_t WithOneNan(DType d, uint32_t code) {
  if (IsRemainder(d)) return code;
  const FloatSpec f = SpecOf(d);
  const int32_t magnitude = static_cast<int32_t>(code & (0xFFFFFFFFu >> (33 - f.bits)));
  return magnitude > f.first_special || (d == kE4M3 && magnitude == f.first_special) ? f.nan : code;
}

inline XLA_FFI_DataType WireType(DType d) {
  switch (d) {
    case kBF16: return XLA_FFI_DataType_BF16;
    case kF16: return XLA_FFI_DataType_F16;
    case kE4M3: return XLA_FFI_DataType_F8E4M3FN;
    case kE5M2: return XLA_FFI_DataType_F8E5M2;
    case kRemainder16: return XLA_FFI_DataType_S16;
    case kRemainder8: return XLA_FFI_DataType_S8;
    default: return XLA_FFI_DataType_F32;
  }
}

}  // namespace optax_lowprec::driver

#endif  // OPTAX_LOWPREC_DRIVER_REFERENCE_H_
