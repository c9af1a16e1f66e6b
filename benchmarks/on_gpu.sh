#!/usr/bin/env bash
# Everything about the kernels that needs a GPU, in one call: build, tests, sanitizers, profile, times.
#   benchmarks/on_gpu.sh OUT [build|cases|kernels|tests|graph|sanitize|profile|times ...]
# Results land in OUT; the benchmarks' files there belong into benchmarks/results.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
parts=${*:-build cases tests graph sanitize profile times}
python=${PYTHON:-python3}
driver=(build/gpu/driver build/gpu/liboptax_lowprec_cuda.so)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_MEM_FRACTION=0.8 PYTHONUNBUFFERED=1

# Runs one part, its whole output in a log of its own, its last lines here.
part() {
  local name=$1 lines=$2
  shift 2
  local start=$SECONDS
  "$@" >"$out/$name.log" 2>&1
  local rc=$?
  echo "== $name: exit $rc after $((SECONDS - start)) s"
  tail -n "$lines" "$out/$name.log"
  return $rc
}

build() {
  cmake -S xla_ffi -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE="$(command -v "$python")" \
    -DCMAKE_INSTALL_PREFIX="$PWD" -DOPTAX_LOWPREC_CUDA_ARCHS=90 -DOPTAX_LOWPREC_DRIVER=ON && cmake --build build/gpu && cmake --install build/gpu
}

for p in $parts; do
  case $p in
    build) part build 3 build || exit 1 ;;
    tests)
      # Those of one device and its implementations; a process a core, which is memory for a process a core on the GPU too.
      XLA_PYTHON_CLIENT_PREALLOCATE=false part tests 30 "$python" -m pytest -q -p no:cacheprovider \
        -o filterwarnings=default -n "$(($(nproc) < 15 ? $(nproc) : 15))" -k "cuda or host_memory" \
        --ignore tests/test_sharding.py --ignore tests/test_multiprocess.py --ignore tests/test_sharded_example.py tests
      ;;
    kernels) part kernels 15 "$python" -m pytest -q -p no:cacheprovider -o filterwarnings=default tests/test_kernels.py ;;
    graph) part graph 5 "$python" benchmarks/cuda_graph.py ;;
    sanitize)
      # Without JAX, which these tools do not survive.
      for tool in ${SANITIZERS:-memcheck racecheck initcheck synccheck}; do
        part "sanitize_$tool" 4 compute-sanitizer --tool "$tool" --error-exitcode 9 "${driver[@]}" cases
      done
      ;;
    cases) part cases 4 "${driver[@]}" cases ;;
    profile)
      part profile 14 "$python" benchmarks/kernel_profile.py --driver "${driver[0]}" --library "${driver[1]}" --out "$out"
      ;;
    times)
      for tree in llama1b gpt2 many odd; do
        part "times_$tree" 22 "$python" benchmarks/step_time.py --tree "$tree" --out "$out"
      done
      ;;
    *) echo "unknown part $p" && exit 2 ;;
  esac
done
