// The CPU kernels: the same source, cpu_kernel.cc, compiled for each instruction set.

#ifndef OPTAX_LOWPREC_CPU_KERNEL_H_
#define OPTAX_LOWPREC_CPU_KERNEL_H_

#include <cstdint>

#include "core.h"

namespace optax_lowprec {

// Elements that are worked on at a time. Units (whole blocks of every part) that are longer are computed twice.
constexpr int64_t kTile = 512;

struct CpuKernel {
  // Steps the elements [begin, end) of a leaf, which must be whole units. `absmax` has one entry a part (tensor
  // scaling); `scratch` has `kParts * blocks` floats, where `blocks` is at least kTile and the blocks in a unit.
  void (*step)(const Leaf& leaf, const Hyper& hyper, const float* absmax, int64_t unit, int64_t begin, int64_t end,
               float* scratch, int64_t blocks);
  // Raises absmax[part] to the largest finite magnitude that the new part would have in [begin, end).
  void (*absmax)(const Leaf& leaf, const Hyper& hyper, int64_t begin, int64_t end, float* absmax);
};

extern const CpuKernel kCpuBaseline;
#if defined(OLP_X86_VARIANTS)
extern const CpuKernel kCpuAvx2;
extern const CpuKernel kCpuAvx512;
#endif

}  // namespace optax_lowprec

#endif  // OPTAX_LOWPREC_CPU_KERNEL_H_
