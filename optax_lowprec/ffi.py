"""The compiled implementations: finding the libraries, registering their handlers, and calling them.

One call updates many leaves. Operands are a vector of scalars and the leaves' arrays; what is static travels as one
array attribute. The layout is described beside the parser, in ``xla_ffi/call_frame.h``.
"""

from collections.abc import Callable, Sequence
import ctypes
import functools
import math
import pathlib
import re
import sys
from typing import Any, NamedTuple
import warnings

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from optax_lowprec import formats as fmts
from optax_lowprec.formats import StateFormat
from optax_lowprec.reference import Hyper, LeafOptions

Array = jax.Array

_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
_FLAGS = {"fused": 1, "direction": 2, "nesterov": 4, "decay": 8, "eps_root": 16, "skippable": 32, "param": 64}
_DTYPE_CODES = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "float8_e4m3fn": 3,
    "float8_e5m2": 4,
    "remainder16": 5,
    "remainder8": 6,
}
_NO_MASTER = 7
_SCALING_CODES = {None: 0, "block": 1, "tensor": 2}


# --- libraries ------------------------------------------------------------------------------------------------------


class UnusableLibraryError(Exception):
  """Why an implementation's library cannot be used, and what to do about it."""


def library_folders() -> list[pathlib.Path]:
  """Where the libraries may be: inside the package. An editable installation has a part of it in site-packages."""
  return [pathlib.Path(folder) / "_lib" for folder in sys.modules[__package__].__path__]


def _jaxlib_api_version() -> tuple[int, int]:
  """The FFI API version of the installed jaxlib, from the headers that it ships."""
  text = (pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
  major, minor = (re.search(rf"#define XLA_FFI_API_{x}\s+(\d+)", text) for x in ("MAJOR", "MINOR"))
  if major is None or minor is None:
    raise UnusableLibraryError("jaxlib's FFI headers do not state an API version")
  return int(major[1]), int(minor[1])


@functools.cache
def load(name: str) -> ctypes.CDLL:
  """Loads and registers the library of an implementation, once a process.

  It is only ever looked for inside the installed package. Its FFI API version is compared with jaxlib's before
  anything is registered: jaxlib refuses a newer one while it starts its backends, and takes them down with it.

  Raises:
    UnusableLibraryError: says what is wrong and what to do.
  """
  paths = [folder / f"liboptax_lowprec_{name}.so" for folder in library_folders()]
  path = next((p for p in paths if p.is_file()), None)
  if path is None:
    compiler = "a C++ compiler" if name == "cpu" else "nvcc (the CUDA toolkit, or the wheels of jax[cuda13])"
    raise UnusableLibraryError(f"not built: install {compiler} and reinstall optax-lowprec")
  try:
    library = ctypes.CDLL(str(path))
    version = library.optax_lowprec_ffi_api_version()
    handlers = {f"optax_lowprec_{name}_{t.lower()}": getattr(library, f"OptaxLowprec{t}") for t in ("Step", "Absmax")}
    initialize = library.OptaxLowprecInit if name == "cuda" else None
  except (OSError, AttributeError) as e:
    raise UnusableLibraryError(f"{path.name} cannot be loaded ({e}): reinstall optax-lowprec") from None
  built, have = divmod(version, 65536), _jaxlib_api_version()
  if built[0] != have[0] or built[1] > have[1]:
    raise UnusableLibraryError(
        f"built for FFI API {built[0]}.{built[1]}, jaxlib {jax.lib.__version__} has {have[0]}.{have[1]}: "
        "reinstall optax-lowprec beside this jaxlib, or upgrade jax"
    )
  for target, function in handlers.items():
    capsule: Any = jax.ffi.pycapsule(function)
    if initialize is not None:
      capsule = {"initialize": jax.ffi.pycapsule(initialize), "execute": capsule}
    jax.ffi.register_ffi_target(target, capsule, platform=_PLATFORMS[name])
  return library


@functools.cache
def usable(name: str) -> bool:
  """Whether the library can be used; warns once where one is there and cannot."""
  try:
    load(name)
  except UnusableLibraryError as e:
    if not str(e).startswith("not built"):
      warnings.warn(f"optax_lowprec: the {name} implementation is {e}. Using jnp.", RuntimeWarning, stacklevel=3)
    return False
  return True


# --- calls ----------------------------------------------------------------------------------------------------------


def words(hyper: Hyper) -> Array:
  """The scalars of a step as the uint32[16] that the kernels read."""
  floats = jnp.stack([jnp.asarray(x, jnp.float32) for x in hyper[:13]])
  bits = lax.bitcast_convert_type(floats, jnp.uint32)
  rest = jnp.stack([hyper.skip.astype(jnp.uint32), hyper.key, hyper.phase])
  return jnp.concatenate([bits, rest])


def _format_code(fmt: StateFormat | None) -> int:
  if fmt is None:
    return _NO_MASTER
  code = _DTYPE_CODES[fmt.dtype] | _SCALING_CODES[fmt.scaling] << 4
  return code | (fmt.transform == "sqrt") << 6 | (fmt.rounding == "stochastic") << 7


class Shard(NamedTuple):
  """Which part of a leaf a call sees: ``runs`` runs of ``run`` elements, ``run_stride`` apart, in groups."""

  shape: tuple[int, ...]  # of the whole leaf
  base: Array | None = None  # uint32, the position of its first element in the whole leaf, modulo 2^32
  run: int = 0  # 0: positions are those of the array that is here
  run_stride: int = 0
  runs: int = 0
  group_stride: int = 0


def leaf_attributes(shape: tuple[int, ...], options: LeafOptions, has_param: bool, shard: Shard) -> list[int]:
  """What is static about a leaf of (local) shape ``shape``, as the integers that the kernels read."""
  flags = {"param": has_param, **{k: getattr(options, k) for k in _FLAGS if k != "param"}}
  bits = sum(bit for k, bit in _FLAGS.items() if flags[k])
  # Blocks are those of the whole leaf: a shard's last axis may be too short to have blocks of its own.
  row = math.prod(shape[fmts.block_geometry(shard.shape, 1).axis :])
  lengths = []
  for fmt in options.formats:
    if fmt is not None and fmt.scaling == "block":
      g = fmts.block_geometry(shard.shape, fmt.block_size)
      lengths.append(g.rows * g.trail)
    else:
      lengths.append(0)
  layout = [shard.run, shard.run_stride, shard.runs, shard.group_stride]
  return [bits, *(_format_code(f) for f in options.formats), row, *lengths, options.index, *layout]


def _result(like: Array, dtype: Any) -> jax.ShapeDtypeStruct:
  # Inside shard_map a result must say over which mesh axes it varies.
  vma = getattr(jax.typeof(like), "vma", None)
  return jax.ShapeDtypeStruct(like.shape, dtype, **({} if vma is None else {"vma": vma}))


class Operand(NamedTuple):
  """An array of a leaf, as a call takes it."""

  name: str  # "grad", "param" or a field of LeafState
  result: bool  # whether the call returns a new one: in its place, if the array is donated


def operands(options: LeafOptions, has_param: bool) -> list[Operand]:
  """The operands of a leaf, in the order of the interface; the results are the update or parameter, then these."""
  f = options.formats
  present = [("mu", True), ("nu", True), ("master", f.master is not None)]
  for part, fmt in (("mu_scale", f.mu), ("nu_scale", f.nu), ("master_scale", f.master)):
    present.append((part, fmt is not None and fmt.scaling is not None))
  first = [Operand("grad", False), *([Operand("param", options.fused)] if has_param else [])]
  return [*first, *(Operand(name, True) for name, there in present if there)]


def has_tensor_scale(options: LeafOptions) -> bool:
  return any(f is not None and f.scaling == "tensor" for f in options.formats)


def call(
    name: str,
    step_words: Array,
    arrays: Sequence[Sequence[Array]],
    options: Sequence[LeafOptions],
    shards: Sequence[Shard],
    has_param: bool,
    max_over_shards: Callable[[Array], Array] = lambda x: x,
) -> list[list[Array]]:
  """One call of a compiled implementation.

  Args:
    name: of the implementation.
    step_words: what ``words`` returns.
    arrays: for each leaf, its ``operands``.
    options: what is static about each leaf.
    shards: which part of each leaf the arrays are.
    has_param: whether parameters are among the operands.
    max_over_shards: the maximum over all shards of an array of absolute maxima.

  Returns:
    For each leaf the update or new parameter, then its new state, in the order of the operands.
  """
  tensor = any(has_tensor_scale(o) for o in options)
  results: list[jax.ShapeDtypeStruct] = []
  aliases = {}
  counts = []
  position = 1 + tensor
  for leaf, o in zip(arrays, options, strict=True):
    first = len(results)
    results.append(_result(leaf[0], o.out_dtype))
    for operand, x in zip(operands(o, has_param), leaf, strict=True):
      if operand.name == "param" and operand.result:
        aliases[position] = first
      elif operand.result:
        aliases[position] = len(results)
        results.append(_result(x, x.dtype))
      position += 1
    counts.append(len(results) - first)
  flat = [x for leaf in arrays for x in leaf]
  attributes = np.asarray(
      [leaf_attributes(tuple(x[0].shape), o, has_param, s) for x, o, s in zip(arrays, options, shards, strict=True)],
      np.int64,
  ).reshape(-1)
  if any(s.run for s in shards):
    bases = [jnp.uint32(0) if s.base is None else s.base for s in shards]
    step_words = jnp.concatenate([step_words, jnp.stack(bases)])
  absmax = []
  if tensor:
    local = jax.ffi.ffi_call(
        f"optax_lowprec_{name}_absmax",
        jax.ShapeDtypeStruct((3 * len(arrays),), jnp.float32),
        vmap_method="sequential",
    )(step_words, *flat, leaves=attributes)
    absmax = [max_over_shards(local)]
  out = iter(
      jax.ffi.ffi_call(f"optax_lowprec_{name}_step", results, vmap_method="sequential", input_output_aliases=aliases)(
          step_words, *absmax, *flat, leaves=attributes, tensor=np.int64(tensor)
      )
  )
  return [[next(out) for _ in range(n)] for n in counts]
