// The element maths of a step and the codecs of the stored formats, for host and device.
//
// optax_lowprec/formats.py and reference.py are the specification; everything here gives their bits. That needs
// subnormals treated as zero, IEEE square roots and divisions, and no product contracted into an addition: build with
// -ffp-contract=off (host), -ftz=true -fmad=false (device).

#ifndef OPTAX_LOWPREC_CORE_H_
#define OPTAX_LOWPREC_CORE_H_

#include <cstdint>

// Internal linkage and always inlined: the CPU kernels are compiled once for each instruction set, and the linker must
// not merge a function that one of them emitted with another's.
#if defined(__CUDACC__)
#define OLP_FN static __host__ __device__ __forceinline__
#else
#define OLP_FN static inline __attribute__((always_inline))
#endif

namespace optax_lowprec {

// The numbers of these enums are the interface with optax_lowprec/ffi.py.
enum DType : uint8_t { kF32, kBF16, kF16, kE4M3, kE5M2, kRemainder16, kRemainder8, kAbsent };
enum Scaling : uint8_t { kUnscaled, kBlock, kTensor };
enum Flag : uint32_t {
  kFused = 1,       // the result is the new parameter, not the update
  kDirection = 2,   // the update is Adam's direction alone
  kNesterov = 4,
  kDecay = 8,
  kEpsRoot = 16,    // eps_root may differ from 0
  kSkippable = 32,
  kHasParam = 64,
};
enum PartIndex { kMu, kNu, kMaster, kParts };

constexpr int kHyperWords = 16;

// The scalars of a step, in the order of the `words` operand.
struct alignas(16) Hyper {
  float learning_rate, b1, one_minus_b1, b2, one_minus_b2, eps, eps_root, weight_decay;
  float mu_factor, grad_factor, nu_factor, sqrt_nu_factor, grad_scale;
  uint32_t skip, key, phase;  // of the noise: see NoiseOf
};
static_assert(sizeof(Hyper) == kHyperWords * 4);

// One part of a leaf's state: where it lies and how it is stored.
struct Part {
  const void* in;
  void* out;
  const float* scale_in;
  float* scale_out;
  int64_t block;   // elements; 0 where not block-scaled
  int64_t blocks;  // blocks in a row
  DType dtype;
  Scaling scaling;
  bool sqrt;
  bool stochastic;
};

// Where the elements of a shard lie in the whole leaf, for the random bits: `run` of them on end, `runs` such runs
// `run_stride` apart, and groups of those runs `group_stride` apart. Rows and blocks lie within a run.
struct Layout {
  const uint32_t* base;  // the position of the first
  int64_t run;           // 0: this is the whole leaf
  int64_t run_stride, runs, group_stride;
};

struct Leaf {
  const void* g;
  const void* p;
  void* out;
  Part part[kParts];
  int64_t size;
  int64_t row;  // elements; blocks do not cross rows
  uint32_t flags;
  uint32_t index;  // among all leaves of the tree, for the random bits
  uint32_t slot;   // among the leaves of this call, for `absmax`
  Layout layout;
  DType g_dtype, p_dtype, out_dtype;
};

OLP_FN constexpr int Bytes(DType d) {
  return d == kF32 ? 4 : d == kBF16 || d == kF16 || d == kRemainder16 ? 2 : d == kAbsent ? 0 : 1;
}
OLP_FN constexpr bool IsRemainder(DType d) { return d == kRemainder16 || d == kRemainder8; }

// --- bits -----------------------------------------------------------------------------------------------------------

OLP_FN uint32_t Bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}

OLP_FN float Float(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(x);
#else
  return __builtin_bit_cast(float, x);
#endif
}

OLP_FN float Sqrt(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

constexpr uint32_t kSignBit = 0x80000000u;
constexpr int32_t kInfinity = 0x7F800000;
constexpr uint32_t kInfinityBits = kInfinity;

// The bits without the sign. Signed, because few instruction sets compare vectors of unsigned integers.
OLP_FN int32_t Magnitude(float x) { return static_cast<int32_t>(Bits(x) & 0x7FFFFFFFu); }

// Bits of 2^exponent.
OLP_FN constexpr uint32_t PowerBits(int exponent) { return static_cast<uint32_t>(exponent + 127) << 23; }

// --- formats --------------------------------------------------------------------------------------------------------

struct FloatSpec {
  int bits, mantissa, min_exponent;
  int32_t max_bits;        // the largest value, as a float32's bits
  uint32_t nan;            // code
  int32_t first_special;   // the smallest code that is infinite or NaN
  float inverse_max;       // 1 / the code that an absmax is mapped to
};

OLP_FN constexpr FloatSpec SpecOf(DType d) {
  switch (d) {
    case kBF16: return {16, 7, -126, 0x7F7F0000, 0x7FC0u, 0x7F80, 1.0f};
    case kF16: return {16, 10, -14, 0x477FE000, 0x7E00u, 0x7C00, static_cast<float>(1.0 / 32752.0)};
    case kE4M3: return {8, 3, -6, 0x43E00000, 0x7Fu, 0x7F, static_cast<float>(1.0 / 448.0)};
    case kE5M2: return {8, 2, -14, 0x47600000, 0x7Eu, 0x7C, static_cast<float>(1.0 / 57344.0)};
    default: return {32, 23, -126, 0x7F7FFFFF, 0x7FC00000u, 0x7F800000, 1.0f};
  }
}

// Whether values out of range are stored as the largest code; bfloat16 and float32 have float32's range.
OLP_FN constexpr bool Saturates(FloatSpec f) { return f.min_exponent > -126; }
// What turns a code's exponent into a float32's, at float32's position.
OLP_FN constexpr uint32_t Rebias(FloatSpec f) { return static_cast<uint32_t>(f.min_exponent + 126) << 23; }
OLP_FN constexpr int MinPositiveExponent(FloatSpec f) { return Saturates(f) ? f.min_exponent - f.mantissa : -62; }

// The code that a positive second moment is stored as where it would be 0.
OLP_FN constexpr uint32_t SmallestCode(FloatSpec f, bool scaled) {
  return Saturates(f) ? 1u : PowerBits(scaled ? MinPositiveExponent(f) : -126) >> (23 - f.mantissa);
}

// A code as float32.
OLP_FN float Decode(uint32_t code, FloatSpec f) {
  if (f.bits == 32) return Float(code);
  const int32_t magnitude = static_cast<int32_t>(code) & ((1 << (f.bits - 1)) - 1);
  const uint32_t sign = (code >> (f.bits - 1)) << 31;
  uint32_t wide = static_cast<uint32_t>(magnitude) << (23 - f.mantissa);
  if (Saturates(f)) {
    const uint32_t normal = wide + Rebias(f);
    // A subnormal code, read as if it had an implicit one, is too large by just that one.
    const uint32_t small = Bits(Float(normal + (1u << 23)) - Float(PowerBits(f.min_exponent)));
    const uint32_t special = wide | kInfinityBits;
    wide = magnitude < (1 << f.mantissa) ? small : normal;
    wide = magnitude >= f.first_special ? special : wide;
  }
  return Float(wide | sign);
}

// Float32 to a code, to nearest even or with 32 bits of noise. Saturates where the format does; NaN stays NaN.
OLP_FN uint32_t Encode(float x, FloatSpec f, bool stochastic, uint32_t noise32) {
  const uint32_t bits = Bits(x);
  if (f.bits == 32) return bits;
  const int drop = 23 - f.mantissa;
  const uint32_t sign = (bits >> 31) << (f.bits - 1);
  const bool nan = Magnitude(x) > kInfinity;
  if (!Saturates(f)) {
    const uint32_t up = stochastic ? noise32 >> (32 - drop) : ((1u << (drop - 1)) - 1) + ((bits >> drop) & 1u);
    return nan ? f.nan : (bits + up) >> drop;
  }
  const int32_t magnitude = Magnitude(x) < f.max_bits ? Magnitude(x) : f.max_bits;
  const int32_t min_normal = static_cast<int32_t>(PowerBits(f.min_exponent));
  uint32_t code;
  if (stochastic) {
    // Subnormal codes are equally spaced: adding a power of two aligns them in the sum's mantissa.
    const uint32_t up = noise32 >> (32 - drop);
    const uint32_t aligned = Bits(Float(magnitude) + Float(min_normal)) - (1u << 23);
    code = ((magnitude < min_normal ? aligned : magnitude) + up - Rebias(f)) >> drop;
  } else {
    // Adding 2^(drop + exponent) leaves the rounded value, in units of the code's last place, in the sum's mantissa.
    const int32_t exponent = magnitude & kInfinity;
    const uint32_t base = exponent > min_normal ? exponent : min_normal;
    const uint32_t aligner = base + (static_cast<uint32_t>(drop) << 23);
    code = Bits(Float(magnitude) + Float(aligner)) - aligner + ((base - min_normal) >> drop);
  }
  // One NaN: which sign an invalid operation gives depends on the processor.
  return nan ? f.nan : code | sign;
}

struct Scale {
  float scale;
  float inverse;
};

// The scale of a region from its absmax (over finite values). It is never so small that 1 / scale overflows or the
// smallest code decodes to a subnormal.
OLP_FN Scale ScaleOf(float absmax, FloatSpec f) {
  const float product = absmax * f.inverse_max;
  const float least = Float(PowerBits(-126 - MinPositiveExponent(f)));
  const float most = Float(PowerBits(126));  // the reciprocal of more is subnormal
  const float scale = product > least ? (product < most ? product : most) : least;
  return absmax > 0.0f ? Scale{scale, 1.0f / scale} : Scale{0.0f, 0.0f};
}

// The bits of |x| where x is finite, else 0.
OLP_FN int32_t FiniteMagnitude(float x) {
  const int32_t magnitude = Magnitude(x);
  return magnitude < kInfinity ? magnitude : 0;
}

// --- random bits ----------------------------------------------------------------------------------------------------

// A 32-bit finalizer with low bias (constants: C. Wellons, hash-prospector, "lowbias32").
OLP_FN uint32_t Mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

OLP_FN uint32_t LeafKey(uint32_t key, uint32_t index) { return Mix(key + index * 0x85EBCA6Bu); }
constexpr uint32_t kGolden = 0x9E3779B9u;  // 2^32 / golden ratio
OLP_FN uint32_t Scramble(uint32_t leaf_key, uint32_t position) {
  const uint32_t x = position * kGolden + leaf_key;
  return x ^ (x >> 15);
}
// The position (modulo 2^32) in the whole leaf of a shard's element.
OLP_FN uint32_t Position(const Layout& layout, int64_t element) {
  if (layout.run == 0) return static_cast<uint32_t>(element);
  const int64_t run = element / layout.run;
  const int64_t group = run / layout.runs;
  return *layout.base + static_cast<uint32_t>(element - run * layout.run +
                                              (run - group * layout.runs) * layout.run_stride +
                                              group * layout.group_stride);
}
// The noise of part k, see optax_lowprec/formats.py: `phase` goes round by the golden ratio from step to step.
OLP_FN constexpr uint32_t NoiseFactor(int k) { return k == kMu ? 0xDB4F0B91u : k == kNu ? 0xAC564B05u : 0xCC9E2D51u; }
OLP_FN uint32_t NoiseOf(int k, uint32_t scrambled, uint32_t phase) { return scrambled * NoiseFactor(k) + phase; }

// --- parameters and remainders --------------------------------------------------------------------------------------

// Float32 to the bits of a parameter or update: as a cast does, not saturating.
OLP_FN uint32_t CastTo(float x, DType d) {
  const uint32_t code = Encode(x, SpecOf(d), false, 0);
  const bool infinite = d == kF16 && Magnitude(x) >= Magnitude(65520.0f) && Magnitude(x) <= kInfinity;
  return infinite ? ((Bits(x) >> 31) << 15) | 0x7C00u : code;
}

// The exponent bits of what a remainder of 1 is worth beside a float16 parameter.
OLP_FN uint32_t UnitBits(float param, int bits) {
  const int32_t exponent = static_cast<int32_t>(Bits(param)) & kInfinity;
  const int32_t least = static_cast<int32_t>(PowerBits(-14));
  return static_cast<uint32_t>(exponent > least ? exponent : least) - (static_cast<uint32_t>(10 + bits) << 23);
}

// The float32 master that a bfloat16 or float16 parameter (given as float32) and its remainder stand for.
OLP_FN float DecodeRemainder(float param, int32_t rest, DType param_dtype, int bits) {
  if (param_dtype == kF16) {
    const float master = param + static_cast<float>(rest) * Float(UnitBits(param, bits));
    return Magnitude(param) < kInfinity ? master : param;
  }
  // Beside a zero (a parameter that was set to 0 from outside) a negative remainder would run into the NaNs.
  rest = Magnitude(param) == 0 && rest < 0 ? 0 : rest;
  return Float(Bits(param) + (static_cast<uint32_t>(rest) << (16 - bits)));
}

struct Remainder {
  uint32_t param;  // code
  int32_t rest;
};

OLP_FN Remainder EncodeRemainder(float master, DType param_dtype, int bits, bool stochastic, uint32_t noise32) {
  const uint32_t w = Bits(master);
  if (param_dtype == kF16) {
    const uint32_t code = CastTo(master, kF16);
    const float p = Decode(code, SpecOf(kF16));
    const float limit = static_cast<float>(1 << (bits - 1));
    // The unit is a power of two, so the product with its reciprocal is the quotient.
    const uint32_t unit = UnitBits(p, bits);
    float rest = (master - p) * Float(PowerBits(127) - unit);
    rest = Magnitude(p) < kInfinity ? rest : 0.0f;
    // |rest| is at most 2^15, so adding 1.5 * 2^23 rounds it to an integer, half to even.
    const float magic = 12582912.0f;
    const float dithered = rest + static_cast<float>(static_cast<int32_t>(noise32 >> 8)) * Float(PowerBits(-24));
    const float truncated = static_cast<float>(static_cast<int32_t>(dithered));
    const float floor = truncated > dithered ? truncated - 1.0f : truncated;
    rest = stochastic ? floor : (rest + magic) - magic;
    // Half way to the next parameter above 8 bits are a unit short: that one. (16 bits are as well, but float32 rounds it
    // away.) The last place of a power of two is worth twice that of what lies below it.
    const bool up = bits == 8 && rest >= limit && p < Float(static_cast<uint32_t>(SpecOf(kF16).max_bits));
    const float above = p + 2.0f * limit * Float(unit);
    const float from_above = UnitBits(above, bits) > unit ? -0.5f * limit : -limit;
    rest = rest < limit ? rest : limit - 1.0f;
    return {up ? CastTo(above, kF16) : code, static_cast<int32_t>(up ? from_above : rest)};
  }
  const bool nan = Magnitude(master) > kInfinity;
  const bool special = Magnitude(master) >= kInfinity;
  uint32_t kept = w;
  if (bits == 8) {
    kept = w + (stochastic ? noise32 >> 24 : 0x80u);
    // Rounding up must not carry a finite master into infinity.
    kept = (kept & kInfinityBits) == kInfinityBits ? (w & kSignBit) | 0x7F7FFF00u : kept & 0xFFFFFF00u;
    kept = special ? w : kept;
  }
  // Half up, not half to even: only so do 16 bits tell every float32 apart.
  const uint32_t param = nan ? 0x7FC0u : (kept + 0x8000u) >> 16;
  const int32_t rest = static_cast<int32_t>(kept - (param << 16)) >> (16 - bits);
  return {param, special ? 0 : rest};
}

// --- the step of one element ----------------------------------------------------------------------------------------

OLP_FN float StepMu(const Hyper& h, float g, float mu) { return h.b1 * mu + h.one_minus_b1 * g; }
OLP_FN float StepNu(const Hyper& h, float g, float nu) { return h.b2 * nu + h.one_minus_b2 * (g * g); }

OLP_FN float Denominator(const Hyper& h, bool eps_root, float nu, float root) {
  float d = root * h.sqrt_nu_factor;
  if (eps_root) {
    const float rooted = Sqrt(nu * h.nu_factor + h.eps_root);
    d = h.eps_root == 0.0f ? d : rooted;
  }
  return d + h.eps;
}

OLP_FN float Numerator(const Hyper& h, bool nesterov, float g, float mu) {
  const float n = mu * h.mu_factor;
  return nesterov ? n + g * h.grad_factor : n;
}

// What is subtracted from the master.
OLP_FN float Step(const Hyper& h, bool decay, float direction, float master) {
  if (decay) direction = direction + h.weight_decay * master;
  return h.learning_rate * direction;
}

}  // namespace optax_lowprec

#endif  // OPTAX_LOWPREC_CORE_H_
