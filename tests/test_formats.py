"""What a stored number is: codecs against ml_dtypes, geometry, remainders, stochastic rounding."""

import functools
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import table

from optax_lowprec import formats as fmts
from optax_lowprec import StateFormat

NUMPY = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float32": np.float32,
}
NARROW = tuple(d for d in table.DTYPES if d != "float32")
SATURATING = tuple(d for d in NARROW if fmts.FLOATS[d].saturates)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _encode(x, fmt, positive=False):
  return fmts.encode(x, fmt, positive=positive)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _round_trip(x, fmt, positive=False):
  return fmts.decode(*fmts.encode(x, fmt, positive=positive), fmt)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _encode_noisy(x, fmt, noise32, positive=False):
  q, scale = fmts.encode(x, fmt, positive=positive, noise32=noise32)
  return q, scale, fmts.decode(q, scale, fmt)


def _plain(dtype: str) -> StateFormat:
  return StateFormat(dtype, scaling=None)


def _codes(dtype: str) -> np.ndarray:
  """Every code of a dtype, as that dtype."""
  bits = fmts.FLOATS[dtype].bits
  return np.arange(1 << bits, dtype=f"uint{bits}").view(NUMPY[dtype])


def _positive_values(dtype: str) -> np.ndarray:
  """The finite values from 0 up, in float64, each next to its code's successor."""
  with np.errstate(invalid="ignore"):  # signalling NaNs
    x = _codes(dtype)[: 1 << (fmts.FLOATS[dtype].bits - 1)].astype(np.float64)
  return x[np.isfinite(x)]


# --- codecs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
def test_every_code_round_trips(dtype):
  """Decoding is exact for all 2^8 or 2^16 codes and encoding gives the code back; NaNs stay NaN."""
  codes = _codes(dtype)
  with np.errstate(invalid="ignore"):  # signalling NaNs
    wide = codes.astype(np.float32)
  values = np.asarray(fmts.decode(jnp.asarray(codes), jnp.zeros((0,)), _plain(dtype)))
  np.testing.assert_array_equal(values, wide)
  back = np.asarray(_encode(wide, _plain(dtype))[0])
  nan, infinite = np.isnan(wide), np.isinf(wide)
  assert np.isnan(back.astype(np.float32)[nan]).all()
  same = ~nan & ~(infinite & fmts.FLOATS[dtype].saturates)
  np.testing.assert_array_equal(table.bits(back)[same], table.bits(codes)[same])


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_boundaries(dtype):
  """Between every two neighbouring codes: the tie goes to the even code, anything beside it to the nearer one."""
  x = _positive_values(dtype)
  low = x[:-1]
  middle = ((low + x[1:]) / 2).astype(np.float32)
  assert (middle.astype(np.float64) == (low + x[1:]) / 2).all(), "ties are float32 numbers"
  normal = np.abs(middle) >= 2.0**-126  # float32 subnormals count as zero
  code = np.arange(len(low))
  for value, right in (
      (middle, code + code % 2),
      (np.nextafter(middle, np.float32(0)), code),
      (np.nextafter(middle, np.float32(np.inf)), code + 1),
  ):
    for sign in (1, -1):
      got = table.bits(_encode(sign * value, _plain(dtype))[0]).astype(np.int64)
      sign_bit = 1 << (fmts.FLOATS[dtype].bits - 1)
      np.testing.assert_array_equal(got[normal], right[normal] + (sign_bit if sign < 0 else 0))


@pytest.mark.parametrize("dtype", NARROW)
def test_encode_equals_ml_dtypes(dtype):
  """A million random bit patterns, saturated first where the dtype saturates."""
  bits = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
  # A quarter near the dtype's own range, where random exponents seldom fall.
  near = np.random.default_rng(1).uniform(-1, 1, 250_000) * min(1.1 * fmts.FLOATS[dtype].max, 3e38)
  bits[::4] = near.astype(np.float32).view(np.uint32)
  x = bits.view(np.float32)
  x = x[(np.abs(x) >= 2.0**-126) | np.isnan(x)]
  limit = np.float32(fmts.FLOATS[dtype].max)
  with np.errstate(all="ignore"):
    right = (np.clip(x, -limit, limit) if fmts.FLOATS[dtype].saturates else x).astype(NUMPY[dtype])
  got = np.asarray(_encode(x, _plain(dtype))[0])
  nan = np.isnan(x)
  assert np.isnan(got.astype(np.float32)[nan]).all()
  np.testing.assert_array_equal(table.bits(got)[~nan], table.bits(right)[~nan])


@pytest.mark.parametrize("dtype", SATURATING)
@pytest.mark.parametrize("rounding", table.ROUNDINGS)
def test_saturation(dtype, rounding):
  """465.0 is where XLA's own cast to e4m3fn turns into NaN; nothing but NaN may become NaN here."""
  top = fmts.FLOATS[dtype].max
  x = jnp.asarray([top, top * 1.04, top * 2, 1e9, 3e38, jnp.inf], jnp.float32)
  noise = jnp.full(x.shape, 0xFFFFFFFF, jnp.uint32)
  fmt = StateFormat(dtype, None, rounding=rounding)
  for sign in (1, -1):
    q, scale = fmts.encode(sign * x, fmt, noise32=noise)
    np.testing.assert_array_equal(fmts.decode(q, scale, fmt), np.full(x.shape, sign * top, np.float32))
  if dtype == "float8_e4m3fn":
    np.testing.assert_array_equal(_round_trip(jnp.asarray([465.0, -465.0, 1e9]), fmt), [448, -448, 448])


@pytest.mark.parametrize("fmt", table.MU_FORMATS, ids=str)
def test_nan_is_kept_and_spoils_nothing_else(fmt):
  """One NaN or infinity leaves the other values of its block and its scale alone."""
  x = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
  noise = fmts.noise(x.shape, jnp.uint32(1), jnp.uint32(0), 0).mu
  clean_q, clean_scale, _ = _encode_noisy(x, fmt, noise)
  for bad in (np.nan, np.inf, -np.inf):
    y = x.copy()
    y[1, 5] = bad
    q, scale, decoded = _encode_noisy(y, fmt, noise)
    value = np.asarray(decoded)[1, 5]
    assert np.isnan(value) if np.isnan(bad) else not np.isnan(value) and np.sign(value) == np.sign(bad)
    others = np.ones(x.shape, bool)
    others[1, 5] = False
    np.testing.assert_array_equal(table.bits(q)[others], table.bits(clean_q)[others])
    np.testing.assert_array_equal(scale, clean_scale)


@pytest.mark.parametrize("fmt", [f for f in table.MU_FORMATS if f.scaling and f.rounding == "nearest"], ids=str)
def test_absmax_sweep(fmt):
  """Scales hold from 1e-38 to 1e38: the naive fmax / absmax overflows below 1e-36 and makes inf * 0 = NaN."""
  f = fmt.float
  pattern = np.asarray([1, -1, 0.5, -0.3, 0.0123, 1e-3, -1e-6, 0] * 16, np.float64)
  for exponent in np.arange(-38, 38.5, 0.5):
    x = (pattern * 10.0**exponent).astype(np.float32)
    x[np.abs(x) < 2.0**-126] = 0
    got = np.asarray(_round_trip(x, fmt), np.float64)
    assert np.isfinite(got).all(), exponent
    exact = x.astype(np.float64)
    absmax = np.abs(exact).max()
    spacing = absmax / f.max_scaled * 2.0 ** (f.min_exponent - f.mantissa) if f.saturates else 0
    half_ulp = np.maximum(np.abs(exact) * 2.0 ** -(f.mantissa + 1), spacing / 2) + np.abs(exact) * 2.0**-21
    assert (np.abs(got - exact) <= half_ulp + 2.0**-126).all(), exponent


@pytest.mark.parametrize("fmt", table.NU_FORMATS, ids=str)
def test_zero_block(fmt):
  """A block of zeros has scale 0 and decodes to 0, next to a block that has values."""
  x = jnp.zeros((2, 256), jnp.float32).at[1].set(3.0)
  noise = jnp.full(x.shape, 0xFFFFFFFF, jnp.uint32)
  _, scale, got = (np.asarray(v) for v in _encode_noisy(x, fmt, noise, True))
  np.testing.assert_array_equal(got[0], 0)
  np.testing.assert_allclose(got[1], 3.0, rtol=0.3)
  if fmt.scaling == "block":
    np.testing.assert_array_equal(scale[0], 0)
  _, zero_scale, all_zero = _encode_noisy(jnp.zeros_like(x), fmt, noise, True)
  np.testing.assert_array_equal(all_zero, 0)
  np.testing.assert_array_equal(zero_scale, 0)


@pytest.mark.parametrize("fmt", table.NU_FORMATS, ids=str)
def test_positive_never_decodes_to_zero(fmt):
  """Adam's denominator would collapse to eps: beside a neighbour of any size a positive v stays positive."""
  small = 10.0 ** np.arange(-36.5, 30, 0.5)
  neighbour = 10.0 ** np.arange(-36, 38, 4.0)
  x = np.zeros((len(neighbour), 256), np.float32)
  x[:, : len(small)] = small
  x[:, 255] = neighbour  # of the second block only, and of the tensor
  x[:, 127] = neighbour
  x[:, 60] = 0
  noise = jnp.zeros((256,), jnp.uint32)  # the lowest draw rounds down
  encode = jax.jit(jax.vmap(lambda v: fmts.decode(*fmts.encode(v, fmt, positive=True, noise32=noise), fmt)))
  got = np.asarray(encode(x))
  assert (got[x > 0] > 0).all()
  np.testing.assert_array_equal(got[x == 0], 0)


@pytest.mark.parametrize("fmt", [f for f in table.NU_FORMATS if f.scaling and f.rounding == "nearest"], ids=str)
def test_scales_are_float32(fmt):
  """float16 scales under- and overflow with gradients of 1e-7 and 7e5 (squared: 1e-14 and 5e11)."""
  for size in (1e-14, 1e-7, 7e5, 5e11):
    x = jnp.full((2, 256), size, jnp.float32)
    assert _encode(x, fmt)[1].dtype == jnp.float32
    np.testing.assert_allclose(_round_trip(x, fmt), x, rtol=1e-2)


@pytest.mark.parametrize("fmt", table.MU_FORMATS, ids=str)
def test_encode_is_the_same_eager_and_jitted(fmt):
  """XLA fuses and elides inside jit; the stored bits must not depend on it."""
  x = jnp.asarray(np.random.default_rng(0).normal(size=(33, 257)), jnp.float32)
  run = lambda v: fmts.encode(v, fmt, noise32=fmts.noise(v.shape, jnp.uint32(7), jnp.uint32(0), 3).mu)
  table.assert_same_bits(run(x), jax.jit(run)(x), str(fmt))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cast_to_rounds_as_numpy_does(dtype):
  x = np.random.default_rng(0).integers(0, 1 << 32, 500_000, dtype=np.uint32).view(np.float32)
  x = x[np.abs(x) >= 2.0**-126]
  with np.errstate(all="ignore"):
    right = x.astype(NUMPY[dtype])
  table.assert_same_bits(jax.jit(lambda v: fmts.cast_to(v, dtype))(x), right)


# --- geometry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "block", "scales"),
    [
        ((), 128, ()),
        ((0,), 128, (0,)),
        ((0, 64), 128, (0, 1)),
        ((64, 0), 128, (64, 0)),
        ((1,), 128, (1,)),
        ((7,), 128, (1,)),
        ((768,), 128, (6,)),
        ((50257, 768), 128, (50257, 6)),
        ((1601, 1280), 128, (1601, 10)),
        ((64, 257), 128, (64, 3)),
        ((64, 257), 64, (64, 5)),
        ((3, 3, 16, 32), 128, (3, 3, 16, 1)),
        ((3, 3, 3, 64), 128, (3, 3, 3, 1)),
        ((3, 3, 64, 3), 128, (3, 3, 2, 1)),  # a short last axis: 64 x 3 in blocks of 42 rows
        ((5, 3), 128, (1, 1)),
        ((4096, 1), 128, (32, 1)),
        ((7, 5, 2, 2), 128, (2, 1, 1, 1)),  # 20 behind the first axis: blocks of 6
        ((1000, 31), 16, (1000, 1)),  # one index is longer than a block
    ],
)
def test_scale_shape(shape, block, scales):
  """The documented rule: blocks along the last axis, short ones joined with the axis before; rank kept."""
  fmt = StateFormat("float8_e4m3fn", block_size=block)
  assert fmts.scale_shape(shape, fmt) == scales
  assert jax.eval_shape(lambda x: fmts.encode(x, fmt), jax.ShapeDtypeStruct(shape, jnp.float32))[1].shape == scales
  assert fmts.scale_shape(shape, StateFormat("float8_e4m3fn", "tensor")) == ()


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 64)])
@pytest.mark.parametrize("fmt", [f for f in table.MU_FORMATS if f.rounding == "nearest"], ids=str)
def test_empty_leaves(shape, fmt):
  q, scale = _encode(jnp.zeros(shape), fmt)
  assert q.shape == shape and _round_trip(jnp.zeros(shape), fmt).shape == shape
  assert scale.shape == fmts.scale_shape(shape, fmt)


@pytest.mark.parametrize("block", [16, 100, 128])
@pytest.mark.parametrize("shape", [(300,), (7, 300), (3, 3, 16, 4), (11, 5, 7), (2, 64, 257), (40, 31)])
def test_blocks_are_contiguous_runs_with_their_own_absmax(shape, block):
  """Against a loop over the flat array: what a block is must not depend on how it is computed."""
  fmt = StateFormat("float32", "block", block_size=block)
  geometry = fmts.block_geometry(shape, block)
  ids = np.arange(int(np.prod(geometry.scale_shape)), dtype=np.float32).reshape(geometry.scale_shape)
  flat = np.broadcast_to(fmts.expand_scale(jnp.asarray(ids), shape, fmt), shape).ravel()
  assert (np.diff(flat) >= 0).all() and set(flat) == set(ids.ravel())
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  scale = np.asarray(_encode(x, fmt)[1]).ravel()
  last_axis_is_long = shape[-1] >= fmts.MIN_BLOCK_ROW
  for i in range(ids.size):
    members = np.flatnonzero(flat == i)
    assert len(members) <= max(block, geometry.trail) and members[-1] - members[0] == len(members) - 1
    if last_axis_is_long:
      assert members[0] // shape[-1] == members[-1] // shape[-1], "a block stays within one row"
    assert scale[i] == np.abs(x.ravel()[members]).max()


# --- remainders -----------------------------------------------------------------------------------------------------

_ROUND_REMAINDER = {
    (n, r): jax.jit(
        lambda w, noise, d, f=StateFormat(n, rounding=r): fmts.encode_remainder(w, d, f, noise), static_argnums=2
    )
    for n in fmts.REMAINDERS
    for r in table.ROUNDINGS
}
_decode_remainder = jax.jit(fmts.decode_remainder)


def _remainder_round_trip(bits32: np.ndarray, name: str, dtype=jnp.bfloat16, rounding: str = "nearest"):
  """Masters given as bits: the parameter's and the decoded master's bits."""
  w = jax.lax.bitcast_convert_type(jnp.asarray(bits32), jnp.float32)
  noise = fmts.noise(w.shape, jnp.uint32(5), jnp.uint32(0), 0).master
  p, rest = _ROUND_REMAINDER[name, rounding](w, noise, dtype)
  assert p.dtype == dtype and rest.dtype == fmts.REMAINDERS[name]
  return np.asarray(p), table.bits(_decode_remainder(p, rest))


def _sweep() -> np.ndarray:
  """Offsets from a bfloat16's bits: all the special ones and a random few."""
  special = [
      0,
      1,
      2,
      0x7F,
      0x80,
      0x81,
      0xFF,
      0x100,
      0x7FFE,
      0x7FFF,
      0x8000,
      0x8001,
      0x80FF,
      0xFF7F,
      0xFF80,
      0xFFFE,
      0xFFFF,
  ]
  return np.asarray(special + list(np.random.default_rng(0).integers(0, 1 << 16, 47)), np.uint32)


def test_remainder16_is_exact_over_every_bfloat16():
  """All 2^16 bfloat16 parameters by a sweep of remainders: the master comes back bit for bit.

  Subnormals, ties and the largest finite are among them; infinities stay infinite, NaN stays NaN and never turns into
  -0.0.
  """
  bits32 = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16) + _sweep()[None]
  for rounding in table.ROUNDINGS:  # there is nothing left to round
    p, back = _remainder_round_trip(bits32, "remainder16", rounding=rounding)
    magnitude = bits32 & 0x7FFFFFFF
    nan = magnitude > 0x7F800000
    np.testing.assert_array_equal(back[~nan], bits32[~nan])
    assert ((back[nan] & 0x7FFFFFFF) > 0x7F800000).all()
    assert np.isnan(p.astype(np.float32)[nan]).all()
    # The parameter is the nearest bfloat16, the documented tie apart (even parameter, tie above it: the odd one).
    tie = (bits32 & 0xFFFF) == 0x8000
    with np.errstate(all="ignore"):
      nearest = bits32.view(np.float32).astype(ml_dtypes.bfloat16)
    ordinary = ~nan & ~tie
    np.testing.assert_array_equal(table.bits(p)[ordinary], table.bits(nearest)[ordinary])
    np.testing.assert_array_equal(table.bits(p)[tie & ~nan], (bits32[tie & ~nan] >> 16) + 1)


@pytest.mark.parametrize("name", fmts.REMAINDERS)
def test_remainder_of_random_masters(name):
  """A million random float32s; remainder8 keeps 24 bits: sign, exponent and 15 bits of mantissa."""
  bits32 = np.random.default_rng(3).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
  bits32 = bits32[(bits32 & 0x7F800000) != 0x7F800000]
  p, back = _remainder_round_trip(bits32, name)
  w, got = bits32.view(np.float32).astype(np.float64), back.view(np.float32).astype(np.float64)
  if name == "remainder16":
    np.testing.assert_array_equal(back, bits32)
  else:
    assert np.isfinite(got).all()
    # Half of the last of 15 bits; at the very top the value is clamped instead of rounded into infinity.
    spacing = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(w), 1e-300))) - 15), 2.0**-141)
    error = np.abs(got - w)
    assert (error <= np.where(np.abs(w) > 3.4028e38, 1, 0.5) * spacing).all()
  finite = np.isfinite(p.astype(np.float32))
  assert (np.abs(p.astype(np.float64) - got)[finite] <= np.abs(w[finite]) * 2.0**-8 + 2.0**-133).all()


def test_remainder8_largest_finite_does_not_become_infinite():
  bits32 = np.asarray([0x7F7FFFFF, 0x7F7FFF80, 0x7F7FFF7F, 0xFF7FFFFF], np.uint32)
  for rounding in table.ROUNDINGS:
    back = _remainder_round_trip(bits32, "remainder8", rounding=rounding)[1].view(np.float32)
    assert np.isfinite(back).all() and (np.sign(back) == np.sign(bits32.view(np.float32))).all()


@pytest.mark.parametrize("name", fmts.REMAINDERS)
def test_nonfinite_masters(name):
  """NaN never becomes -0 (a known fault elsewhere) and infinity stays what it is, whatever the payload."""
  bits32 = np.asarray(
      [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32
  )
  for dtype in (jnp.bfloat16, jnp.float16):
    p, back = _remainder_round_trip(bits32, name, dtype)
    w, got = bits32.view(np.float32), back.view(np.float32)
    np.testing.assert_array_equal(got, w)  # NaN equals NaN here
    np.testing.assert_array_equal(p.astype(np.float32), w)


@pytest.mark.parametrize("name", fmts.REMAINDERS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameter_edited_from_outside(name, dtype):
  """The master follows the edit. A zero beside a negative remainder must not run into the NaNs below it."""
  info = np.iinfo(fmts.REMAINDERS[name])
  rests = jnp.asarray([info.min, -1, 0, 1, info.max], fmts.REMAINDERS[name])
  for value in (0.0, -0.0, 1.0, -2.5, 6e-8 if dtype == jnp.float16 else 1e-38):
    p = jnp.full(rests.shape, value, dtype)
    w = np.asarray(_decode_remainder(p, rests), np.float64)
    assert np.isfinite(w).all(), value
    exact = np.asarray(p, np.float64)
    ulp = 2.0**-7 if dtype == jnp.bfloat16 else 2.0**-10
    least = 2.0**-133 if dtype == jnp.bfloat16 else 2.0**-24
    assert (np.abs(w - exact) <= np.maximum(np.abs(exact) * ulp, least) / 2 * 1.001).all(), value


def _around_every_float16() -> np.ndarray:
  codes = _codes("float16")
  codes = codes[np.isfinite(codes)]
  p32 = codes.astype(np.float64)
  ulp = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(p32), 2.0**-24))) - 10), 2.0**-24)
  fractions = np.concatenate([np.linspace(-0.5, 0.5, 33), np.random.default_rng(0).uniform(-0.5, 0.5, 16)])
  w = (p32[:, None] + ulp[:, None] * fractions[None]).astype(np.float32)
  return w[np.abs(w) < 65520]


def test_float16_remainder16():
  """Every finite float16 by a sweep: exact above 2^-14; the parameter is the nearest float16.

  Below, to half of 2^-40, but for the tie above its parameter, which is one past the largest remainder.
  """
  w = _around_every_float16()
  p, back = _remainder_round_trip(w.view(np.uint32), "remainder16", jnp.float16)
  np.testing.assert_array_equal(table.bits(p), table.bits(w.astype(np.float16)))
  normal = np.abs(w) >= 2.0**-14
  np.testing.assert_array_equal(back[normal], w.view(np.uint32)[normal])
  error = np.abs(back.view(np.float32).astype(np.float64) - w)
  assert error[~normal].max() <= 2.0**-40


def test_float16_remainder8():
  """Every finite float16 by a sweep, ties included: 11 + 8 bits, and the parameter next to the master."""
  w = _around_every_float16()
  p, back = _remainder_round_trip(w.view(np.uint32), "remainder8", jnp.float16)
  unit = np.maximum(np.abs(w) * 2.0**-19, 2.0**-33)
  largest = np.abs(w) > 65504  # beside the largest float16 there is none to go to
  error = np.abs(back.view(np.float32).astype(np.float64) - w)
  assert (error <= np.where(largest, 2, 1) * unit).all()
  nearest = w.astype(np.float16)
  distance = lambda x: np.abs(x.astype(np.float64) - w)
  # Rounded to 19 bits, a master just short of a tie is one: then its parameter is the one above.
  assert (distance(p.view(np.float16)) <= distance(nearest) + 2 * unit).all()
  elsewhere = p.view(np.uint16) != nearest.view(np.uint16)
  assert 0 < elsewhere.sum() and (p.view(np.float16)[elsewhere] > nearest[elsewhere]).all()


# --- stochastic rounding --------------------------------------------------------------------------------------------

STOCHASTIC = {**dict.fromkeys(NARROW), "remainder8": jnp.bfloat16, "remainder8 of float16": jnp.float16}


def _some_values(dtype: str) -> np.ndarray:
  """200 values, both signs: normals, subnormals down to below the smallest code, and codes themselves."""
  f = fmts.FLOATS[
      "float16" if "float16" in dtype and "b" not in dtype[:1] else "bfloat16" if dtype.startswith("r") else dtype
  ]
  rng = np.random.default_rng(zlib.crc32(dtype.encode()))
  low = max(f.min_exponent, -60)
  normal = 2.0 ** rng.uniform(low, min(np.log2(f.max) - 1, 20), 110)
  subnormal = 2.0**low * rng.uniform(0, 1, 60)
  tiny = 2.0 ** (low - f.mantissa) * rng.uniform(0, 1, 20)
  codes = 2.0 ** np.arange(-2, 8)
  x = np.concatenate([normal, subnormal, tiny, codes])
  return (x * np.where(np.arange(len(x)) % 2, -1, 1)).astype(np.float32)


@pytest.mark.parametrize("dtype", STOCHASTIC)
def test_stochastic_rounding_is_unbiased(dtype):
  """The mean of 100k draws is within 4 standard errors of the value, subnormals and both signs included.

  Only the two neighbouring codes are drawn.
  """
  x = _some_values(dtype)
  draws, chunk = 100_000, 2_000
  param = STOCHASTIC[dtype]
  if param is None:
    fmt = StateFormat(dtype, None, rounding="stochastic")
    store = lambda w, n: fmts.decode(*fmts.encode(w, fmt, noise32=n), fmt)
  else:
    fmt = StateFormat("remainder8", rounding="stochastic")
    store = lambda w, n: fmts.decode_remainder(*fmts.encode_remainder(w, param, fmt, n))

  @jax.jit
  def one_step(count):
    shape = (chunk, len(x))
    value = store(jnp.broadcast_to(x, shape), fmts.noise(shape, fmts.noise_key(0), fmts.noise_phase(count), 4).master)
    high = value > jnp.asarray(x)
    return value.min(0), value.max(0), high.sum(0)

  lows, highs, counts = (np.asarray(v) for v in jax.jit(lambda: jax.lax.map(one_step, jnp.arange(draws // chunk)))())
  low, high, up = lows.min(0).astype(np.float64), highs.max(0).astype(np.float64), counts.sum(0)
  # At most two codes, around the value: with that the number of draws above it gives the mean.
  exact = x.astype(np.float64)
  gap = high - low
  neighbours = _neighbour_gap(x, dtype, param)
  assert (gap <= neighbours).all() and (abs(low - exact) <= neighbours).all(), "a draw beyond the neighbouring codes"
  mean = np.where(gap > 0, low + gap * up / draws, low)
  p = np.abs(exact) / neighbours % 1
  standard_error = neighbours * np.sqrt(np.maximum(p * (1 - p), 1e-5) / draws)
  assert (np.abs(mean - exact) <= 4 * standard_error).all()
  assert (gap > 0).sum() > 150, "the values must not be codes"


def _neighbour_gap(x: np.ndarray, dtype: str, param) -> np.ndarray:
  a = np.abs(x.astype(np.float64))
  if param is not None:
    bits, least = (15, -1000) if param == jnp.bfloat16 else (18, -14 - 18)
  else:
    f = fmts.FLOATS[dtype]
    bits, least = f.mantissa, f.min_exponent - f.mantissa
  return np.maximum(2.0 ** (np.floor(np.log2(a)) - bits), 2.0**least)


def test_float16_remainder8_is_unbiased_next_to_a_tie():
  """Between the last remainder and the next parameter's first there is no code of this parameter."""
  fmt = StateFormat("remainder8", rounding="stochastic")
  w = jnp.full((100_000,), 1 + 2.0**-11 - 2.0**-20, jnp.float32)  # 127.5 of 256 parts of a last place above 1
  p, rest = fmts.encode_remainder(w, jnp.float16, fmt, fmts.noise(w.shape, jnp.uint32(3), jnp.uint32(0), 0).master)
  mean = np.asarray(fmts.decode_remainder(p, rest), np.float64).mean()
  assert abs(mean - float(w[0])) <= 4 * 2.0**-19 / np.sqrt(len(w))


def test_random_bits_differ_by_seed_step_leaf_part_and_position():
  """Equal bits for equal (seed, step, leaf); unrelated between seeds, leaves and parts, and in no step the same."""
  shape = (64, 64)
  draw = lambda seed, step, leaf: fmts.noise(shape, fmts.noise_key(seed), fmts.noise_phase(jnp.int32(step)), leaf)
  first = draw(0, 0, 0)
  table.assert_same_bits(first, draw(0, 0, 0))
  for step in (1, 2, 1000, 2**31 - 1):
    for a, b in zip(first, draw(0, step, 0), strict=True):
      assert (np.asarray(a) != np.asarray(b)).all()
  streams = [*first, draw(1, 0, 0).mu, draw(0, 0, 1).mu, draw(1, 1, 1).nu]
  for i, a in enumerate(streams):
    a = np.asarray(a, np.float64).ravel()
    assert abs(a.mean() / 2**32 - 0.5) < 0.02 and len(np.unique(a)) > 3500
    for b in streams[:i]:
      assert abs(np.corrcoef(a, np.asarray(b).ravel())[0, 1]) < 0.07
  assert abs(np.corrcoef(np.asarray(first.mu)[:, :-1].ravel(), np.asarray(first.mu)[:, 1:].ravel())[0, 1]) < 0.07


def test_random_bits_are_global_positions():
  """A slice of a leaf draws what the whole leaf draws there: what makes shards agree."""
  whole = fmts.scrambled_positions((8, 16, 32), fmts.noise_key(3), 2)
  flat = fmts.scrambled_positions((8 * 16 * 32,), fmts.noise_key(3), 2)
  np.testing.assert_array_equal(np.asarray(whole).ravel(), flat)
  assert len(np.unique(np.asarray(whole))) == whole.size


@pytest.mark.parametrize("part", fmts.Noise._fields)
def test_random_bits_of_an_element_are_spread_evenly_over_the_steps(part):
  """Of n steps on end, any interval of noise gets its share to within a few: random bits would be off by sqrt(n)."""
  n, shape = 1000, (32,)
  phases = fmts.noise_phase(jnp.arange(2**31 - n, 2**31 - 1, dtype=jnp.int32))
  draw = jax.vmap(lambda phase: getattr(fmts.noise(shape, fmts.noise_key(5), phase, 2), part))
  draws = np.sort(np.asarray(draw(phases), np.float64), axis=0) / 2**32
  even = (np.arange(len(draws)) + 0.5)[:, None] / len(draws)
  assert abs(draws - even).max() * len(draws) < 4


@pytest.mark.parametrize("name", table.DTYPES)
def test_a_name_for_nu_means_stochastic_rounding_where_nearest_stalls(name):
  """Dtypes, names and what callables return; a StateFormat, mu and masters keep to nearest."""
  wanted = "stochastic" if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2") else "nearest"
  leaf = jnp.ones((64, 128), jnp.bfloat16)
  for spec in (name, jnp.dtype(name), lambda path, leaf: name):
    formats = fmts.Formats(*(fmts.canonical_format(spec, part) for part in ("mu", "nu", "master")), 0).leaf((), leaf)
    assert (formats.mu.rounding, formats.nu.rounding, formats.master.rounding) == ("nearest", wanted, "nearest")
  explicit = StateFormat(name)
  assert fmts.canonical_format(explicit, "nu") == explicit and explicit.rounding == "nearest"


@pytest.mark.parametrize("part", fmts.Noise._fields)
def test_noise_of_one_position_says_little_about_that_of_another(part):
  """Correlations over 2^20 positions on end, at all distances at once."""
  n = 2**20
  noise = fmts.noise((n,), fmts.noise_key(4), fmts.noise_phase(jnp.int32(7)), 1)
  u = np.asarray(getattr(noise, part), np.float64) / 2**32 - 0.5
  assert abs(u.mean()) < 4 * np.sqrt(1 / 12 / n)
  spectrum = np.fft.rfft(u - u.mean(), 2 * n)
  distances = np.arange(n // 2)
  correlation = np.fft.irfft(np.abs(spectrum) ** 2)[: n // 2] / (n - distances) / u.var()
  assert abs(correlation[1:301]).max() < 0.008
  assert abs(correlation[1:]).max() < 0.1
