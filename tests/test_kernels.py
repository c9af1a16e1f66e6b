"""The compiled implementations: what is built is used, agrees bit for bit, works in place, and fails clearly."""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import table

import optax_lowprec as olp
from optax_lowprec import ffi
from optax_lowprec import formats as fmts
from optax_lowprec import implementations
from optax_lowprec import reference
from optax_lowprec import sharding
from optax_lowprec import state as state_lib
from optax_lowprec import StateFormat
from optax_lowprec.reference import LeafOptions

ON_GPU = jax.default_backend() == "gpu"
KERNELS = tuple(name for name in olp.available_implementations() if name == ("cuda" if ON_GPU else "cpu"))

F8, F8_SQRT, F16 = (
    StateFormat("float8_e4m3fn"),
    StateFormat("float8_e4m3fn", transform="sqrt"),
    StateFormat("float16"),
)
NEAREST = dict(mu=F8, nu=F8_SQRT)
# The combinations that have kernels of their own; those named "default" round nu stochastically.
SPECIALISED = {
    "bf16_remainder16_fp8_fp8_default": (jnp.bfloat16, dict(master="remainder16")),
    "bf16_remainder8_fp8_fp8_default": (jnp.bfloat16, dict(master="remainder8")),
    "bf16_f16_fp8_fp8_default": (jnp.bfloat16, dict(master=F16)),
    "f32_fp8_fp8_default": (jnp.float32, {}),
    "bf16_remainder16_fp8_fp8": (jnp.bfloat16, dict(master="remainder16", **NEAREST)),
    "bf16_remainder8_fp8_fp8": (jnp.bfloat16, dict(master="remainder8", **NEAREST)),
    "bf16_f16_fp8_fp8": (jnp.bfloat16, dict(master=F16, **NEAREST)),
    "f32_fp8_fp8": (jnp.float32, NEAREST),
    "bf16_remainder16_fp8_f16": (jnp.bfloat16, dict(nu=F16)),
    "bf16_remainder8_fp8_f16": (jnp.bfloat16, dict(master="remainder8", nu=F16)),
    "bf16_f16_fp8_f16": (jnp.bfloat16, dict(master=F16, nu=F16)),
    "f32_fp8_f16": (jnp.float32, dict(nu=F16)),
    "f32_f32_f32": (jnp.float32, dict(mu="float32", nu="float32")),
    "bf16_f32_f32_f32": (jnp.bfloat16, dict(mu="float32", nu="float32", master="float32")),
    "stochastic": (
        jnp.bfloat16,
        dict(
            mu=StateFormat("float8_e4m3fn", rounding="stochastic"),
            nu=StateFormat("float8_e4m3fn", transform="sqrt", rounding="stochastic"),
        ),
    ),
    "stochastic_masters": (jnp.bfloat16, dict(master=StateFormat("remainder8", rounding="stochastic"))),
    "f32_stochastic": (
        jnp.float32,
        dict(
            mu=StateFormat("float8_e4m3fn", rounding="stochastic"),
            nu=StateFormat("float8_e4m3fn", transform="sqrt", rounding="stochastic"),
        ),
    ),
    "tensor": (
        jnp.bfloat16,
        dict(
            mu=StateFormat("float8_e4m3fn", "tensor"),
            nu=StateFormat("float8_e4m3fn", "tensor", transform="sqrt"),
            master=StateFormat("float16", "tensor"),
        ),
    ),
    "blocks_of_48": (jnp.bfloat16, dict(mu=StateFormat("float8_e5m2", block_size=48), nu=StateFormat("bfloat16"))),
}
# Flat blocks, rows that no block fits, misaligned rows, short and empty ones, one leaf of several launch blocks.
SHAPES = {
    **{k: table.SHAPES[k] for k in ("scalar", "short", "ragged", "conv", "empty")},
    "odd_rows": (37, 50257 // 37),
    "one_row": (3001,),
    "aligned": (257, 256),
}
CHAIN = (
    "bf16_remainder16_fp8_fp8_default",
    "f32_fp8_fp8_default",
    "bf16_remainder16_fp8_fp8",
    "bf16_f16_fp8_fp8",
    "f32_fp8_fp8",
    "f32_f32_f32",
    "bf16_f32_f32_f32",
)
RUNS = [(name, True) for name in SPECIALISED] + [(name, False) for name in CHAIN]


def _hypers(n, nesterov=False, eps_root=0.0, skip=False):
  """The scalars of n steps, from the CPU: both sides get the same, whatever power function their platform has."""
  make = jax.jit(functools.partial(
      reference.hyperparameters, learning_rate=1e-2, b1=0.9, one_minus_b1=1 - 0.9, b2=0.999, one_minus_b2=1 - 0.999,
      eps=1e-8, eps_root=eps_root, weight_decay=0.1, nesterov=nesterov, grad_scale=1.0, skip=skip,
  ))  # fmt: skip
  return [make(jnp.int32(t), key=fmts.noise_key(3)) for t in range(n)]


def steps_of(implementation, dtype, formats, fused, n=20, grad_dtype=None, nesterov=False, eps_root=0.0, spoil=None):
  """Parameters and states after n steps of every leaf, by one implementation; jnp runs on the CPU.

  ``spoil`` changes a gradient (numpy, flat) in place.
  """
  cpu = jax.devices("cpu")[0]
  device = jax.devices()[0] if implementation == "cuda" else cpu
  with jax.default_device(cpu):
    params = table.tree(SHAPES, dtype)
    tx = olp.adamw(1e-2, min_quantized_size=0, **formats)
    state = tx.init(params)
    gradients = table.Gradients(SHAPES, scales={"aligned": 1e-3})
    hypers = _hypers(n, nesterov, eps_root)
  leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  states = [state_lib.fill_absent(s, p.shape) for s, (_, p) in
            zip(state_lib.leaf_states(state, len(leaves)), leaves, strict=True)]  # fmt: skip
  options = tuple(
      LeafOptions(state_lib.stored_formats(path, p, s, state.formats.formats), i, i % 2 == 0, nesterov, eps_root != 0,
                  False, fused, True, jnp.dtype(dtype))
      for i, ((path, p), s) in enumerate(zip(leaves, states, strict=True))
  )  # fmt: skip

  @functools.partial(jax.jit, compiler_options=table.OPTIMIZED)
  def step(grads, params, states, hyper):
    rows = implementations.tree_step(
        grads,
        params,
        states,
        [hyper] * len(params),
        options,
        implementation,
        [jax.tree_util.keystr(path) for path, _ in leaves],
    )
    out, states = zip(*rows, strict=True)
    return list(out), list(states)

  # Compiled apart: within one program XLA may add an update that it has not rounded to the parameter's dtype.
  apply = jax.jit(lambda params, out: list(out) if fused else [p + o for p, o in zip(params, out, strict=True)])

  params, states = jax.device_put(([p for _, p in leaves], states), device)
  for t, hyper in enumerate(hypers):
    arrays = [gradients.numpy(t, k[0].key).copy() for k, _ in leaves]
    for array in arrays if spoil else []:
      spoil(array.reshape(-1))
    grads = [jnp.asarray(x).astype(grad_dtype or dtype) for x in arrays]
    out, states = step(*jax.device_put((grads, params, states, hyper), device))
    params = apply(params, out)
  return jax.device_get((params, states))


def assert_same_codes(got, want):
  pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
  different = sum(int((table.bits(x) != table.bits(y)).sum()) for x, y in pairs)
  assert not different, f"{different} of {sum(x.size for x, _ in pairs)} codes differ"


@pytest.mark.parametrize("name, fused", RUNS, ids=[f"{n}-{'fused' if f else 'chain'}" for n, f in RUNS])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_stores_what_the_reference_stores(kernel, name, fused):
  """Bit for bit, after 20 steps; so any two implementations agree with each other too."""
  dtype, formats = SPECIALISED[name]
  assert_same_codes(steps_of(kernel, dtype, formats, fused), steps_of("jnp", dtype, formats, fused))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "chain"])
@pytest.mark.parametrize(
    "name", ["bf16_remainder16_fp8_fp8_default", "bf16_remainder16_fp8_fp8", "f32_fp8_fp8", "blocks_of_48"]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_infinities_and_nans_spoil_no_more_than_in_the_reference(kernel, name, fused):
  """They leave a kernel's fast path, block by block; also in rows that blocks do not divide, and at a leaf's end."""

  def spoil(flat):
    if flat.size > 100:
      flat[77::401] = np.inf
      flat[200::1009] = np.nan
      flat[-1] = -np.inf

  dtype, formats = SPECIALISED[name]
  with np.errstate(invalid="ignore"):
    got, want = (steps_of(k, dtype, formats, fused, n=3, spoil=spoil) for k in (kernel, "jnp"))
  # Signs and payloads of NaNs depend on the processor, and on how XLA selects in float8.
  one_nan = lambda x: np.where(x != x, np.zeros((), x.dtype), x)
  assert_same_codes(jax.tree.map(one_nan, got), jax.tree.map(one_nan, want))
  assert all(np.isnan(x.astype(np.float32)).any() for x in got[0] if x.size > 1000)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["p32", "pb16", "p16"])
@pytest.mark.parametrize("grad_dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["g32", "gb16", "g16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_every_dtype(kernel, grad_dtype, dtype):
  fused = dtype == grad_dtype
  more = dict(n=4, grad_dtype=grad_dtype, nesterov=True, eps_root=1e-9)
  assert_same_codes(steps_of(kernel, dtype, {}, fused, **more), steps_of("jnp", dtype, {}, fused, **more))


def _addresses(tree):
  return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size]


@pytest.mark.parametrize(
    "name", [f"{n}_fp8_fp8_default" for n in ("bf16_remainder16", "bf16_remainder8", "f32")] + ["f32_f32_f32"]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_donated_step_is_in_place_and_needs_no_memory(kernel, name):
  dtype, formats = SPECIALISED[name]
  tx = olp.adamw(1e-2, implementation=kernel, **formats)
  params = {f"w{i}": jnp.full((1024, 1024), 0.1, dtype) for i in range(12)} | {"b": jnp.ones((1024,), dtype)}
  state = jax.jit(tx.init)(params)
  grads = jax.tree.map(jnp.ones_like, params)
  step = jax.jit(lambda p, s, g: olp.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
  compiled = step.lower(params, state, grads).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 64 * 1024
  before = _addresses((params, {k: getattr(state, k) for k in ("mu", "nu", "master", "mu_scale", "nu_scale")}))
  params, state = compiled(params, state, grads)
  after = _addresses((params, {k: getattr(state, k) for k in ("mu", "nu", "master", "mu_scale", "nu_scale")}))
  assert before == after


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "chain"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_without_donation_inputs_survive(kernel, fused):
  tx = olp.adamw(1e-2, implementation=kernel, min_quantized_size=0)
  params = table.tree(SHAPES, jnp.bfloat16)
  state = tx.init(params)
  copy = jax.tree.map(lambda x: np.array(x), (params, state))
  run = jax.jit(lambda p, s: olp.apply_gradients(tx, p, s, p) if fused else tx.update(p, s, p))
  jax.block_until_ready(run(params, state))
  table.assert_same_bits(copy, jax.tree.map(lambda x: np.array(x), (params, state)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_skipped_step_changes_nothing(kernel):
  for donate in ((), (0, 1)):
    for fused in (True, False):
      tx = olp.adamw(1e-2, implementation=kernel, min_quantized_size=0, skip_nonfinite=True)
      params = table.tree(SHAPES, jnp.bfloat16)
      state = tx.init(params)

      def step(p, s, g, tx=tx, fused=fused):
        if fused:
          return olp.apply_gradients(tx, g, s, p)
        u, s = tx.update(g, s, p)
        return optax.apply_updates(p, u), s

      run = jax.jit(step, donate_argnums=donate)
      params, state = run(params, state, jax.tree.map(jnp.copy, params))
      copy = jax.tree.map(lambda x: np.array(x), (params, state))
      bad = jax.tree.map(jnp.copy, params)
      bad["one_row"] = bad["one_row"].at[3].set(jnp.inf)
      table.assert_same_bits(copy, jax.tree.map(lambda x: np.array(x), run(params, state, bad)))


# --- choice of an implementation ------------------------------------------------------------------------------------


def test_what_could_be_built_was_built():
  """A build that fails leaves jnp alone, which would pass everything else unseen. CI asks for the CUDA library."""
  if shutil.which("g++") or shutil.which("c++") or shutil.which("clang++"):
    assert ffi.usable("cpu")
  if os.environ.get("OPTAX_LOWPREC_EXPECT_CUDA"):
    assert ffi.usable("cuda")


def _lowered_for_cuda(n, **kw):
  tx = olp.adamw(1e-2, **kw)
  params = [jnp.ones((256, 128), jnp.bfloat16)] * n
  state = tx.init(params)
  step = jax.jit(lambda p, s, g: olp.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
  return step.trace(params, state, params).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(not ffi.usable("cuda"), reason="no CUDA library was built (test_what_could_be_built_was_built)")
def test_program_for_cuda_calls_the_kernel():
  text = _lowered_for_cuda(120)
  calls = re.findall(r"custom_call @optax_lowprec_cuda_step", text)
  assert len(calls) == -(-120 // sharding.LEAVES_PER_CALL)
  # Parameter, two moments, remainder and two scales of each leaf are updated in place.
  assert len(re.findall(r"#stablehlo.output_operand_alias", text)) == 6 * 120
  assert "optax_lowprec_cpu" not in text
  assert "stablehlo.sqrt" not in re.sub(r"tensor<f32>", "", "\n".join(x for x in text.splitlines() if "256x128" in x))


@pytest.mark.skipif(not ffi.usable("cpu"), reason="no CPU library was built (test_what_could_be_built_was_built)")
def test_program_for_another_platform_is_jnp():
  tx = olp.adamw(1e-2)
  params = [jnp.ones((256, 128), jnp.bfloat16)]
  text = jax.jit(tx.update).trace(params, tx.init(params), params).lower(lowering_platforms=("tpu",)).as_text()
  assert "custom_call @optax_lowprec" not in text


def test_naming_an_implementation_that_is_missing_says_how_to_get_it():
  missing = [n for n in ("cuda", "cpu") if n not in olp.available_implementations()]
  for name in missing:
    with pytest.raises(ValueError, match=f"implementation='{name}' is not available here"):
      olp.adamw(1e-3, implementation=name)
  with pytest.raises(ValueError, match="must be None or one of"):
    olp.adamw(1e-3, implementation="tpu")


# --- libraries that do not fit --------------------------------------------------------------------------------------

_SCRIPT = """
    import pathlib, sys, warnings
    import jax
    from optax_lowprec import ffi
    ffi.library_folders = lambda: [pathlib.Path(sys.argv[1])]
    import optax_lowprec as olp, jax.numpy as jnp, optax
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      tx = olp.adamw(1e-2)
      params = {"w": jnp.ones((128, 128))}
      updates, state = jax.jit(tx.update)(params, tx.init(params), params)
      params = optax.apply_updates(params, updates)
    print("devices", jax.devices())
    print("used", olp.available_implementations())
    print("moved", float(params["w"][0, 0]) < 1)
    print("warned", [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)])
"""


def _run_with_libraries(folder):
  result = subprocess.run(
      [sys.executable, "-c", textwrap.dedent(_SCRIPT), str(folder)],
      capture_output=True, text=True, timeout=240, check=False,
      env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
  )  # fmt: skip
  assert result.returncode == 0, result.stderr
  assert "moved True" in result.stdout
  assert "used ('jnp',)" in result.stdout
  assert "devices [CpuDevice(id=0)]" in result.stdout
  return result.stdout


def test_no_library_is_jnp_without_a_warning(tmp_path):
  """As where no compiler was found at installation."""
  assert "warned []" in _run_with_libraries(tmp_path)


@pytest.mark.skipif(shutil.which("cc") is None, reason="makes small libraries with a C compiler")
@pytest.mark.parametrize(
    "source, complaint",
    [
        ("int optax_lowprec_ffi_api_version(void) { return 1; }", "cannot be loaded"),
        (None, "cannot be loaded"),
    ],
    ids=["missing_symbol", "not_a_library"],
)
def test_case_24_library_that_does_not_fit(tmp_path, source, complaint):
  """A clear warning, jnp, and the CPU backend still starts (moreau #32, cuEquivariance #303)."""
  library = tmp_path / "liboptax_lowprec_cpu.so"
  if source is None:
    library.write_text("no library at all")
  else:
    code = tmp_path / "library.c"
    code.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(code)], check=True)
  assert complaint in _run_with_libraries(tmp_path)


_HANDLERS = """
    #include "xla/ffi/api/ffi.h"
    namespace ffi = xla::ffi;
    static ffi::Error Nothing(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }
    XLA_FFI_DEFINE_HANDLER_SYMBOL(OptaxLowprecStep, Nothing, ffi::Ffi::Bind().RemainingArgs().RemainingRets());
    XLA_FFI_DEFINE_HANDLER_SYMBOL(OptaxLowprecAbsmax, Nothing, ffi::Ffi::Bind().RemainingArgs().RemainingRets());
    extern "C" int optax_lowprec_ffi_api_version() { return XLA_FFI_API_MAJOR * 65536 + XLA_FFI_API_MINOR; }
"""

_REGISTER = """
    import ctypes, sys
    import jax
    library = ctypes.CDLL(sys.argv[1])
    jax.ffi.register_ffi_target("too_new", jax.ffi.pycapsule(library.OptaxLowprecStep), platform="cpu")
    print("registered")
    jax.devices()
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="makes a small library with a C++ compiler")
def test_case_24_library_for_a_newer_ffi_api(tmp_path):
  """Handlers built against headers of a later version: left alone. Registered, they take the CPU backend down."""
  include = tmp_path / "include"
  shutil.copytree(jax.ffi.include_dir(), include)
  header = include / "xla" / "ffi" / "api" / "c_api.h"
  text, changed = re.subn(r"(#define XLA_FFI_API_MINOR\s+)\d+", r"\g<1>9999", header.read_text())
  assert changed == 1
  header.write_text(text)
  source, library = tmp_path / "library.cc", tmp_path / "liboptax_lowprec_cpu.so"
  source.write_text(textwrap.dedent(_HANDLERS))
  command = ["c++", "-std=c++17", "-shared", "-fPIC", "-w", "-I", str(include), "-o", str(library), str(source)]
  subprocess.run(command, check=True)
  assert "built for FFI API 0.9999" in _run_with_libraries(tmp_path)

  registered = subprocess.run(
      [sys.executable, "-c", textwrap.dedent(_REGISTER), str(library)],
      capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )  # fmt: skip
  assert registered.stdout == "registered\n" and "API version (0.9999) is incompatible" in registered.stderr


def test_libraries_come_from_the_package_alone():
  assert [f.parent for f in ffi.library_folders()] == [pathlib.Path(p) for p in olp.__path__]
