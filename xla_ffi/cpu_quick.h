// The usual formats on processors with AVX2: a block in two passes, everything between load and store in registers.
//
// As in the CUDA kernels, this computes without branches what is right for finite values. Where it meets others it has
// written nothing, says so, and the general code does the block.

#ifndef OPTAX_LOWPREC_CPU_QUICK_H_
#define OPTAX_LOWPREC_CPU_QUICK_H_

#include <immintrin.h>

#include <cstdint>

#include "core.h"
#include "cpu_kernel.h"

namespace optax_lowprec {
namespace {

constexpr int kLanes = 8;

OLP_FN __m256i Ints(__m256 x) { return _mm256_castps_si256(x); }
OLP_FN __m256 Floats(__m256i x) { return _mm256_castsi256_ps(x); }
OLP_FN __m256i Splat(uint32_t x) { return _mm256_set1_epi32(static_cast<int32_t>(x)); }
OLP_FN __m256i Magnitudes(__m256 x) { return _mm256_and_si256(Ints(x), Splat(0x7FFFFFFFu)); }

OLP_FN int32_t MaxOf(__m256i x) {
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4E));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xB1));
  return _mm_cvtsi128_si32(half);
}

// Eight codes as float32. `special` gathers bits where a float8 code is NaN.
template <DType D>
OLP_FN __m256 LoadLanes(const void* from, int64_t i, __m128i* special) {
  if constexpr (D == kF32) {
    return _mm256_loadu_ps(static_cast<const float*>(from) + i);
  } else if constexpr (D == kE4M3) {
    // Read as a float16, a code is 2^-8 of its value: the caller's scale makes up for that.
    const uint8_t* codes = static_cast<const uint8_t*>(from) + i;
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xBF80)));
    const __m128i nan = _mm_set1_epi16(0x3F80);
    *special = _mm_or_si128(*special, _mm_cmpeq_epi16(_mm_and_si128(half, nan), nan));
    return _mm256_cvtph_ps(half);
  } else {
    const uint16_t* codes = static_cast<const uint16_t*>(from) + i;
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    if constexpr (D == kF16) return _mm256_cvtph_ps(half);
    return Floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
}

// The low 16 (8) bits of eight integers below 2^16 (2^8).
OLP_FN __m128i Pack16(__m256i x) { return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
OLP_FN void Store16(__m256i x, void* to, int64_t i) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(to) + i), Pack16(x));
}
OLP_FN void Store8(__m256i x, void* to, int64_t i) {
  const __m128i words = Pack16(x);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(static_cast<uint8_t*>(to) + i), _mm_packus_epi16(words, words));
}

// Finite scaled values to codes, to nearest even or with 32 bits of noise: Encode without what these cannot need.
template <DType D, bool kPositive, bool kStochastic = false>
OLP_FN void StoreScaled(__m256 source, __m256 inverse, void* to, int64_t i, __m256i noise32 = Splat(0)) {
  constexpr FloatSpec kSpec = SpecOf(D);
  constexpr int kDrop = 23 - kSpec.mantissa;
  const __m256i min_normal = Splat(PowerBits(kSpec.min_exponent));
  const __m256 x = _mm256_mul_ps(source, inverse);
  __m256i code;
  if constexpr (kStochastic) {
    // The product of an absmax and the inverse of its scale may be a little over the largest code.
    const __m256i magnitude = _mm256_min_epi32(Magnitudes(x), Splat(static_cast<uint32_t>(kSpec.max_bits)));
    const __m256i aligned = _mm256_sub_epi32(Ints(_mm256_add_ps(Floats(magnitude), Floats(min_normal))),
                                             Splat(1u << 23));
    const __m256i bits = _mm256_blendv_epi8(magnitude, aligned, _mm256_cmpgt_epi32(min_normal, magnitude));
    const __m256i up = _mm256_srli_epi32(noise32, 32 - kDrop);
    code = _mm256_srli_epi32(_mm256_sub_epi32(_mm256_add_epi32(bits, up), Splat(Rebias(kSpec))), kDrop);
  } else {
    const __m256i magnitude = Magnitudes(x);
    const __m256i base = _mm256_max_epi32(_mm256_and_si256(magnitude, Splat(kInfinityBits)), min_normal);
    const __m256i aligner = _mm256_add_epi32(base, Splat(static_cast<uint32_t>(kDrop) << 23));
    const __m256i sum = Ints(_mm256_add_ps(Floats(magnitude), Floats(aligner)));
    code = _mm256_add_epi32(_mm256_sub_epi32(sum, aligner),
                            _mm256_srli_epi32(_mm256_sub_epi32(base, min_normal), kDrop));
  }
  if constexpr (kPositive) {
    // At least 1 where the source is above 0.
    code = _mm256_max_epi32(code, _mm256_min_epi32(Ints(source), Splat(1)));
  } else {
    code = _mm256_or_si256(code, _mm256_slli_epi32(_mm256_srli_epi32(Ints(x), 31), kSpec.bits - 1));
  }
  if constexpr (kSpec.bits == 8) {
    Store8(code, to, i);
  } else {
    Store16(code, to, i);
  }
}

// Finite values to bfloat16, nearest even.
OLP_FN __m256i BFloat16Codes(__m256 x) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(Ints(x), 16), Splat(1));
  return _mm256_srli_epi32(_mm256_add_epi32(Ints(x), _mm256_add_epi32(odd, Splat(0x7FFF))), 16);
}

// The new parameter of finite masters, as codes, and their remainder or code.
template <DType M>
OLP_FN __m256i StoreMaster(__m256 w, __m256 inverse, void* to, int64_t i) {
  if constexpr (M == kF16) {
    StoreScaled<kF16, false>(w, inverse, to, i);
    return BFloat16Codes(w);
  } else if constexpr (M == kRemainder16) {
    Store16(_mm256_and_si256(Ints(w), Splat(0xFFFF)), to, i);
    return _mm256_srli_epi32(_mm256_add_epi32(Ints(w), Splat(0x8000)), 16);
  } else {
    const __m256i kept = _mm256_add_epi32(Ints(w), Splat(0x80));
    Store8(_mm256_and_si256(_mm256_srli_epi32(kept, 8), Splat(0xFF)), to, i);
    return _mm256_srli_epi32(_mm256_add_epi32(kept, Splat(0x8000)), 16);
  }
}

// Steps the n elements from `first` on, block number `block` of every scaled part. False, and nothing written, where
// values are not finite.
template <DType G, DType P, DType N, DType M, bool kMuNoise, bool kNuNoise>
bool QuickBlock(const Leaf& leaf, const Hyper& h, int64_t first, int64_t n, int64_t block) {
  constexpr bool kRoot = N == kE4M3;
  const Part& mu_part = leaf.part[kMu];
  const Part& nu_part = leaf.part[kNu];
  const Part& master = leaf.part[kMaster];
  const auto splat = [](float x) { return _mm256_set1_ps(x); };
  const __m256 mu_scale = splat(mu_part.scale_in[block] * 256.0f);
  const __m256 nu_scale = splat(nu_part.scale_in[block] * (kRoot ? 256.0f : 1.0f));
  const __m256 master_scale = splat(M == kF16 ? master.scale_in[block] : 1.0f);
  const __m256 grad_scale = splat(h.grad_scale), b1 = splat(h.b1), one_minus_b1 = splat(h.one_minus_b1);
  const __m256 b2 = splat(h.b2), one_minus_b2 = splat(h.one_minus_b2), eps = splat(h.eps);
  const __m256 mu_factor = splat(h.mu_factor), sqrt_nu_factor = splat(h.sqrt_nu_factor);
  const __m256 weight_decay = splat(h.weight_decay), learning_rate = splat(h.learning_rate);
  const bool decay = leaf.flags & kDecay;
  const bool fused = leaf.flags & kFused;

  // Without a master and on the chain path, w holds the update.
  alignas(32) float mu[kTile], stored[kTile], w[kTile];
  __m256i max_mu = Splat(0), max_stored = Splat(0), max_w = Splat(0);
  __m128i special = _mm_setzero_si128();
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m256 g = _mm256_mul_ps(LoadLanes<G>(leaf.g, first + i, &special), grad_scale);
    const __m256 old_mu = _mm256_mul_ps(LoadLanes<kE4M3>(mu_part.in, first + i, &special), mu_scale);
    __m256 old_nu = _mm256_mul_ps(LoadLanes<N>(nu_part.in, first + i, &special), nu_scale);
    if constexpr (kRoot) old_nu = _mm256_mul_ps(old_nu, old_nu);
    const __m256 new_mu = _mm256_add_ps(_mm256_mul_ps(b1, old_mu), _mm256_mul_ps(one_minus_b1, g));
    const __m256 new_nu = _mm256_add_ps(_mm256_mul_ps(b2, old_nu), _mm256_mul_ps(one_minus_b2, _mm256_mul_ps(g, g)));
    const __m256 root = _mm256_sqrt_ps(new_nu);
    const __m256 denominator = _mm256_add_ps(_mm256_mul_ps(root, sqrt_nu_factor), eps);
    __m256 direction = _mm256_div_ps(_mm256_mul_ps(new_mu, mu_factor), denominator);
    __m256 old;
    if constexpr (M == kAbsent) {
      old = LoadLanes<P>(leaf.p, first + i, &special);
    } else if constexpr (M == kF16) {
      old = _mm256_mul_ps(LoadLanes<kF16>(master.in, first + i, &special), master_scale);
    } else {
      const char* rests = static_cast<const char*>(master.in) + (first + i) * Bytes(M);
      const __m128i codes = M == kRemainder16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(rests))
                                              : _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rests));
      const __m256i rest = M == kRemainder16 ? _mm256_cvtepi16_epi32(codes)
                                             : _mm256_slli_epi32(_mm256_cvtepi8_epi32(codes), 8);
      // A negative remainder beside a zero gives a NaN here, and so the general way.
      old = Floats(_mm256_add_epi32(Ints(LoadLanes<P>(leaf.p, first + i, &special)), rest));
    }
    if (decay) direction = _mm256_add_ps(direction, _mm256_mul_ps(weight_decay, old));
    const __m256 step = _mm256_mul_ps(learning_rate, direction);
    const __m256 new_w = _mm256_sub_ps(old, step);
    _mm256_store_ps(mu + i, new_mu);
    _mm256_store_ps(stored + i, kRoot ? root : new_nu);
    const bool update = M == kAbsent && !fused;
    _mm256_store_ps(w + i, update ? _mm256_xor_ps(step, Floats(Splat(kSignBit))) : new_w);
    max_mu = _mm256_max_epi32(max_mu, Magnitudes(new_mu));
    max_stored = _mm256_max_epi32(max_stored, Magnitudes(kRoot ? root : new_nu));
    max_w = _mm256_max_epi32(max_w, Magnitudes(new_w));
  }
  const int32_t mu_absmax = MaxOf(max_mu), stored_absmax = MaxOf(max_stored), w_absmax = MaxOf(max_w);
  // The last binade of masters is left out as well: there, rounding could carry into infinity.
  if (mu_absmax >= kInfinity || stored_absmax >= kInfinity ||
      w_absmax >= static_cast<int32_t>(PowerBits(127)) || _mm_movemask_epi8(special) != 0) {
    return false;
  }

  const Scale mu_new = ScaleOf(Float(mu_absmax), SpecOf(kE4M3));
  const Scale nu_new = ScaleOf(Float(stored_absmax), SpecOf(N));
  const Scale w_new = ScaleOf(Float(w_absmax), SpecOf(kF16));
  // What is scrambled: a block lies within a run, so that its positions are on end.
  const uint32_t position = kMuNoise || kNuNoise ? Position(leaf.layout, first) : 0;
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i positions = _mm256_add_epi32(lanes, Splat(position));
  __m256i weyl = _mm256_add_epi32(_mm256_mullo_epi32(positions, Splat(kGolden)), Splat(LeafKey(h.key, leaf.index)));
  for (int64_t i = 0; i < n; i += kLanes) {
    __m256i mu_noise = Splat(0), nu_noise = Splat(0);
    if constexpr (kMuNoise || kNuNoise) {
      const __m256i scrambled = _mm256_xor_si256(weyl, _mm256_srli_epi32(weyl, 15));
      weyl = _mm256_add_epi32(weyl, Splat(kGolden * kLanes));
      const auto noise_of = [&](int k) {
        return _mm256_add_epi32(_mm256_mullo_epi32(scrambled, Splat(NoiseFactor(k))), Splat(h.phase));
      };
      if constexpr (kMuNoise) mu_noise = noise_of(kMu);
      if constexpr (kNuNoise) nu_noise = noise_of(kNu);
    }
    StoreScaled<kE4M3, false, kMuNoise>(_mm256_load_ps(mu + i), splat(mu_new.inverse), mu_part.out, first + i,
                                        mu_noise);
    StoreScaled<N, true, kNuNoise>(_mm256_load_ps(stored + i), splat(nu_new.inverse), nu_part.out, first + i,
                                   nu_noise);
    const __m256 x = _mm256_load_ps(w + i);
    if constexpr (M == kAbsent) {
      _mm256_storeu_ps(static_cast<float*>(leaf.out) + first + i, x);
    } else {
      const __m256i param = StoreMaster<M>(x, splat(w_new.inverse), master.out, first + i);
      if (fused) {
        Store16(param, leaf.out, first + i);
      } else {
        const __m256 p = LoadLanes<P>(leaf.p, first + i, &special);
        Store16(BFloat16Codes(_mm256_sub_ps(Floats(_mm256_slli_epi32(param, 16)), p)), leaf.out, first + i);
      }
    }
  }
  mu_part.scale_out[block] = mu_new.scale;
  nu_part.scale_out[block] = nu_new.scale;
  if constexpr (M == kF16) master.scale_out[block] = w_new.scale;
  return true;
}

using QuickFunction = bool (*)(const Leaf& leaf, const Hyper& h, int64_t first, int64_t n, int64_t block);

template <DType G, DType N, bool kMuNoise, bool kNuNoise>
QuickFunction QuickForParam(const Leaf& leaf) {
  if (leaf.p_dtype == kF32 && leaf.part[kMaster].dtype == kAbsent) {
    return QuickBlock<G, kF32, N, kAbsent, kMuNoise, kNuNoise>;
  }
  if (leaf.p_dtype != kBF16) return nullptr;
  switch (leaf.part[kMaster].dtype) {
    case kF16: return QuickBlock<G, kBF16, N, kF16, kMuNoise, kNuNoise>;
    case kRemainder16: return QuickBlock<G, kBF16, N, kRemainder16, kMuNoise, kNuNoise>;
    case kRemainder8: return QuickBlock<G, kBF16, N, kRemainder8, kMuNoise, kNuNoise>;
    default: return nullptr;
  }
}

template <DType G>
QuickFunction QuickForMoments(const Leaf& leaf) {
  const Part& mu = leaf.part[kMu];
  const Part& nu = leaf.part[kNu];
  if (nu.dtype == kE4M3 && nu.sqrt) {
    if (nu.stochastic) {
      return mu.stochastic ? QuickForParam<G, kE4M3, true, true>(leaf) : QuickForParam<G, kE4M3, false, true>(leaf);
    }
    return mu.stochastic ? nullptr : QuickForParam<G, kE4M3, false, false>(leaf);
  }
  if (nu.dtype == kF16 && !nu.sqrt && !mu.stochastic && !nu.stochastic) {
    return QuickForParam<G, kF16, false, false>(leaf);
  }
  return nullptr;
}

// The function for a leaf's formats; null where there is none.
inline QuickFunction QuickFor(const Leaf& leaf) {
  const Part& mu = leaf.part[kMu];
  const Part& nu = leaf.part[kNu];
  const Part& master = leaf.part[kMaster];
  const bool scaled_alike = mu.scaling == kBlock && nu.scaling == kBlock && mu.block == nu.block &&
                            (master.dtype != kF16 || (master.scaling == kBlock && master.block == mu.block));
  if (!scaled_alike || mu.block > kTile || master.stochastic || mu.dtype != kE4M3 ||
      leaf.out_dtype != leaf.p_dtype || (leaf.flags & (kDirection | kNesterov | kEpsRoot))) {
    return nullptr;
  }
  if (leaf.g_dtype == kF32) return QuickForMoments<kF32>(leaf);
  return leaf.g_dtype == kBF16 ? QuickForMoments<kBF16>(leaf) : nullptr;
}

}  // namespace
}  // namespace optax_lowprec

#endif  // OPTAX_LOWPREC_CPU_QUICK_H_
