// The step on the CPU, a tile at a time: plain loops over float32 arrays that stay in the first-level cache, one stage
// after the other, which compilers vectorise. Each stage knows one dtype only, so any combination of formats is fast.
//
// Nothing here may call an inline function of the standard library: this file is compiled for several instruction
// sets, and the linker would merge such functions.

#include "cpu_kernel.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX2__) && defined(__F16C__)
#define OLP_QUICK
#include "cpu_quick.h"
#endif

#if !defined(OLP_KERNEL)
#error "define OLP_KERNEL as the name of the kernel table"
#endif

namespace optax_lowprec {
namespace {

// Treats subnormals as zero within a scope, as the specification wants.
class FlushSubnormals {
 public:
#if defined(__SSE2__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (uint64_t{1} << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
#error "say how this processor flushes subnormals to zero"
#endif
};

template <DType D>
struct Tag {
  static constexpr DType value = D;
};

template <typename F>
void WithDType(DType d, F f) {
  switch (d) {
    case kF32: return f(Tag<kF32>());
    case kBF16: return f(Tag<kBF16>());
    case kF16: return f(Tag<kF16>());
    case kE4M3: return f(Tag<kE4M3>());
    case kE5M2: return f(Tag<kE5M2>());
    default: return;
  }
}

template <int kBytes>
struct CodeOfBytes;
template <>
struct CodeOfBytes<1> {
  using type = uint8_t;
};
template <>
struct CodeOfBytes<2> {
  using type = uint16_t;
};
template <>
struct CodeOfBytes<4> {
  using type = uint32_t;
};
template <DType D>
using Code = typename CodeOfBytes<Bytes(D)>::type;

int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

struct alignas(64) Tile {
  float g[kTile];
  float p[kTile];
  float mu[kTile];
  float nu[kTile];
  float root[kTile];
  float w[kTile];  // the master, then the new one
  float out[kTile];
  uint32_t noise[kTile];  // of scrambled positions
  uint32_t param[kTile];  // codes of the new one
};

// Codes are widened to 32 bits before, and narrowed after everything else: compilers that see both in one loop mix
// vectors of all widths.
template <typename Wide, typename Narrowed>
void Narrow(const Wide* __restrict__ wide, int64_t n, Narrowed* __restrict__ to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Narrowed>(wide[i]);
}

#if defined(OLP_QUICK)
// The processor's conversion from float16 decodes the 8-bit formats too. Its subnormals are never flushed. Returns how
// many codes it decoded.
template <DType D>
int64_t LoadByHardware(const Code<D>* codes, int64_t n, float scale, float* to) {
  if constexpr (D == kE4M3) {
    // NaN has no float16 of the kind used below.
    int nan = 0;
    for (int64_t i = 0; i < n; ++i) nan |= (codes[i] & 0x7F) == 0x7F;
    if (nan) return 0;
  }
  // Read as a float16, a float8_e4m3fn is 2^-8 of its value. A scale is at most 2^120, so the product is exact.
  const __m256 factor = _mm256_set1_ps(D == kE4M3 ? scale * 256.0f : scale);
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + 8 <= n; i += 8) {
    __m128i half;
    if constexpr (D == kF16) {
      half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    } else {
      half = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
      half = D == kE5M2 ? _mm_slli_epi16(half, 8)
                        : _mm_and_si128(_mm_slli_epi16(half, 7), _mm_set1_epi16(static_cast<int16_t>(0xBF80)));
    }
    _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_cvtph_ps(half), factor));
  }
  return i;
}
#else
template <DType D>
int64_t LoadByHardware(const Code<D>*, int64_t, float, float*) {
  return 0;
}
#endif

// Decodes `n` codes and multiplies them by `scale`.
void Load(DType d, const void* from, int64_t first, int64_t n, float scale, float* __restrict__ to) {
  WithDType(d, [=](auto tag) {
    constexpr DType kD = decltype(tag)::value;
    const Code<kD>* __restrict__ codes = static_cast<const Code<kD>*>(from) + first;
    if constexpr (kD == kF32 || kD == kBF16) {
      for (int64_t i = 0; i < n; ++i) to[i] = Decode(codes[i], SpecOf(kD));
      if (scale == 1.0f) return;
      for (int64_t i = 0; i < n; ++i) to[i] = to[i] * scale;
    } else {
      const int64_t done = LoadByHardware<kD>(codes, n, scale, to);
      uint32_t wide[kTile];
      for (int64_t i = done; i < n; ++i) wide[i] = codes[i];
      for (int64_t i = done; i < n; ++i) to[i] = Decode(wide[i], SpecOf(kD)) * scale;
    }
  });
}

template <bool kStochastic, bool kPositive>
void StoreCodes(DType d, bool scaled, const float* __restrict__ x, float inverse, const uint32_t* __restrict__ noise,
                PartIndex k, uint32_t phase, int64_t n, void* to, int64_t first) {
  WithDType(d, [&](auto tag) {
    constexpr DType kD = decltype(tag)::value;
    uint32_t codes[kTile];
    const uint32_t smallest = SmallestCode(SpecOf(kD), scaled);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t noise32 = kStochastic ? NoiseOf(k, noise[i], phase) : 0u;
      uint32_t code = Encode(x[i] * inverse, SpecOf(kD), kStochastic, noise32);
      if (kPositive) code = x[i] > 0.0f && code == 0 ? smallest : code;
      codes[i] = code;
    }
    Narrow(codes, n, static_cast<Code<kD>*>(to) + first);
  });
}

void Store(DType d, const float* __restrict__ x, int64_t n, void* to, int64_t first) {
  WithDType(d, [&](auto tag) {
    constexpr DType kD = decltype(tag)::value;
    uint32_t codes[kTile];
    for (int64_t i = 0; i < n; ++i) codes[i] = CastTo(x[i], kD);
    Narrow(codes, n, static_cast<Code<kD>*>(to) + first);
  });
}

// Calls f(offset, length, block) for each piece of a block in the elements [first, first + n); offsets are from first.
template <typename F>
void ForEachBlock(const Leaf& leaf, const Part& part, int64_t first, int64_t n, F f) {
  int64_t row = first / leaf.row;
  int64_t column = first % leaf.row;
  int64_t in_row = column / part.block;
  for (int64_t done = 0; done < n;) {
    const int64_t block_end = (in_row + 1) * part.block;
    const int64_t length = (block_end < leaf.row ? block_end : leaf.row) - column;
    const int64_t take = length < n - done ? length : n - done;
    f(done, take, row * part.blocks + in_row);
    done += take;
    column += take;
    ++in_row;
    if (column == leaf.row) {
      column = in_row = 0;
      ++row;
    }
  }
}

int64_t BlockOf(const Leaf& leaf, const Part& part, int64_t element) {
  return element / leaf.row * part.blocks + element % leaf.row / part.block;
}

void LoadPart(const Leaf& leaf, const Part& part, int64_t first, int64_t n, float* to) {
  if (part.scaling == kBlock) {
    ForEachBlock(leaf, part, first, n, [&](int64_t offset, int64_t length, int64_t block) {
      Load(part.dtype, part.in, first + offset, length, part.scale_in[block], to + offset);
    });
  } else {
    Load(part.dtype, part.in, first, n, part.scaling == kTensor ? *part.scale_in : 1.0f, to);
  }
}

template <typename Rest, DType kParam>
void LoadRemainder(const void* from, int64_t first, int64_t n, const float* __restrict__ p, float* __restrict__ w) {
  const Rest* codes = static_cast<const Rest*>(from) + first;
  int32_t rest[kTile];
  for (int64_t i = 0; i < n; ++i) rest[i] = codes[i];
  for (int64_t i = 0; i < n; ++i) w[i] = DecodeRemainder(p[i], rest[i], kParam, 8 * sizeof(Rest));
}

// Stores the remainders of w and leaves the codes of the parameters that they refer to in `param`.
template <typename Rest, DType kParam, bool kStochastic>
void StoreRemainder(const float* __restrict__ w, const uint32_t* __restrict__ noise, uint32_t phase, int64_t n,
                    void* to, int64_t first, uint32_t* __restrict__ param) {
  int32_t rest[kTile];
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t noise32 = kStochastic ? NoiseOf(kMaster, noise[i], phase) : 0u;
    const Remainder r = EncodeRemainder(w[i], kParam, 8 * sizeof(Rest), kStochastic, noise32);
    rest[i] = r.rest;
    param[i] = r.param;
  }
  Narrow(rest, n, static_cast<Rest*>(to) + first);
}

template <bool kNesterov, bool kWithEpsRoot>
void Moments(const Hyper& hyper, int64_t n, Tile& t) {
  const Hyper h = hyper;
  for (int64_t i = 0; i < n; ++i) {
    const float g = t.g[i] * h.grad_scale;
    const float mu = StepMu(h, g, t.mu[i]);
    const float nu = StepNu(h, g, t.nu[i]);
    const float root = Sqrt(nu);
    t.mu[i] = mu;
    t.nu[i] = nu;
    t.root[i] = root;
    t.out[i] = Numerator(h, kNesterov, g, mu) / Denominator(h, kWithEpsRoot, nu, root);
  }
}

// The float32 values of the elements [first, first + n): loads, and computes new moments, master and result.
void Compute(const Leaf& leaf, const Hyper& h, int64_t first, int64_t n, Tile& t) {
  const Part& master = leaf.part[kMaster];
  Load(leaf.g_dtype, leaf.g, first, n, 1.0f, t.g);
  if (leaf.flags & kHasParam) Load(leaf.p_dtype, leaf.p, first, n, 1.0f, t.p);
  LoadPart(leaf, leaf.part[kMu], first, n, t.mu);
  LoadPart(leaf, leaf.part[kNu], first, n, t.nu);
  if (leaf.part[kNu].sqrt) {
    for (int64_t i = 0; i < n; ++i) t.nu[i] = t.nu[i] * t.nu[i];
  }
  const bool nesterov = leaf.flags & kNesterov;
  if (leaf.flags & kEpsRoot) {
    nesterov ? Moments<true, true>(h, n, t) : Moments<false, true>(h, n, t);
  } else {
    nesterov ? Moments<true, false>(h, n, t) : Moments<false, false>(h, n, t);
  }
  if (leaf.flags & kDirection) return;

  if (IsRemainder(master.dtype)) {
    const bool half = leaf.p_dtype == kF16;
    if (master.dtype == kRemainder16) {
      half ? LoadRemainder<int16_t, kF16>(master.in, first, n, t.p, t.w)
           : LoadRemainder<int16_t, kBF16>(master.in, first, n, t.p, t.w);
    } else {
      half ? LoadRemainder<int8_t, kF16>(master.in, first, n, t.p, t.w)
           : LoadRemainder<int8_t, kBF16>(master.in, first, n, t.p, t.w);
    }
  } else if (master.dtype != kAbsent) {
    LoadPart(leaf, master, first, n, t.w);
  } else {
    for (int64_t i = 0; i < n; ++i) t.w[i] = t.p[i];
  }
  const bool decay = leaf.flags & kDecay;
  for (int64_t i = 0; i < n; ++i) {
    const float step = Step(h, decay, t.out[i], t.w[i]);
    t.w[i] = t.w[i] - step;
    t.out[i] = -step;
  }
}

const float* Stored(const Part& part, PartIndex k, const Tile& t) {
  return k == kMu ? t.mu : k == kMaster ? t.w : part.sqrt ? t.root : t.nu;
}

float FiniteAbsmax(const float* x, int64_t n) {
  int32_t absmax = 0;
  for (int64_t i = 0; i < n; ++i) absmax = absmax > Magnitude(x[i]) ? absmax : Magnitude(x[i]);
  if (absmax >= kInfinity) {
    absmax = 0;
    for (int64_t i = 0; i < n; ++i) absmax = absmax > FiniteMagnitude(x[i]) ? absmax : FiniteMagnitude(x[i]);
  }
  return Float(static_cast<uint32_t>(absmax));
}

void StorePiece(const Part& part, PartIndex k, const float* x, const uint32_t* noise, uint32_t phase, float inverse,
                int64_t n, int64_t first) {
  const bool scaled = part.scaling != kUnscaled;
  if (k == kNu) {
    part.stochastic ? StoreCodes<true, true>(part.dtype, scaled, x, inverse, noise, k, phase, n, part.out, first)
                    : StoreCodes<false, true>(part.dtype, scaled, x, inverse, noise, k, phase, n, part.out, first);
  } else {
    part.stochastic ? StoreCodes<true, false>(part.dtype, scaled, x, inverse, noise, k, phase, n, part.out, first)
                    : StoreCodes<false, false>(part.dtype, scaled, x, inverse, noise, k, phase, n, part.out, first);
  }
}

// Stores a part of a tile. `block_absmax` belongs to the blocks from first_block on.
void StorePart(const Leaf& leaf, PartIndex k, int64_t first, int64_t n, const Tile& t, uint32_t phase,
               const float* tensor_absmax, const float* block_absmax, int64_t first_block) {
  const Part& part = leaf.part[k];
  const float* x = Stored(part, k, t);
  if (part.scaling == kBlock) {
    ForEachBlock(leaf, part, first, n, [&](int64_t offset, int64_t length, int64_t block) {
      const Scale s = ScaleOf(block_absmax[block - first_block], SpecOf(part.dtype));
      StorePiece(part, k, x + offset, t.noise + offset, phase, s.inverse, length, first + offset);
    });
  } else {
    const float inverse = part.scaling == kTensor ? ScaleOf(tensor_absmax[k], SpecOf(part.dtype)).inverse : 1.0f;
    StorePiece(part, k, x, t.noise, phase, inverse, n, first);
  }
}

template <typename Rest>
void StoreRemainderOf(const Leaf& leaf, uint32_t phase, int64_t first, int64_t n, Tile& t) {
  const Part& part = leaf.part[kMaster];
  if (leaf.p_dtype == kF16) {
    part.stochastic ? StoreRemainder<Rest, kF16, true>(t.w, t.noise, phase, n, part.out, first, t.param)
                    : StoreRemainder<Rest, kF16, false>(t.w, t.noise, phase, n, part.out, first, t.param);
  } else {
    part.stochastic ? StoreRemainder<Rest, kBF16, true>(t.w, t.noise, phase, n, part.out, first, t.param)
                    : StoreRemainder<Rest, kBF16, false>(t.w, t.noise, phase, n, part.out, first, t.param);
  }
}

// Stores what Compute left in the tile.
void StoreTile(const Leaf& leaf, const Hyper& h, int64_t first, int64_t n, Tile& t, const float* tensor_absmax,
               float* const (&block_absmax)[kParts], const int64_t (&first_block)[kParts]) {
  const Part& master = leaf.part[kMaster];
  if (leaf.part[kMu].stochastic || leaf.part[kNu].stochastic || master.stochastic) {
    const uint32_t key = LeafKey(h.key, leaf.index);
    for (int64_t begin = 0; begin < n;) {
      const int64_t run = leaf.layout.run;
      const int64_t end = run == 0 ? n : Min(n, begin + run - (first + begin) % run);
      const uint32_t position = Position(leaf.layout, first + begin);
      for (int64_t i = begin; i < end; ++i) t.noise[i] = Scramble(key, position + static_cast<uint32_t>(i - begin));
      begin = end;
    }
  }
  StorePart(leaf, kMu, first, n, t, h.phase, tensor_absmax, block_absmax[kMu], first_block[kMu]);
  StorePart(leaf, kNu, first, n, t, h.phase, tensor_absmax, block_absmax[kNu], first_block[kNu]);
  if (master.dtype == kAbsent) {
    if (leaf.flags & kFused) return Store(leaf.out_dtype, t.w, n, leaf.out, first);
    return Store(leaf.out_dtype, t.out, n, leaf.out, first);
  }

  if (master.dtype == kRemainder16) {
    StoreRemainderOf<int16_t>(leaf, h.phase, first, n, t);
  } else if (master.dtype == kRemainder8) {
    StoreRemainderOf<int8_t>(leaf, h.phase, first, n, t);
  } else {
    StorePart(leaf, kMaster, first, n, t, h.phase, tensor_absmax, block_absmax[kMaster], first_block[kMaster]);
    WithDType(leaf.p_dtype, [&](auto tag) {
      for (int64_t i = 0; i < n; ++i) t.param[i] = CastTo(t.w[i], decltype(tag)::value);
    });
  }
  WithDType(leaf.p_dtype, [&](auto tag) {
    constexpr DType kD = decltype(tag)::value;
    if (leaf.flags & kFused) return Narrow(t.param, n, static_cast<Code<kD>*>(leaf.out) + first);
    for (int64_t i = 0; i < n; ++i) t.out[i] = Decode(t.param[i], SpecOf(kD)) - t.p[i];
    Store(leaf.out_dtype, t.out, n, leaf.out, first);
  });
}

// The end of the unit that `element` lies in, or the end of the work where that comes first.
int64_t UnitEnd(const Leaf& leaf, int64_t unit, int64_t element, int64_t end) {
  const int64_t column = element % leaf.row;
  return Min(end, element - column + Min(leaf.row, (column / unit + 1) * unit));
}

void StepUnits(const Leaf& leaf, const Hyper& h, const float* tensor_absmax, int64_t unit, int64_t begin, int64_t end,
               float* scratch, int64_t blocks) {
  Tile t;
  float* const block_absmax[kParts] = {scratch, scratch + blocks, scratch + 2 * blocks};
  for (int64_t first = begin; first < end;) {
    int64_t last = UnitEnd(leaf, unit, first, end);
    for (int64_t next = last; next - first <= kTile; next = UnitEnd(leaf, unit, next, end)) {
      last = next;
      if (last == end) break;
    }
    const bool fits = last - first <= kTile;

    int64_t first_block[kParts] = {};
    int64_t block_count[kParts] = {};
    for (int k = 0; k < kParts; ++k) {
      const Part& part = leaf.part[k];
      if (part.scaling != kBlock) continue;
      first_block[k] = BlockOf(leaf, part, first);
      block_count[k] = BlockOf(leaf, part, last - 1) - first_block[k] + 1;
      for (int64_t i = 0; i < block_count[k]; ++i) block_absmax[k][i] = 0.0f;
    }
    for (int64_t at = first; at < last; at += kTile) {
      const int64_t n = Min(kTile, last - at);
      Compute(leaf, h, at, n, t);
      for (int k = 0; k < kParts; ++k) {
        const Part& part = leaf.part[k];
        if (part.scaling != kBlock) continue;
        const float* x = Stored(part, static_cast<PartIndex>(k), t);
        ForEachBlock(leaf, part, at, n, [&](int64_t offset, int64_t length, int64_t block) {
          float& absmax = block_absmax[k][block - first_block[k]];
          const float piece = FiniteAbsmax(x + offset, length);
          absmax = absmax > piece ? absmax : piece;
        });
      }
    }
    for (int64_t at = first; at < last; at += kTile) {
      const int64_t n = Min(kTile, last - at);
      if (!fits) Compute(leaf, h, at, n, t);
      StoreTile(leaf, h, at, n, t, tensor_absmax, block_absmax, first_block);
    }
    for (int k = 0; k < kParts; ++k) {
      for (int64_t i = 0; i < block_count[k]; ++i) {
        leaf.part[k].scale_out[first_block[k] + i] = ScaleOf(block_absmax[k][i], SpecOf(leaf.part[k].dtype)).scale;
      }
    }
    first = last;
  }
}

void StepRange(const Leaf& leaf, const Hyper& h, const float* tensor_absmax, int64_t unit, int64_t begin, int64_t end,
               float* scratch, int64_t blocks) {
  const FlushSubnormals flush;
#if defined(OLP_QUICK)
  if (const QuickFunction quick = QuickFor(leaf)) {
    ForEachBlock(leaf, leaf.part[kMu], begin, end - begin, [&](int64_t offset, int64_t length, int64_t block) {
      const int64_t first = begin + offset;
      if (length % kLanes == 0 && quick(leaf, h, first, length, block)) return;
      StepUnits(leaf, h, tensor_absmax, unit, first, first + length, scratch, blocks);
    });
    return;
  }
#endif
  StepUnits(leaf, h, tensor_absmax, unit, begin, end, scratch, blocks);
}

void AbsmaxRange(const Leaf& leaf, const Hyper& h, int64_t begin, int64_t end, float* absmax) {
  const FlushSubnormals flush;
  Tile t;
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t n = Min(kTile, end - at);
    Compute(leaf, h, at, n, t);
    for (int k = 0; k < kParts; ++k) {
      if (leaf.part[k].scaling != kTensor) continue;
      const float piece = FiniteAbsmax(Stored(leaf.part[k], static_cast<PartIndex>(k), t), n);
      absmax[k] = absmax[k] > piece ? absmax[k] : piece;
    }
  }
}

}  // namespace

extern const CpuKernel OLP_KERNEL;
const CpuKernel OLP_KERNEL = {StepRange, AbsmaxRange};

}  // namespace optax_lowprec
