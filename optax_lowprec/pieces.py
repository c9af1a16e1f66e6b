"""Large leaves, worked on a piece at a time, so that what lies between two arrays of a leaf's size stays small."""

from collections.abc import Callable, Sequence
import functools
import itertools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from optax_lowprec import formats as fmts
from optax_lowprec.formats import StateFormat
from optax_lowprec.sharding import fit

Array = jax.Array
Index = tuple[slice, ...]

# Elements. Encoding needs up to 9 bytes of scratch for each, so this is 30 MiB at most; and a transfer or a kernel of
# that many is long enough to hide what its start costs.
PIECE = 2**21


def pieces(shape: tuple[int, ...], like: Any, formats: Sequence[StateFormat | None]) -> list[Index | None]:
  """Cuts a leaf into pieces of about ``PIECE`` elements, between the blocks of every format.

  Args:
    shape: the leaf's.
    like: an array where the pieces are going to be. On several devices there is one piece: each has a shard anyway,
      and a piece would lie on some of them.
    formats: formats that the leaf's values are in or will be.

  Returns:
    Indices; or [None], which means the whole leaf, as it is where an axis has more than 2^31 - 1 elements.
  """
  # Starts of pieces are int32, unless x64 is enabled.
  if math.prod(shape) <= PIECE or max(shape) > np.iinfo(np.int32).max or not _on_one_device(like):
    return [None]
  behind = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
  axis = next(i for i, n in enumerate(behind) if n <= PIECE)
  step = PIECE // behind[axis]
  geometries = [fmts.block_geometry(shape, f.block_size) for f in formats if f is not None and f.scaling == "block"]
  rows = math.lcm(*(g.rows for g in geometries if g.axis == axis))
  step = max(step // rows, 1) * rows
  # The last piece takes what is left, so that none is so short that its blocks would be cut otherwise.
  count = max(shape[axis] // step, 1)
  ends = [*range(step, step * count, step), shape[axis]]
  along = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
  rest = tuple(slice(0, n) for n in shape[axis + 1 :])
  before = itertools.product(*(range(n) for n in shape[:axis]))
  cut: list[Index | None] = [(*(slice(i, i + 1) for i in at), s, *rest) for at in before for s in along]
  return cut if len(cut) > 1 else [None]


def _on_one_device(like: Any) -> bool:
  sharding = getattr(like, "sharding", None)
  if sharding is None:
    return True
  explicit = isinstance(sharding, NamedSharding) and jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
  return len(sharding.device_set) == 1 and not explicit


def scale_index(index: Index | None, shape: tuple[int, ...], fmt: StateFormat) -> Index | None:
  """Where the scales of a piece are among those of its leaf."""
  if index is None or fmt.scaling != "block":
    return None
  geometry = fmts.block_geometry(shape, fmt.block_size)
  axis, rows = geometry.axis, geometry.rows
  blocks = slice(index[axis].start // rows, -(-index[axis].stop // rows))
  return (*index[:axis], blocks, *(slice(0, 1) for _ in shape[axis + 1 :]))


@functools.partial(jax.jit, static_argnames=("sizes",))
def _slice_jit(x: Array, starts: Any, sizes: tuple[int, ...]) -> Array:
  return lax.dynamic_slice(x, tuple(starts), sizes)


@functools.partial(jax.jit, donate_argnums=0)
def _update_jit(x: Array, piece: Array, starts: Any) -> Array:
  # As integers: on CPUs XLA takes every float8 of the whole array through float16 otherwise.
  if x.dtype.itemsize > 1:
    return lax.dynamic_update_slice(x, piece, tuple(starts))
  bits, piece_bits = (lax.bitcast_convert_type(y, jnp.uint8) for y in (x, piece))
  return lax.bitcast_convert_type(lax.dynamic_update_slice(bits, piece_bits, tuple(starts)), x.dtype)


def _starts(index: Index) -> np.ndarray:
  return np.asarray([s.start for s in index], np.int32)


def take(x: Any, index: Index | None) -> Any:
  """A piece of an array on a device or on the host."""
  if index is None:
    return x
  if isinstance(x, jax.Array):
    return _slice_jit(x, _starts(index), tuple(s.stop - s.start for s in index))
  return x[index]


def assemble(
    cut: Sequence[Index | None],
    shapes: Sequence[tuple[int, ...]],
    like: Any,
    make: Callable[[Index | None], Sequence[tuple[Array, Index | None]]],
) -> list[Array]:
  """Arrays of the given shapes from pieces: ``make`` gives for each piece its part of each array, and where that is."""
  if len(cut) == 1:
    return [x for x, _ in make(None)]
  out: list[Array] = []
  for index in cut:
    made = make(index)
    if not out:
      out = [_empty(shape, x.dtype, like) for shape, (x, _) in zip(shapes, made, strict=True)]
    for i, (x, at) in enumerate(made):
      assert at is not None
      out[i] = _update_jit(out[i], x, _starts(at))
    # The next piece's memory is that of this one.
    jax.block_until_ready(out)
  return out


def _empty(shape: tuple[int, ...], dtype: Any, like: Any) -> Array:
  sharding = getattr(like, "sharding", None)
  return jnp.zeros(shape, dtype, device=fit(sharding, shape) if isinstance(sharding, NamedSharding) else sharding)
