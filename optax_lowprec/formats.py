"""What a stored number is: formats, their geometry, encode and decode.

Everything here is plain jnp on float32 values. The C++ core in ``xla_ffi/`` repeats these formulas operation for
operation, so that every implementation stores the same bits. For that reason the codecs use integer arithmetic
instead of ``astype`` where rounding is the point: XLA may elide a conversion pair, and some of its releases round
float32 to float8 twice (through float16).
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Scaling = Literal["block", "tensor"] | None
Transform = Literal["sqrt"] | None
Rounding = Literal["nearest", "stochastic"]
Part = Literal["mu", "nu", "master"]

# An axis shorter than this has no blocks of its own: see ``block_geometry``.
MIN_BLOCK_ROW = 32
# Leaves with fewer elements keep float32 state, unless told otherwise.
MIN_QUANTIZED_SIZE = 4096


class Float(NamedTuple):
  """A storage dtype. ``max_scaled`` is the code that a block's absmax is mapped to."""

  name: str
  bits: int
  mantissa: int
  min_exponent: int  # of normal numbers
  max: float
  max_scaled: float
  nan: int

  @property
  def drop(self) -> int:
    """Mantissa bits of a float32 that this dtype does not keep."""
    return 23 - self.mantissa

  @property
  def saturates(self) -> bool:
    """Whether values out of range are stored as the largest code; bfloat16 and float32 have float32's range."""
    return self.min_exponent > -126

  @property
  def min_positive(self) -> float:
    """The smallest code that a positive second moment is stored as, before the scale."""
    return 2.0 ** (self.min_exponent - self.mantissa) if self.saturates else 2.0**-62

  @property
  def min_scale(self) -> float:
    """Scales are never smaller: the smallest code times the scale is then a normal float32, and 1 / scale is finite.

    Nor larger than 2^126, whose reciprocal is the smallest normal float32.
    """
    return 2.0**-126 / self.min_positive

  @property
  def dtype(self) -> np.dtype:
    return jnp.dtype(self.name)


FLOATS: dict[str, Float] = {
    f.name: f
    for f in (
        Float("float32", 32, 23, -126, float(np.finfo(np.float32).max), 1.0, 0x7FC00000),
        Float("bfloat16", 16, 7, -126, float(jnp.finfo(jnp.bfloat16).max), 1.0, 0x7FC0),
        # Half of the largest float16, so that a value a little over the block's old maximum never overflows.
        Float("float16", 16, 10, -14, 65504.0, 32752.0, 0x7E00),
        Float("float8_e4m3fn", 8, 3, -6, 448.0, 448.0, 0x7F),
        Float("float8_e5m2", 8, 2, -14, 57344.0, 57344.0, 0x7E),
    )
}
REMAINDERS: dict[str, np.dtype] = {"remainder16": jnp.dtype("int16"), "remainder8": jnp.dtype("int8")}
_DEFAULT_SCALING: dict[str, Scaling] = {
    "float32": None,
    "bfloat16": None,
    "float16": "block",
    "float8_e4m3fn": "block",
    "float8_e5m2": "block",
}
# Rounded to nearest, their nu stalls at b2 = 0.999: half a code is more than it changes in a step.
_STOCHASTIC_NU = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_INT_OF_BITS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def _dtype_name(dtype: Any) -> str:
  if isinstance(dtype, str) and dtype in REMAINDERS:
    return dtype
  try:
    name = jnp.dtype(dtype).name
  except TypeError:
    name = str(dtype)
  if name not in FLOATS:
    known = ", ".join([*FLOATS, *REMAINDERS])
    raise ValueError(f"unknown storage dtype {dtype!r}: choose one of {known}")
  return name


@dataclasses.dataclass(frozen=True)
class StateFormat:
  """How one part of the optimizer state is stored.

  A stored value ``x`` is ``decode(q) * scale`` with ``scale = absmax / fmax`` over the scaled region, where ``fmax``
  is 448 (float8_e4m3fn), 57344 (float8_e5m2), 32752 (float16) or 1 (bfloat16, float32). Scales are float32.

  Attributes:
    dtype: ``float32``, ``bfloat16``, ``float16``, ``float8_e4m3fn``, ``float8_e5m2`` (a dtype or its name), or, for
      ``master`` alone, ``"remainder16"`` or ``"remainder8"``: the bits that rounding to the parameter dropped.
    scaling: ``"block"`` has one scale for ``block_size`` consecutive elements along the last axis, ``"tensor"`` one
      for the whole leaf, ``None`` stores the value itself. Remainders have none.
    block_size: elements of a block.
    transform: ``"sqrt"`` stores the square root; only for ``nu``, whose values are never negative.
    rounding: ``"nearest"`` (ties to even) or ``"stochastic"`` (unbiased between the two neighbouring codes, by noise
      from the seed, the step, the leaf and the element's position).

  Raises:
    ValueError: for an unknown dtype, scaling, transform or rounding, or a block size that is not a positive integer.
  """

  dtype: Any
  scaling: Scaling = "block"
  block_size: int = 128
  transform: Transform = None
  rounding: Rounding = "nearest"

  def __post_init__(self):
    object.__setattr__(self, "dtype", _dtype_name(self.dtype))
    if self.dtype in REMAINDERS:
      object.__setattr__(self, "scaling", None)
    if self.scaling not in ("block", "tensor", None):
      raise ValueError(f"scaling must be 'block', 'tensor' or None, not {self.scaling!r}")
    size = self.block_size
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
      raise ValueError(f"block_size must be a positive integer, not {size!r}")
    object.__setattr__(self, "block_size", int(size))
    if self.transform not in ("sqrt", None):
      raise ValueError(f"transform must be 'sqrt' or None, not {self.transform!r}")
    if self.rounding not in ("nearest", "stochastic"):
      raise ValueError(f"rounding must be 'nearest' or 'stochastic', not {self.rounding!r}")

  def __str__(self) -> str:
    words = [self.dtype]
    if self.scaling:
      words.append(self.scaling if self.scaling == "tensor" else f"block {self.block_size}")
    words += [w for w in (self.transform, None if self.rounding == "nearest" else self.rounding) if w]
    return " ".join(words)

  @property
  def is_remainder(self) -> bool:
    return self.dtype in REMAINDERS

  @property
  def float(self) -> Float:
    return FLOATS[self.dtype]

  @property
  def storage_dtype(self) -> np.dtype:
    return REMAINDERS[self.dtype] if self.is_remainder else self.float.dtype


FormatSpec = StateFormat | str | Any | Callable[[Any, Any], Any] | None
FLOAT32 = StateFormat("float32", scaling=None)


def canonical_format(spec: Any, part: Part) -> Any:
  """Turns a dtype or name into a ``StateFormat`` and checks that ``part`` can be stored so.

  A name of 8 bits, or bfloat16, for ``nu`` means stochastic rounding; a ``StateFormat`` keeps its own.

  Callables, and ``None`` and ``"auto"`` for the master, are returned as they are: they need the leaf.

  Raises:
    ValueError: if the format is unknown or cannot hold the part.
  """
  if part == "master" and (spec is None or (isinstance(spec, str) and spec == "auto")):
    return spec
  if callable(spec) and not isinstance(spec, (type, StateFormat)) and not hasattr(spec, "dtype"):
    return spec
  if spec is None:
    raise ValueError(f"{part}=None: give a StateFormat, a dtype or a dtype's name")
  if isinstance(spec, StateFormat):
    fmt = spec
  else:
    try:
      name = _dtype_name(spec)
    except ValueError as e:
      raise ValueError(f"{part}: {e}") from None
    # Plain float8 cannot span the range of squared gradients; its square root can.
    transform: Transform = "sqrt" if part == "nu" and name.startswith("float8") else None
    rounding: Rounding = "stochastic" if part == "nu" and name in _STOCHASTIC_NU else "nearest"
    fmt = StateFormat(name, scaling=_DEFAULT_SCALING.get(name), transform=transform, rounding=rounding)
  if part != "master" and fmt.is_remainder:
    raise ValueError(f"{part}={fmt.dtype!r}: only the master can be kept as a remainder of the parameter")
  if part != "nu" and fmt.transform == "sqrt":
    raise ValueError(f"{part} has negative values, so transform='sqrt' cannot hold it; use transform=None")
  if part == "master" and fmt.dtype.startswith("float8") and fmt.scaling is None:
    raise ValueError(
        f"master={fmt.dtype!r} without a scale cannot hold a master: its smallest step is "
        f"{fmt.float.min_positive:g}; use scaling='block', 'float16', 'remainder8' or 'remainder16'"
    )
  return fmt


# --- geometry -------------------------------------------------------------------------------------------------------


class Geometry(NamedTuple):
  """How a leaf is cut into blocks: each is ``rows`` indices of ``axis`` and everything behind that axis."""

  axis: int
  rows: int
  trail: int  # elements behind the axis
  blocks: int  # along the axis
  scale_shape: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def block_geometry(shape: tuple[int, ...], block_size: int) -> Geometry:
  """Blocks run along the last axis; where it has fewer than 32 elements, the axes before it join until there are 32.

  ``scale_shape`` has the leaf's rank: ``shape[:axis] + (blocks,) + (1, ...)``. A block is always a contiguous run of
  at most ``block_size`` elements (or of one index of ``axis``, where that alone is longer). A scalar is one block.
  """
  if not shape:
    return Geometry(0, 1, 1, 1, ())
  axis = len(shape) - 1
  trail = 1
  while axis > 0 and shape[axis] * trail < MIN_BLOCK_ROW and shape[axis] * trail > 0:
    trail *= shape[axis]
    axis -= 1
  rows = max(1, block_size // max(1, trail))
  blocks = -(-shape[axis] // rows)
  return Geometry(axis, rows, trail, blocks, (*shape[:axis], blocks, *([1] * (len(shape) - axis - 1))))


def scale_shape(shape: tuple[int, ...], fmt: StateFormat | None) -> tuple[int, ...]:
  """The shape of a leaf's scales; a part without scales has ``absent_shape``."""
  if fmt is not None and fmt.scaling == "tensor":
    return ()
  if fmt is not None and fmt.scaling == "block":
    return block_geometry(shape, fmt.block_size).scale_shape
  return absent_shape(shape)


ABSENT_DTYPE = jnp.dtype("int8")


def absent_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
  """The shape of what stands for a part that a leaf does not have: zeros of ``ABSENT_DTYPE``, which nothing reads.

  Trees of state mirror the parameters, so that trees of specs fit them, and Orbax cannot save empty arrays. A small
  leaf's shape is its own, so that any spec of the parameter fits; a large one's is that of scales for blocks of 128.
  """
  blocks = absent_blocks(shape)
  return shape if blocks is None else block_geometry(shape, blocks).scale_shape


def absent_blocks(shape: tuple[int, ...]) -> int | None:
  return None if math.prod(shape) < MIN_QUANTIZED_SIZE else 128


def absent(shape: tuple[int, ...]) -> Array:
  return jnp.zeros(absent_shape(shape), ABSENT_DTYPE)


def block_max(a: Array, block_size: int) -> Array:
  """The maximum of each block of values that are not negative: an array of the shape of scales."""
  shape = a.shape
  if not shape:
    return a
  geo = block_geometry(shape, block_size)
  lead = shape[: geo.axis]
  a = a.reshape(*lead, shape[geo.axis], geo.trail)
  pad = geo.blocks * geo.rows - shape[geo.axis]
  if pad:
    a = jnp.pad(a, [(0, 0)] * len(lead) + [(0, pad), (0, 0)])
  a = a.reshape(*lead, geo.blocks, geo.rows, geo.trail)
  return jnp.max(a, axis=(-2, -1)).reshape(geo.scale_shape)


def expand_scale(scale: Array, shape: tuple[int, ...], fmt: StateFormat) -> Array:
  """One scale per element, or one that broadcasts against ``shape``."""
  if fmt.scaling == "tensor" or not shape:
    return scale
  geo = block_geometry(shape, fmt.block_size)
  lead = shape[: geo.axis]
  behind = len(shape) - geo.axis - 1
  s = scale.reshape(*lead, geo.blocks, 1)
  s = jnp.broadcast_to(s, (*lead, geo.blocks, geo.rows)).reshape(*lead, geo.blocks * geo.rows)
  s = lax.slice_in_dim(s, 0, shape[geo.axis], axis=geo.axis)
  return s.reshape(*lead, shape[geo.axis], *([1] * behind))


# --- random bits ----------------------------------------------------------------------------------------------------
#
# The noise of an element's part in the step after `count` steps is, modulo 2^32,
#
#     noise32 = scramble(position * 0x9E3779B9 + key(seed, leaf)) * factor(part) + count * 0x9E3779B9
#     scramble(x) = x xor (x >> 15),    0x9E3779B9 = 2^32 / golden ratio
#
# of which stochastic rounding takes the upper bits, as many as it drops of the value. Within a step it is a hash of the
# position, cheap enough to be drawn for every element. Over the steps of one element it is an additive recurrence with
# the golden ratio (a Kronecker sequence; its discrepancy over n steps is of the order of log(n) / n, that of random
# numbers of 1 / sqrt(n): L. Kuipers and H. Niederreiter, Uniform Distribution of Sequences, Wiley 1974, chapter 2), so
# that the rounding errors of successive steps cancel instead of walking. docs/numerics.md has the figures.

_GOLDEN = np.uint32(0x9E3779B9)
# Odd numbers that were chosen by trial for what two positions at any distance have in common: over 2^21 positions on
# end, the upper 16 bits correlate by at most 0.006 at distances up to 300, and by 0.04 to 0.08 at the worst of all
# distances up to 2^20 (random numbers: 0.005). That is nothing to rounding, and a better hash would cost three more
# instructions an element.
_FACTORS = {"mu": np.uint32(0xDB4F0B91), "nu": np.uint32(0xAC564B05), "master": np.uint32(0xCC9E2D51)}


def mix(x: Array) -> Array:
  """A 32-bit finalizer with low bias (constants: C. Wellons, hash-prospector, ``lowbias32``)."""
  x = x ^ (x >> 16)
  x = x * np.uint32(0x7FEB352D)
  x = x ^ (x >> 15)
  x = x * np.uint32(0x846CA68B)
  return x ^ (x >> 16)


def noise_key(seed: int) -> Array:
  """The uint32 that the hashes start from; the same in every step."""
  return mix(jnp.uint32(seed & 0xFFFFFFFF) + _GOLDEN)


def noise_phase(count: Array) -> Array:
  """What the step after ``count`` steps adds to every hash: a multiple of the golden ratio, in units of 2^-32."""
  return count.astype(jnp.uint32) * _GOLDEN


def scrambled_positions(shape: tuple[int, ...], key: Array, leaf: int) -> Array:
  """A uint32 for each element of leaf number ``leaf``, by its row-major position (modulo 2^32)."""
  position = jnp.zeros(shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(len(shape))):
    position = position + lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride & 0xFFFFFFFF)
    stride *= shape[axis]
  x = position * _GOLDEN + mix(key + np.uint32((leaf * 0x85EBCA6B) & 0xFFFFFFFF))
  return x ^ (x >> 15)


class Noise(NamedTuple):
  """Uniform 32-bit integers, one for each element and part."""

  mu: Array | None
  nu: Array | None
  master: Array | None


def noise(shape: tuple[int, ...], key: Array, phase: Array, leaf: int) -> Noise:
  """The noise of leaf number ``leaf`` in the step of ``noise_phase``'s phase, from ``noise_key``'s key."""
  x = scrambled_positions(shape, key, leaf)
  return Noise(**{part: x * factor + phase for part, factor in _FACTORS.items()})


# --- codecs ---------------------------------------------------------------------------------------------------------


def _bits(x: Array) -> Array:
  return lax.bitcast_convert_type(x, jnp.uint32)


def _float(x: Array) -> Array:
  return lax.bitcast_convert_type(x, jnp.float32)


def round_to_code(x: Array, f: Float, noise32: Array | None = None) -> Array:
  """Float32 to the dtype's bit pattern (an unsigned integer array), to nearest even or with 32 bits of noise.

  Out of range values saturate where the dtype does (infinities too), NaN stays NaN.
  """
  bits = _bits(x)
  if f.name == "float32":
    return bits
  sign = (bits >> 31) << (f.bits - 1)
  magnitude = bits & 0x7FFFFFFF
  nan = magnitude > 0x7F800000
  if f.saturates:
    magnitude = jnp.minimum(magnitude, np.uint32(np.float32(f.max).view(np.uint32)))
  half_ulp = np.uint32((1 << (f.drop - 1)) - 1)
  rebias = np.uint32((f.min_exponent + 126) << 23)
  if noise32 is None:
    rounded = magnitude + half_ulp + ((magnitude >> f.drop) & 1)
  else:
    rounded = magnitude + (noise32 >> (32 - f.drop))
  code = (rounded - rebias) >> f.drop
  if f.saturates:
    # Subnormal codes are equally spaced: adding a power of two aligns them to integers in the sum's mantissa.
    value = _float(magnitude)
    if noise32 is None:
      base = np.float32(2.0 ** (f.min_exponent + f.drop))
      small = _bits(value + base) - base.view(np.uint32)
    else:
      base = np.float32(2.0**f.min_exponent)
      small = (_bits(value + base) + (noise32 >> (32 - f.drop)) - base.view(np.uint32)) >> f.drop
    code = jnp.where(magnitude < np.float32(2.0**f.min_exponent).view(np.uint32), small, code)
  # One NaN: which sign an invalid operation gives depends on the processor.
  code = jnp.where(nan, np.uint32(f.nan), code | sign)
  return code.astype(_INT_OF_BITS[f.bits])


def clip_scale(scale: Array, absmax: Array, f: Float) -> Array:
  """A scale within the range that has a reciprocal; 0 where there is nothing to scale."""
  return jnp.where(absmax > 0, jnp.clip(scale, np.float32(f.min_scale), np.float32(2.0**126)), 0.0)


def region_max(a: Array, fmt: StateFormat) -> Array:
  """The maximum over each region that has a scale, of values that are not negative."""
  return jnp.max(a, initial=0.0) if fmt.scaling == "tensor" else block_max(a, fmt.block_size)


def encode(
    x: Array,
    fmt: StateFormat,
    *,
    positive: bool = False,
    noise32: Array | None = None,
    scale: Array | None = None,
) -> tuple[Array, Array]:
  """Stores float32 values.

  Args:
    x: values of any shape, float32.
    fmt: a format that is not a remainder.
    positive: never store a value above 0 as 0 but as the smallest code (the second moment stands in a denominator).
    noise32: uint32 of x's shape, for stochastic rounding.
    scale: for a format with scaling, scales to use instead of those that map each maximum to the largest code; from
      ``clip_scale``.

  Returns:
    The codes (x's shape, the storage dtype) and the float32 scales (shape of ``scale_shape``), or what stands for
    none. The scale's absmax is taken over finite values, so that one infinity or NaN does not spoil its block.
  """
  f = fmt.float
  if fmt.transform == "sqrt":
    x = jnp.sqrt(x)
  if f.name == "float32" and fmt.scaling is None:
    return x, absent(x.shape)
  source = x
  if fmt.scaling is None:
    scale = absent(x.shape)
  else:
    if scale is None:
      a = jnp.abs(x)
      absmax = region_max(jnp.where(a < jnp.inf, a, 0.0), fmt)
      # A product with the reciprocal, written out: XLA would turn a division by a constant into one where it likes.
      scale = clip_scale(absmax * np.float32(1.0 / f.max_scaled), absmax, f)
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    x = x * expand_scale(inverse, x.shape, fmt)
  code = round_to_code(x, f, noise32 if fmt.rounding == "stochastic" else None)
  if positive:
    lowest = np.float32(f.min_positive if fmt.scaling else 2.0**-126)
    smallest = 1 if f.saturates else int(lowest.view(np.uint32)) >> f.drop
    code = jnp.where((source > 0) & (code == 0), jnp.asarray(smallest, code.dtype), code)
  return lax.bitcast_convert_type(code, f.dtype), scale


def decode_stored(
    q: Array, scale: Array, fmt: StateFormat, multiply: Callable[[Array, Array], Array] = jnp.multiply
) -> Array:
  """Codes to float32, without undoing the transform."""
  x = q.astype(jnp.float32)
  return x if fmt.scaling is None else multiply(x, expand_scale(scale, q.shape, fmt))


def decode(q: Array, scale: Array, fmt: StateFormat) -> Array:
  """The float32 values that ``encode`` stored (float64 parts are returned as they are)."""
  if q.dtype == jnp.float64:
    return q
  x = decode_stored(q, scale, fmt)
  return x * x if fmt.transform == "sqrt" else x


# --- remainders -----------------------------------------------------------------------------------------------------
#
# bfloat16: a bfloat16 is the upper half of a float32's bits, so the master's bits are the parameter's, shifted, plus a
# signed remainder. 2^16 + 1 float32 values round (half to even) to each even bfloat16, one more than 16 bits can tell
# apart: for the tie just above an even parameter, and for it alone, the parameter is the odd neighbour. With that
# every float32 is kept exactly.
#
# float16: its exponent range is not float32's, so the remainder counts 2^-16 (2^-8) of the parameter's last place.
# 11 + 16 bits hold every float32 above 2^-14 in magnitude exactly, and smaller ones to 2^-40: half way to the parameter
# above, 16 bits are one unit short, which float32 rounds away. With 8 bits the parameter is then the one above.


def _f16_unit(param: Array, bits: int) -> Array:
  """The worth of a remainder of 1 beside a float16 parameter given as float32."""
  exponent = jnp.maximum(_bits(param) & 0x7F800000, np.uint32((127 - 14) << 23))
  return _float(exponent - np.uint32((10 + bits) << 23))


def decode_remainder(param: Array, remainder: Array) -> Array:
  """The float32 master that ``param`` (bfloat16 or float16) and its remainder (int16 or int8) stand for."""
  bits = remainder.dtype.itemsize * 8
  rem = remainder.astype(jnp.int32)
  if param.dtype == jnp.float16:
    p = param.astype(jnp.float32)
    return jnp.where(jnp.isfinite(p), p + rem.astype(jnp.float32) * _f16_unit(p, bits), p)
  p16 = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32)
  # Beside a zero (a parameter that was set to 0 from outside) a negative remainder would run into the NaNs.
  rem = jnp.where((p16 & 0x7FFF) == 0, jnp.maximum(rem, 0), rem)
  return _float((p16 << 16) + lax.bitcast_convert_type(rem << (16 - bits), jnp.uint32))


def encode_remainder(
    master: Array, param_dtype: Any, fmt: StateFormat, noise32: Array | None = None
) -> tuple[Array, Array]:
  """Float32 masters to the parameter that stands for them and its remainder."""
  out = REMAINDERS[fmt.dtype]
  bits = out.itemsize * 8
  if fmt.rounding != "stochastic":
    noise32 = None
  if param_dtype == jnp.float16:
    param = lax.bitcast_convert_type(_f16_code(master), jnp.float16)
    p = param.astype(jnp.float32)
    unit = _f16_unit(p, bits)
    rest = (master - p) / unit
    if noise32 is None:
      rest = jnp.round(rest)
    else:
      rest = jnp.floor(rest + (noise32 >> 8).astype(jnp.float32) * np.float32(2.0**-24))
    rest = jnp.where(jnp.isfinite(p), rest, 0.0)
    limit = np.float32(1 << (bits - 1))
    up = (rest >= limit) & (p < np.float32(FLOATS["float16"].max)) & (bits == 8)
    above = p + 2 * limit * unit
    # The last place of a power of two is worth twice that of what lies below it.
    from_above = jnp.where(_f16_unit(above, bits) > unit, -limit / 2, -limit)
    rest = jnp.where(up, from_above, jnp.minimum(rest, limit - 1))
    param = jnp.where(up, lax.bitcast_convert_type(_f16_code(above), jnp.float16), param)
    return param, rest.astype(out)
  w = _bits(master)
  nan = (w & 0x7FFFFFFF) > 0x7F800000
  special = (w & 0x7F800000) == 0x7F800000
  if bits == 8:
    kept = w + (np.uint32(0x80) if noise32 is None else noise32 >> 24)
    # Rounding up must not carry a finite master into infinity.
    overflow = (kept & 0x7F800000) == 0x7F800000
    kept = jnp.where(overflow, (w & np.uint32(0x80000000)) | np.uint32(0x7F7FFF00), kept & np.uint32(0xFFFFFF00))
    w = jnp.where(special, w, kept)
  p16 = jnp.where(nan, np.uint32(0x7FC0), (w + np.uint32(0x8000)) >> 16)
  rest = lax.bitcast_convert_type(w - (p16 << 16), jnp.int32) >> (16 - bits)
  rest = jnp.where(special, 0, rest)
  return lax.bitcast_convert_type(p16.astype(jnp.uint16), jnp.bfloat16), rest.astype(out)


def _f16_code(x: Array) -> Array:
  """Float32 to float16 bits, nearest even, overflowing to infinity as a cast does."""
  code = round_to_code(x, FLOATS["float16"])
  inf = ((_bits(x) >> 31) << 15).astype(jnp.uint16) | np.uint16(0x7C00)
  return jnp.where(jnp.abs(x) >= np.float32(65520.0), inf, code)


def cast_to(x: Array, dtype: Any) -> Array:
  """Float32 to a parameter's or update's dtype, nearest even, in a way that XLA cannot elide."""
  dtype = jnp.dtype(dtype)
  if dtype == jnp.bfloat16:
    return lax.bitcast_convert_type(round_to_code(x, FLOATS["bfloat16"]), jnp.bfloat16)
  if dtype == jnp.float16:
    return lax.bitcast_convert_type(_f16_code(x), jnp.float16)
  return x.astype(dtype)


# --- which format a leaf has ----------------------------------------------------------------------------------------


class LeafFormats(NamedTuple):
  """The formats of one leaf; ``master`` is None where the parameter is its own master."""

  mu: StateFormat
  nu: StateFormat
  master: StateFormat | None

  @property
  def stochastic(self) -> bool:
    return any(f is not None and f.rounding == "stochastic" for f in self)


@dataclasses.dataclass(frozen=True)
class Formats:
  """What a transform was asked for, before any leaf is known. ``master="absent"``: moments only."""

  mu: Any
  nu: Any
  master: Any
  min_quantized_size: int

  def part(self, part: Part, path: Any, leaf: Any) -> StateFormat | None:
    spec = getattr(self, part)
    if callable(spec) and not isinstance(spec, StateFormat):
      try:
        spec = canonical_format(spec(path, leaf), part)
        if callable(spec) and not isinstance(spec, StateFormat):
          raise ValueError(f"{part}: the callable returned another callable")
      except ValueError as e:
        raise ValueError(f"{jax.tree_util.keystr(path)}: {e}") from None
    if part != "master":
      return spec
    dtype = jnp.dtype(leaf.dtype)
    narrow = dtype in (jnp.bfloat16, jnp.float16)
    if spec is None or spec == "absent":
      return None
    if isinstance(spec, str):  # "auto"
      return StateFormat("remainder16") if narrow else None
    # A float32 parameter is already exact: a remainder of it, or a float32 copy, would hold nothing.
    if not narrow and (spec.is_remainder or spec == FLOAT32):
      return None
    return spec

  def leaf(self, path: Any, leaf: Any, *, small: bool | None = None) -> LeafFormats:
    """The formats of a leaf of this shape and dtype. ``small`` overrides what its (global) size says."""
    dtype = jnp.dtype(leaf.dtype)
    if dtype == jnp.float64:
      return LeafFormats(FLOAT32, FLOAT32, None)
    mu, nu, master = (self.part(p, path, leaf) for p in ("mu", "nu", "master"))
    assert mu is not None and nu is not None
    if small is None:
      small = math.prod(leaf.shape) < self.min_quantized_size
    if small:
      mu = nu = FLOAT32
      if master is not None:
        master = None if dtype == jnp.float32 else FLOAT32
    return LeafFormats(mu, nu, master)
