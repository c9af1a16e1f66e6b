// One element of a leaf with its dtypes read at run time, for host and device: what the CUDA kernels do where they
// cannot be quick.

#ifndef OPTAX_LOWPREC_ELEMENT_H_
#define OPTAX_LOWPREC_ELEMENT_H_

#include <cstdint>

#include "core.h"

namespace optax_lowprec {

OLP_FN uint32_t LoadCode(DType d, const void* from, int64_t i) {
  switch (Bytes(d)) {
    case 1: return static_cast<const uint8_t*>(from)[i];
    case 2: return static_cast<const uint16_t*>(from)[i];
    default: return static_cast<const uint32_t*>(from)[i];
  }
}

OLP_FN void StoreCode(DType d, void* to, int64_t i, uint32_t code) {
  switch (Bytes(d)) {
    case 1: static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(code); break;
    case 2: static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(code); break;
    default: static_cast<uint32_t*>(to)[i] = code;
  }
}

OLP_FN float LoadFloat(DType d, const void* from, int64_t i) { return Decode(LoadCode(d, from, i), SpecOf(d)); }

OLP_FN int64_t BlockOf(const Leaf& leaf, const Part& part, int64_t i) {
  return i / leaf.row * part.blocks + i % leaf.row / part.block;
}

// What `part` stores at i, the transform not undone.
OLP_FN float LoadStored(const Leaf& leaf, const Part& part, int64_t i) {
  const float x = LoadFloat(part.dtype, part.in, i);
  if (part.scaling == kUnscaled) return x;
  return x * part.scale_in[part.scaling == kBlock ? BlockOf(leaf, part, i) : 0];
}

OLP_FN int RemainderBits(DType d) { return d == kRemainder16 ? 16 : 8; }

// The new values of an element.
struct Element {
  float mu, nu, root, master;
  float update;  // on the chain path and without a master
};

OLP_FN Element StepElement(const Leaf& leaf, const Hyper& h, int64_t i) {
  const float g = LoadFloat(leaf.g_dtype, leaf.g, i) * h.grad_scale;
  const float mu_old = LoadStored(leaf, leaf.part[kMu], i);
  float nu_old = LoadStored(leaf, leaf.part[kNu], i);
  if (leaf.part[kNu].sqrt) nu_old = nu_old * nu_old;
  Element e;
  e.mu = StepMu(h, g, mu_old);
  e.nu = StepNu(h, g, nu_old);
  e.root = Sqrt(e.nu);
  const float direction = Numerator(h, leaf.flags & kNesterov, g, e.mu) /
                          Denominator(h, leaf.flags & kEpsRoot, e.nu, e.root);
  if (leaf.flags & kDirection) {
    e.master = 0.0f;
    e.update = direction;
    return e;
  }
  const Part& part = leaf.part[kMaster];
  float w;
  if (IsRemainder(part.dtype)) {
    const int bits = RemainderBits(part.dtype);
    const uint32_t code = LoadCode(part.dtype, part.in, i);
    const int32_t rest = static_cast<int32_t>(code << (32 - bits)) >> (32 - bits);
    w = DecodeRemainder(LoadFloat(leaf.p_dtype, leaf.p, i), rest, leaf.p_dtype, bits);
  } else {
    w = part.dtype == kAbsent ? LoadFloat(leaf.p_dtype, leaf.p, i) : LoadStored(leaf, part, i);
  }
  const float step = Step(h, leaf.flags & kDecay, direction, w);
  e.master = w - step;
  e.update = -step;
  return e;
}

// The value of `e` that part k stores.
OLP_FN float SourceOf(const Leaf& leaf, int k, const Element& e) {
  return k == kMu ? e.mu : k == kMaster ? e.master : leaf.part[kNu].sqrt ? e.root : e.nu;
}

// The code of part k (which is not a remainder) for `source`.
OLP_FN uint32_t EncodePart(const Part& part, int k, float source, float inverse, uint32_t scrambled,
                           uint32_t phase) {
  const FloatSpec spec = SpecOf(part.dtype);
  const bool scaled = part.scaling != kUnscaled;
  const uint32_t noise32 = part.stochastic ? NoiseOf(k, scrambled, phase) : 0;
  const uint32_t code = Encode(scaled ? source * inverse : source, spec, part.stochastic, noise32);
  return k == kNu && source > 0.0f && code == 0 ? SmallestCode(spec, scaled) : code;
}

// The code of the result, for a leaf without a master or with the new parameter's code.
OLP_FN uint32_t EncodeResult(const Leaf& leaf, const Element& e, uint32_t new_param, float p) {
  const bool fused = leaf.flags & kFused;
  if (leaf.part[kMaster].dtype == kAbsent) return CastTo(fused ? e.master : e.update, leaf.out_dtype);
  return fused ? new_param : CastTo(Decode(new_param, SpecOf(leaf.p_dtype)) - p, leaf.out_dtype);
}

}  // namespace optax_lowprec

#endif  // OPTAX_LOWPREC_ELEMENT_H_
