// Every case of the remainder formats, with the functions that the kernels use: see exhaustive_remainder.py.
//
//   exhaustive_remainder [STRIDE [THREADS]]     every STRIDEth case (an odd number); 1: all of them
//
// Prints a JSON object: for each check how many cases it saw, how many failed, the first that did, and the largest error.

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "core.h"

using namespace optax_lowprec;

namespace {

struct Result {
  uint64_t cases = 0, failures = 0, first = UINT64_MAX;
  double worst = 0.0;  // error, in the unit that the check names

  void Add(uint64_t which, bool good, double error = 0.0) {
    ++cases;
    worst = error > worst ? error : worst;
    if (!good) {
      ++failures;
      first = std::min(first, which);
    }
  }
};

bool IsNan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > kInfinityBits; }
bool IsFinite(uint32_t bits) { return (bits & kInfinityBits) != kInfinityBits; }
float Param(uint32_t code, DType d) { return Decode(code, SpecOf(d)); }
int64_t Distance(uint32_t a, uint32_t b) { return std::llabs(static_cast<int64_t>(a) - static_cast<int64_t>(b)); }

uint32_t RoundTrip(uint32_t master, DType d, int bits, bool stochastic = false, uint32_t noise32 = 0) {
  const Remainder r = EncodeRemainder(Float(master), d, bits, stochastic, noise32);
  return Bits(DecodeRemainder(Param(r.param, d), r.rest, d, bits));
}

// Every float32 master, as the bfloat16 parameter that stands for it and 16 bits: the master comes back bit for bit, the
// parameter is a nearest bfloat16, NaN stays NaN in both, and both kinds of rounding are the same.
void MasterBf16R16(uint64_t i, Result* result) {
  const uint32_t w = static_cast<uint32_t>(i);
  const Remainder r = EncodeRemainder(Float(w), kBF16, 16, false, 0);
  const uint32_t back = Bits(DecodeRemainder(Param(r.param, kBF16), r.rest, kBF16, 16));
  bool good = r.rest >= -32768 && r.rest <= 32767;
  if (IsNan(w)) {
    good = good && IsNan(back) && IsNan(r.param << 16);
  } else {
    const Remainder s = EncodeRemainder(Float(w), kBF16, 16, true, 0xFFFF);
    good = good && back == w && Distance(r.param << 16, w) <= 0x8000 && s.param == r.param && s.rest == r.rest;
  }
  result->Add(i, good, IsNan(w) ? 0.0 : static_cast<double>(Distance(back, w)));
}

// Every bfloat16 parameter x every remainder: the master they stand for is stored as just this pair. The pairs that no
// master is stored as (a parameter edited to +-0 beside a negative remainder, or to an infinity beside a positive one,
// NaNs) stand for what a parameter edited from outside has to: a zero for a zero, never a finite number for a NaN.
void PairBf16R16(uint64_t i, Result* result) {
  const uint32_t param = static_cast<uint32_t>(i >> 16);
  const int32_t rest = static_cast<int16_t>(i & 0xFFFF);
  const uint32_t w = Bits(DecodeRemainder(Float(param << 16), rest, kBF16, 16));
  bool good;
  if (IsNan(param << 16)) {
    good = IsNan(w);
  } else if ((param & 0x7FFF) == 0 && rest < 0) {
    good = w == param << 16;
  } else if (IsNan(w)) {
    good = (param & 0x7FFF) == 0x7F80 && rest > 0;
  } else {
    const Remainder r = EncodeRemainder(Float(w), kBF16, 16, false, 0);
    good = r.param == param && r.rest == rest;
  }
  result->Add(i, good);
}

// Every float32 master beside a bfloat16 parameter and 8 bits, to nearest: off by at most half of 2^8 units in float32's
// last place (the clamp below infinity apart), and what came back is stored without a further error.
void MasterBf16R8(uint64_t i, Result* result) {
  const uint32_t w = static_cast<uint32_t>(i);
  const uint32_t back = RoundTrip(w, kBF16, 8);
  if (IsNan(w) || !IsFinite(w)) {
    result->Add(i, IsNan(w) ? IsNan(back) : back == w);
    return;
  }
  const int64_t error = Distance(back, w);
  const bool clamped = (w & 0x7FFFFFFFu) >= 0x7F7FFF80u;
  const uint32_t again = RoundTrip(back, kBF16, 8);
  result->Add(i, IsFinite(back) && error <= (clamped ? 0xFF : 0x80) && again == back,
              clamped ? 0.0 : static_cast<double>(error) / 256);
}

// The same rounded stochastically, with all 256 values of the noise: every one gives a neighbour, and as many of them the
// upper one as the lower byte says, so that the mean is the master. (The middle byte is a hash of the rest.)
void StochasticBf16R8(uint64_t i, Result* result) {
  const uint32_t low = static_cast<uint32_t>(i) & 0xFF, upper = static_cast<uint32_t>(i >> 8) & 0xFFFF;
  const uint32_t w = upper << 16 | (Mix(static_cast<uint32_t>(i)) & 0xFF00u) | low;
  if (!IsFinite(w) || (w & 0x7FFFFF00u) == 0x7F7FFF00u) return;
  uint32_t ups = 0;
  bool good = true;
  for (uint32_t n = 0; n < 256; ++n) {
    const uint32_t back = RoundTrip(w, kBF16, 8, true, n << 24 | (Mix(w + n) & 0xFFFFFF));
    const uint32_t down = w & 0xFFFFFF00u;
    good = good && (back == down || back == down + 0x100);
    ups += back != down;
  }
  result->Add(i, good && ups == low, std::abs(static_cast<double>(ups) - low) / 256);
}

// A float16 parameter's last place divided by 2^bits.
double F16Unit(float param, int bits) {
  int exponent;
  std::frexp(static_cast<double>(param), &exponent);
  return std::ldexp(1.0, (param == 0.0f ? -14 : std::max(exponent - 1, -14)) - 10 - bits);
}

// Every float32 master within float16's range beside a float16 parameter.
template <int kBits>
void MasterF16(uint64_t i, Result* result) {
  const uint32_t w = static_cast<uint32_t>(i);
  const Remainder r = EncodeRemainder(Float(w), kF16, kBits, false, 0);
  const float param = Param(r.param, kF16);
  const uint32_t back = Bits(DecodeRemainder(param, r.rest, kF16, kBits));
  const float master = Float(w);
  if (IsNan(w) || std::fabs(master) >= 65520.0f) {
    result->Add(i, IsNan(w) ? IsNan(back) : back == ((w & kSignBit) | kInfinityBits));
    return;
  }
  const double error = std::fabs(static_cast<double>(Float(back)) - static_cast<double>(master));
  const double unit = F16Unit(param, kBits);
  // 16 bits: exact from 2^-14 up, 2^-41 (half of 2^-40) below, or a whole unit at the tie, which is one short. Above the
  // largest float16 eight bits reach just short of half way to infinity.
  const bool top = std::fabs(master) > 65504.0f;
  const double bound = kBits == 16 ? (std::fabs(master) >= 0x1p-14f ? 0.0 : 1.0) : (top ? 1.0 : 0.5);
  const bool exact = kBits == 16 && std::fabs(master) >= 0x1p-14f;
  result->Add(i, exact ? back == w : error <= bound * unit, error / unit);
}

struct Check {
  const char* name;
  const char* unit;
  uint64_t cases;
  void (*run)(uint64_t, Result*);
};

const Check kChecks[] = {
    {"bfloat16 remainder16: every float32 master", "units in float32's last place", uint64_t{1} << 32, MasterBf16R16},
    {"bfloat16 remainder16: every parameter x every remainder", "none", uint64_t{1} << 32, PairBf16R16},
    {"bfloat16 remainder8: every float32 master", "2^8 units in float32's last place", uint64_t{1} << 32, MasterBf16R8},
    {"bfloat16 remainder8 stochastic: every parameter x every low byte x all noise", "error of the mean in units of the "
     "remainder", uint64_t{1} << 24, StochasticBf16R8},
    {"float16 remainder16: every float32 master", "2^-16 of the parameter's last place", uint64_t{1} << 32, MasterF16<16>},
    {"float16 remainder8: every float32 master", "2^-8 of the parameter's last place", uint64_t{1} << 32, MasterF16<8>},
};

Result Run(const Check& check, uint64_t stride, unsigned threads) {
  Result total;
  std::mutex mutex;
  std::atomic<uint64_t> next{0};
  const uint64_t chunk = uint64_t{1} << 20;
  auto work = [&] {
    Result mine;
    for (uint64_t from; (from = next.fetch_add(chunk)) < check.cases;) {
      const uint64_t first = (from + stride - 1) / stride * stride;
      for (uint64_t i = first; i < std::min(from + chunk, check.cases); i += stride) check.run(i, &mine);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    total.cases += mine.cases;
    total.failures += mine.failures;
    total.first = std::min(total.first, mine.first);
    total.worst = std::max(total.worst, mine.worst);
  };
  std::vector<std::thread> pool;
  for (unsigned t = 0; t < threads; ++t) pool.emplace_back(work);
  for (std::thread& t : pool) t.join();
  return total;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t stride = argc > 1 ? std::max<uint64_t>(1, std::strtoull(argv[1], nullptr, 10)) : 1;
  const unsigned threads = argc > 2 ? std::max(1, std::atoi(argv[2])) : 1;
  uint64_t failures = 0;
  std::printf("[");
  for (const Check& check : kChecks) {
    const Result r = Run(check, stride, threads);
    failures += r.failures;
    std::printf("%s\n {\"check\": \"%s\", \"cases\": %" PRIu64 ", \"failures\": %" PRIu64 ", \"first_failure\": ",
                &check == kChecks ? "" : ",", check.name, r.cases, r.failures);
    if (r.failures) std::printf("%" PRIu64, r.first); else std::printf("null");
    std::printf(", \"largest_error\": %.6g, \"unit\": \"%s\"}", r.worst, check.unit);
    std::fflush(stdout);
  }
  std::printf("\n]\n");
  return failures != 0;
}
