"""The error of every format of mu, nu and master, ours and others', against AdamW in float64.

Streams of gradients, synthetic ones and a recorded one, go through Adam with each part stored in each format, the other
parts exact, and through whole optimizers. Per stream and format:

- the error of m (rms, in units of sqrt(v)), of sqrt(v) and of 1 / (sqrt(v) + eps) (rms, relative), of what is stored,
  over the last three quarters of the steps;
- the share of elements that are flushed to zero or saturated;
- the displacement: rms distance between where the parameters end and where float64 ends, over float64's own rms
  displacement. What a step does is computed before its state is rounded, as in the real step.

The others' formats are written here from their papers' formulas. It takes a few minutes on two cores:

    python benchmarks/formats.py
    python benchmarks/formats.py --b2 0.95 --plot docs/formats_error_b2_0.95.png
    python benchmarks/formats.py --steps 200 --streams stationary drop
    python benchmarks/formats.py --markdown  # from the result files: the tables of docs/numerics.md
"""

import argparse
from collections.abc import Callable
import functools
import json
import pathlib
import sys
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
from matplotlib import figure
import numpy as np
import optax

from optax_lowprec import formats
from optax_lowprec import StateFormat

ROOT = pathlib.Path(__file__).parent.parent
SHAPE = (64, 128)
B1, EPS = 0.9, 1e-8
LEARNING_RATE = 1e-5  # of the master's rows; the moments' rows do not depend on it
EVERY = 50  # steps between two measurements

Array = jax.Array


class Stored(NamedTuple):
  """What comes back from a format, and the largest magnitude that it could have held there."""

  value: Array
  top: Array


# A format: values, 16 random bits each as a fraction in [0, 1) (the same for all formats), step -> what is stored.
Quantize = Callable[[Array, Array, Array], Stored]

# --- building blocks ------------------------------------------------------------------------------------------------


def grouped(x: Array, size: int | None) -> Array:
  """Groups of consecutive elements, as rows; None: the whole tensor."""
  return x.reshape(-1, size or x.size)


def absmax(x: Array) -> Array:
  return jnp.max(jnp.abs(x), axis=1, keepdims=True)


def ratio(x: Array, y: Array) -> Array:
  return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)


def hashed(t: Array) -> Array:
  """A fraction for each element by a new hash in every step, not by the package's noise."""
  bits = formats.mix(formats.scrambled_positions(SHAPE, formats.mix(jnp.uint32(12345) + t.astype(jnp.uint32)), 0))
  return (bits >> 16).astype(jnp.float32) * np.float32(2.0**-16)


def rounded(y: Array, rounding: str, u: Array, t: Array) -> Array:
  """To an integer."""
  if rounding == "nearest":
    return jnp.round(y)
  u = hashed(t) if rounding == "hashed" else u
  return jnp.floor(y + u.reshape(y.shape))


def minifloat(x: Array, mantissa: int, min_exponent: int, rounding: str, u: Array, t: Array) -> Array:
  """To ``mantissa`` bits, subnormals below 2^min_exponent."""
  _, exponent = jnp.frexp(x)
  unit = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 1, min_exponent) - mantissa)
  return jnp.sign(x) * rounded(jnp.abs(x) / unit, rounding, u, t) * unit


def never_zero(x: Array, q: Array, least: Array) -> Array:
  return jnp.where((x > 0) & (q == 0), least, q)


# --- ours -----------------------------------------------------------------------------------------------------------


def ours(fmt: StateFormat, positive: bool = False, new_hash: bool = False) -> Quantize:
  """The package's own codec. ``new_hash``: with another noise than its own, a new hash in every step."""

  def quantize(x, u, t):
    noise = (hashed(t) if new_hash else u) * 65536
    q, scale = formats.encode(x, fmt, positive=positive, noise32=noise.astype(jnp.uint32) << 16)
    value = formats.decode(q, scale, fmt)
    if fmt.scaling is None:
      return Stored(value, jnp.float32(fmt.float.max))
    top = formats.expand_scale(scale, x.shape, fmt) * fmt.float.max
    return Stored(value, top * top if fmt.transform == "sqrt" else top)

  return quantize


# --- candidates -----------------------------------------------------------------------------------------------------


def small_float(
    mantissa: int, min_exponent: int, top: float, size: int | None = 128, *,
    root: int = 1, rounding: str = "nearest", power_of_two: bool = False,
) -> Quantize:  # fmt: skip
  """A scaled float of any split of its bits; ``root``: of which root of a nonnegative value."""

  def quantize(x, u, t):
    y = grouped(x if root == 1 else x ** (1 / root), size)
    scale = absmax(y) / top
    if power_of_two:  # e8m0: the next power of two up
      scale = jnp.where(scale > 0, jnp.exp2(jnp.ceil(jnp.log2(jnp.where(scale > 0, scale, 1)))), 0)
    q = jnp.minimum(minifloat(ratio(y, scale), mantissa, min_exponent, rounding, u, t), top)
    if root != 1:
      q = never_zero(y, q, 2.0 ** (min_exponent - mantissa))
    value = jnp.abs(q * scale) ** root if root != 1 else q * scale
    held = jnp.broadcast_to((scale * top) ** root, y.shape)
    return Stored(value.reshape(x.shape), held.reshape(x.shape))

  return quantize


def integer(levels: int, size: int, *, root: int = 1, positive: bool = True, rounding: str = "nearest") -> Quantize:
  """Equally spaced codes of a root of a value, with its sign."""

  def quantize(x, u, t):
    y = grouped(jnp.sign(x) * jnp.abs(x) ** (1 / root), size)
    scale = absmax(y) / levels
    q = jnp.sign(y) * rounded(jnp.abs(ratio(y, scale)), rounding, u, t)
    if positive:
      q = never_zero(y, q, 1.0)
    value = jnp.sign(q) * jnp.abs(q * scale) ** root
    return Stored(value.reshape(x.shape), jnp.full(x.shape, jnp.inf))

  return quantize


def logarithmic(octaves: float, size: int, rounding: str = "nearest") -> Quantize:
  """255 codes of sqrt(v) at equal ratios below the group's maximum, and one for zero."""

  def quantize(x, u, t):
    y = grouped(jnp.sqrt(x), size)
    top = absmax(y)
    relative = jnp.maximum(ratio(y, top), 2.0**-octaves)
    position = (jnp.log2(relative) / octaves + 1) * 254
    step = np.log(2.0) * octaves / 254
    low = jnp.floor(position)
    # The probability that makes sqrt(v) unbiased, not its logarithm.
    fraction = jnp.expm1((position - low) * step) / np.expm1(step)
    code = jnp.round(position) if rounding == "nearest" else low + rounded(fraction, rounding, u, t)
    value = jnp.where(y > 0, top * jnp.exp2((code / 254 - 1) * octaves), 0)
    return Stored((value * value).reshape(x.shape), jnp.full(x.shape, jnp.inf))

  return quantize


# --- others', from their formulas -----------------------------------------------------------------------------------


def transformer_engine(x: Array, u: Array, t: Array) -> Stored:
  """FusedAdam's fp8 state: e4m3 with one scale, absmax / 448, for the tensor; m and v alike."""
  return small_float(3, -6, 448.0, None)(x, u, t)


def half_tensor(x: Array, u: Array, t: Array) -> Stored:
  """Float16 with one scale for the tensor: FP8-LM's second moment and master (arXiv:2310.18313)."""
  return ours(StateFormat("float16", "tensor"))(x, u, t)


def flash_m(x: Array, u: Array, t: Array) -> Stored:
  """FlashOptim's m (arXiv:2602.23349): 2x / (1 + |x|) of x over the absmax of 32, in int8; the scale is a float16."""
  y = grouped(x, 32)
  scale = absmax(y).astype(jnp.float16).astype(jnp.float32)
  y = jnp.clip(ratio(y, scale), -1, 1)
  q = jnp.round(2 * y / (1 + jnp.abs(y)) * 127) / 127
  value = q / (2 - jnp.abs(q)) * scale
  return Stored(value.reshape(x.shape), jnp.broadcast_to(scale, y.shape).reshape(x.shape))


def flash_v(x: Array, u: Array, t: Array) -> Stored:
  """FlashOptim's v: its square root over the absmax of 32, in uint8; the scale is a float16."""
  y = grouped(jnp.sqrt(x), 32)
  scale = absmax(y).astype(jnp.float16).astype(jnp.float32)
  q = jnp.round(jnp.clip(ratio(y, scale), 0, 1) * 255) / 255
  value = (q * scale) ** 2
  return Stored(value.reshape(x.shape), jnp.broadcast_to(scale**2, y.shape).reshape(x.shape))


def dynamic_map(signed: bool) -> np.ndarray:
  """The codes of dynamic quantization (arXiv:2110.02861): decades, each with twice the codes of the one below it."""
  codes = [0.0, 1.0]
  for decade in range(7):
    edges = np.linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1)
    means = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
    codes += [*means, *(-means if signed else [])]
  assert len(codes) == 256
  return np.sort(np.asarray(codes)).astype(np.float32)


def bitsandbytes(signed: bool, size: int = 256) -> Quantize:
  """Its 8-bit Adam: the nearest code of the dynamic map of x over its block's absmax; blocks of 256."""
  codes = dynamic_map(signed)
  edges = jnp.asarray((codes[1:] + codes[:-1]) / 2)

  def quantize(x, u, t):
    y = grouped(x, size)
    scale = absmax(y)
    index = jnp.searchsorted(edges, ratio(y, scale), method="scan_unrolled")
    value = jnp.asarray(codes)[index] * scale
    return Stored(value.reshape(x.shape), jnp.broadcast_to(scale, y.shape).reshape(x.shape))

  return quantize


def coat(x: Array, u: Array, t: Array) -> Stored:
  """COAT (arXiv:2410.19313): groups of 128, sign(x) |x|^k in e4m3, k such that the group's range becomes e4m3's.

  k = log(448 * 2^9) / log(max / min), in sixteenths, of x over sqrt(max * min).
  """
  y = grouped(x, 128)
  a = jnp.abs(y)
  largest = jnp.maximum(absmax(y), 1e-30)
  least = jnp.clip(jnp.min(jnp.where(a > 0, a, jnp.inf), axis=1, keepdims=True), 1e-30, largest)
  spread = jnp.maximum(jnp.log2(largest) - jnp.log2(least), 1e-3)
  k = jnp.clip(jnp.floor(np.log2(448.0 * 2**9) / spread * 16) / 16, 1 / 16, 16)
  # Of x over its maximum instead of over sqrt(max * min): the same codes, and no overflow.
  z = jnp.where(a > 0, (jnp.where(a > 0, a, 1) / largest) ** k, 0) * 448
  q = minifloat(z, 3, -6, "nearest", u, t)
  value = jnp.sign(y) * jnp.where(q > 0, (q / 448) ** (1 / k), 0) * largest
  return Stored(value.reshape(x.shape), jnp.full(x.shape, jnp.inf))


# --- the tables -----------------------------------------------------------------------------------------------------

E4M3 = functools.partial(StateFormat, "float8_e4m3fn")
E5M2 = functools.partial(StateFormat, "float8_e5m2")
ROOT_E4M3 = functools.partial(E4M3, transform="sqrt")
ROUNDINGS = NEAREST, STOCHASTIC, HASHED = "nearest", "stochastic", "hashed"


def roundings(fmt: Callable[..., StateFormat], positive: bool = False) -> dict[str, Quantize]:
  return {
      "nearest": ours(fmt(), positive),
      "stochastic": ours(fmt(rounding="stochastic"), positive),
      "hashed": ours(fmt(rounding="stochastic"), positive, new_hash=True),
  }


def name_all(prefix: str, rows: dict[str, Quantize]) -> dict[str, Quantize]:
  return {f"{prefix}, {k}": v for k, v in rows.items()}


class Table(NamedTuple):
  """Formats of one part, by kind."""

  ours: dict[str, Quantize]
  candidates: dict[str, Quantize]
  others: dict[str, Quantize]

  @property
  def all(self) -> dict[str, Quantize]:
    return {**self.ours, **self.candidates, **self.others}


MU = Table(
    ours={
        **name_all("e4m3 b128", roundings(E4M3)),
        "e4m3 b64, nearest": ours(E4M3(block_size=64)),
        "e4m3 b32, nearest": ours(E4M3(block_size=32)),
        "e4m3 tensor, nearest": ours(E4M3(scaling="tensor")),
        "e5m2 b128, nearest": ours(E5M2()),
        "float16 b128, nearest": ours(StateFormat("float16")),
        "bfloat16, nearest": ours(StateFormat("bfloat16", None)),
        "float32": ours(StateFormat("float32", None)),
    },
    candidates={
        "e4m3 b128 e8m0 scale, nearest": small_float(3, -6, 448.0, power_of_two=True),
        "e3m4 b128, nearest": small_float(4, -2, 15.5),
        "e3m4 b128, stochastic": small_float(4, -2, 15.5, rounding=STOCHASTIC),
        "int8 b128, nearest": integer(127, 128, positive=False),
        "sqrt int8 b128, nearest": integer(127, 128, root=2, positive=False),
        "sqrt int8 b128, stochastic": integer(127, 128, root=2, positive=False, rounding=STOCHASTIC),
    },
    others={
        "TransformerEngine e4m3 tensor": transformer_engine,
        "FlashOptim int8 softsign b32": flash_m,
        "bitsandbytes dynamic b256": bitsandbytes(True),
        "COAT e4m3 b128": coat,
    },
)
NU = Table(
    ours={
        **name_all("sqrt e4m3 b128", roundings(ROOT_E4M3, True)),
        **name_all("sqrt e4m3 b32", roundings(functools.partial(ROOT_E4M3, block_size=32), True)),
        "sqrt e4m3 b64, nearest": ours(ROOT_E4M3(block_size=64), True),
        "sqrt e4m3 tensor, nearest": ours(ROOT_E4M3(scaling="tensor"), True),
        "e4m3 b128, nearest": ours(E4M3(), True),
        "sqrt e5m2 b128, nearest": ours(E5M2(transform="sqrt"), True),
        "sqrt e5m2 b128, stochastic": ours(E5M2(transform="sqrt", rounding="stochastic"), True),
        **name_all("float16 b128", roundings(functools.partial(StateFormat, "float16"), True)),
        "bfloat16, nearest": ours(StateFormat("bfloat16", None), True),
        "bfloat16, stochastic": ours(StateFormat("bfloat16", None, rounding="stochastic"), True),
        "float32": ours(StateFormat("float32", None), True),
    },
    candidates={
        "sqrt e4m3 b128 e8m0 scale, nearest": small_float(3, -6, 448.0, root=2, power_of_two=True),
        "sqrt e4m3 b128 e8m0 scale, stochastic": small_float(
            3, -6, 448.0, root=2, power_of_two=True, rounding=STOCHASTIC
        ),
        **{f"sqrt ue4m4 b128, {r}": small_float(4, -6, 496.0, root=2, rounding=r) for r in ROUNDINGS},
        **{f"sqrt ue3m5 b128, {r}": small_float(5, -2, 31.5, root=2, rounding=r) for r in ROUNDINGS},
        **{f"sqrt uint8 b128, {r}": integer(255, 128, root=2, rounding=r) for r in (NEAREST, STOCHASTIC)},
        **{f"4th root uint8 b128, {r}": integer(255, 128, root=4, rounding=r) for r in ROUNDINGS},
        "sqrt ue3m5 b32, stochastic": small_float(5, -2, 31.5, 32, root=2, rounding=STOCHASTIC),
        "4th root uint8 b32, stochastic": integer(255, 32, root=4, rounding=STOCHASTIC),
        "4th root e4m3 b128, nearest": small_float(3, -6, 448.0, root=4),
        **{f"sqrt log8 12 octaves b128, {r}": logarithmic(12.0, 128, r) for r in ROUNDINGS},
    },
    others={
        "TransformerEngine e4m3 tensor": transformer_engine,
        "FP8-LM float16 tensor": half_tensor,
        "FlashOptim uint8 sqrt b32": flash_v,
        "bitsandbytes dynamic b256": bitsandbytes(False),
        "COAT e4m3 b128": coat,
    },
)
# Whole optimizers: mu and nu.
PAIRS = {
    "ours: default": ("e4m3 b128, nearest", "sqrt e4m3 b128, stochastic"),
    "ours: both nearest": ("e4m3 b128, nearest", "sqrt e4m3 b128, nearest"),
    "ours: both stochastic": ("e4m3 b128, stochastic", "sqrt e4m3 b128, stochastic"),
    "candidate: default, but a new hash in every step": ("e4m3 b128, nearest", "sqrt e4m3 b128, hashed"),
    **{
        f"candidate: mu {m}, nu {n} {r}": (f"{m} b128, nearest", f"{n} b128, {r}")
        for m, n in (
            ("e4m3", "sqrt ue4m4"),
            ("e4m3", "4th root uint8"),
            ("e3m4", "sqrt ue3m5"),
            ("e3m4", "4th root uint8"),
            ("sqrt int8", "4th root uint8"),
        )
        for r in (STOCHASTIC, HASHED)
    },
    "ours: nu float16": ("e4m3 b128, nearest", "float16 b128, nearest"),
    "ours: float16": ("float16 b128, nearest", "float16 b128, nearest"),
    "TransformerEngine fp8": ("TransformerEngine e4m3 tensor", "TransformerEngine e4m3 tensor"),
    "FP8-LM": ("TransformerEngine e4m3 tensor", "FP8-LM float16 tensor"),
    "FlashOptim": ("FlashOptim int8 softsign b32", "FlashOptim uint8 sqrt b32"),
    "bitsandbytes": ("bitsandbytes dynamic b256", "bitsandbytes dynamic b256"),
    "COAT": ("COAT e4m3 b128", "COAT e4m3 b128"),
    "optax mu_dtype=bfloat16": ("bfloat16, nearest", "float32"),
}

# --- masters --------------------------------------------------------------------------------------------------------

Master = Callable[[Array, Array, Array], Array]  # float32 value, fraction, step -> what the next step starts from


def remainder(name: str, rounding: str) -> Master:
  fmt = StateFormat(name, rounding="nearest" if rounding == NEAREST else "stochastic")

  def quantize(w, u, t):
    noise = ((hashed(t) if rounding == HASHED else u) * 65536).astype(jnp.uint32) << 16
    return formats.decode_remainder(*formats.encode_remainder(w, jnp.bfloat16, fmt, noise))

  return quantize


def flash_master(w: Array, u: Array, t: Array) -> Array:
  """FlashOptim's: the bfloat16 parameter and its rounding error over half of its last place, in int8."""
  p = formats.decode(formats.cast_to(w, jnp.bfloat16), jnp.zeros(()), StateFormat("bfloat16", None))
  _, exponent = jnp.frexp(p)
  half = jnp.ldexp(jnp.float32(1), exponent - 1 - 8)
  return p + jnp.round(jnp.clip((w - p) / half, -1, 1) * 127) / 127 * half


def stored(quantize: Quantize) -> Master:
  return lambda w, u, t: quantize(w, u, t).value


MASTERS: dict[str, Master] = {
    "float32": lambda w, u, t: w,
    "remainder16": remainder("remainder16", NEAREST),
    **{f"remainder8, {r}": remainder("remainder8", r) for r in ROUNDINGS},
    **{k: stored(q) for k, q in name_all("float16 b128", roundings(functools.partial(StateFormat, "float16"))).items()},
    "none: bfloat16, nearest": stored(ours(StateFormat("bfloat16", None))),
    "none: bfloat16, stochastic": stored(ours(StateFormat("bfloat16", None, rounding="stochastic"))),
    "FP8-LM float16 tensor": stored(half_tensor),
    "FlashOptim int8 residual": flash_master,
}

# --- streams --------------------------------------------------------------------------------------------------------


def spread(rng: np.random.Generator) -> np.ndarray:
  """Standard deviations: rows and single coordinates differ log-normally."""
  return 1e-3 * np.exp(rng.normal(size=(SHAPE[0], 1)) + 0.7 * rng.normal(size=SHAPE))


def stationary(rng: np.random.Generator, steps: int) -> np.ndarray:
  return rng.normal(size=(steps, *SHAPE)) * spread(rng)


def drop(rng: np.random.Generator, steps: int) -> np.ndarray:
  """All gradients become 20 times smaller half way."""
  return stationary(rng, steps) * np.where(np.arange(steps) < steps // 2, 1.0, 0.05)[:, None, None]


def sparse(rng: np.random.Generator, steps: int) -> np.ndarray:
  """Rows that are zero but for one step in ten to one in a thousand, as an embedding's."""
  chance = 10.0 ** -np.linspace(1, 3, SHAPE[0])
  return stationary(rng, steps) * (rng.random((steps, SHAPE[0])) < chance)[..., None]


def heavy(rng: np.random.Generator, steps: int) -> np.ndarray:
  """Student's t with 3 degrees of freedom."""
  return rng.standard_t(3, size=(steps, *SHAPE)) * spread(rng)


def correlated(rng: np.random.Generator, steps: int) -> np.ndarray:
  """Rows that go up and down together and persist for some 20 steps, on top of a little noise."""
  factor = np.zeros((steps, SHAPE[0]))
  kicks = rng.normal(size=factor.shape) * np.sqrt(1 - 0.95**2)
  for t in range(1, steps):
    factor[t] = 0.95 * factor[t - 1] + kicks[t]
  direction = rng.normal(size=SHAPE)
  return (factor[..., None] * direction + 0.3 * rng.normal(size=(steps, *SHAPE))) * spread(rng)


def drifting(rng: np.random.Generator, steps: int) -> np.ndarray:
  """Single coordinates fall by 20 or rise by 5 after a fifth of the steps, while their block's maximum stays."""
  column = np.arange(SHAPE[1])
  factor = np.asarray([1.0, 0.05, 5.0])[column % 3]
  scale = np.where(column % 64 == 0, 4e-3, 2e-4 * np.exp(0.7 * rng.normal(size=SHAPE)))
  late = (np.arange(steps) >= steps // 5)[:, None] & (column % 64 != 0)
  return rng.normal(size=(steps, *SHAPE)) * scale * np.where(late, factor, 1.0)[:, None]


def wide(rng: np.random.Generator, steps: int) -> np.ndarray:
  """Standard deviations over five decades within every block."""
  return rng.normal(size=(steps, *SHAPE)) * 10.0 ** rng.uniform(-7, -2, SHAPE)


SYNTHETIC = {f.__name__: f for f in (stationary, drop, sparse, heavy, correlated, drifting, wide)}
RECORDED = {  # leaf -> which rows
    "recorded embedding": ("tokens", "embedding", slice(48, 112)),
    "recorded query": ("block_0", "query", "kernel", slice(0, 64)),
    "recorded down": ("block_1", "down", "kernel", slice(0, 64)),
}


def record(steps: int) -> dict[str, np.ndarray]:
  """Gradients of a few leaves of the transformer of examples/train_lm.py, trained on real text with optax.adamw."""
  sys.path.insert(0, str(ROOT / "examples"))
  import train_lm

  model = train_lm.Transformer(width=128, depth=2, length=64)
  text, _ = train_lm.read_texts()
  rng = np.random.default_rng(0)
  batches = train_lm.windows(text, rng.integers(len(text) - 65, size=(steps, 8)), 65)
  params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 64), jnp.int32))["params"]
  tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, max(1, steps // 10), steps))

  def pick(grads, path):
    *keys, rows = path
    for key in keys:
      grads = grads[key]
    return grads.reshape(-1, SHAPE[1])[rows]

  @jax.jit
  def run(params):
    def step(carry, batch):
      params, state = carry
      grads = jax.grad(train_lm.loss_fn)(params, model.apply, batch)
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), {k: pick(grads, p) for k, p in RECORDED.items()}

    return jax.lax.scan(step, (params, tx.init(params)), batches)[1]

  return {k: np.asarray(g) for k, g in run(params).items()}


# --- running --------------------------------------------------------------------------------------------------------


class Carry(NamedTuple):
  """The exact state, that of each format, and how far the parameters went with each."""

  m: Array
  v: Array
  moved: Array
  mu: dict[str, Array]
  nu: dict[str, Array]
  master: dict[str, Array]
  displaced: dict[str, Array]
  counts: dict[str, Array]  # elements flushed and saturated, over all steps


def initial(start: np.ndarray) -> Carry:
  zeros = lambda dtype=jnp.float32: jnp.zeros(SHAPE, dtype)
  names = [f"mu: {k}" for k in MU.all] + [f"nu: {k}" for k in NU.all] + [f"pair: {k}" for k in PAIRS]
  return Carry(
      zeros(jnp.float64),
      zeros(jnp.float64),
      zeros(jnp.float64),
      {k: zeros() for k in MU.all},
      {k: zeros() for k in NU.all},
      {k: jnp.asarray(start, jnp.float32) for k in MASTERS},
      {k: zeros(jnp.float64) for k in names},
      {f"{part}: {k}": jnp.zeros(2) for part, t in (("mu", MU), ("nu", NU)) for k in t.all},
  )


def step(b2: float, carry: Carry, inputs: tuple[Array, Array]) -> tuple[Carry, None]:
  t, g = inputs
  count = (t + 1).astype(jnp.float64)
  c1, c2 = 1 - B1**count, 1 - b2**count
  g64 = g.astype(jnp.float64)
  m = B1 * carry.m + (1 - B1) * g64
  v = b2 * carry.v + (1 - b2) * g64 * g64
  direction = lambda m, v: (m / c1) / (jnp.sqrt(v / c2) + EPS)
  exact = direction(m, v)
  random = formats.noise(SHAPE, formats.noise_key(0), formats.noise_phase(t), 0)
  fraction = lambda bits: (bits >> 16).astype(jnp.float32) * np.float32(2.0**-16)
  displaced, counts = {}, {}

  def store(part, quantizers, new, u):
    kept = {}
    for k, quantize in quantizers.items():
      x = new[k]
      value, top = quantize(x, u, t)
      kept[k] = value.astype(jnp.float32)
      flushed = jnp.mean((x != 0) & (value == 0))
      saturated = jnp.mean(jnp.abs(x) > top * 1.0001)
      counts[f"{part}: {k}"] = carry.counts[f"{part}: {k}"] + jnp.stack([flushed, saturated])
    return kept

  new_m = {k: np.float32(B1) * x + np.float32(1 - B1) * g for k, x in carry.mu.items()}
  new_v = {k: np.float32(b2) * x + np.float32(1 - b2) * (g * g) for k, x in carry.nu.items()}
  for k, x in new_m.items():
    displaced[f"mu: {k}"] = direction(x.astype(jnp.float64), v)
  for k, x in new_v.items():
    displaced[f"nu: {k}"] = direction(m, x.astype(jnp.float64))
  for k, (a, b) in PAIRS.items():
    displaced[f"pair: {k}"] = direction(new_m[a].astype(jnp.float64), new_v[b].astype(jnp.float64))
  update = np.float32(LEARNING_RATE) * exact.astype(jnp.float32)
  masters = {k: MASTERS[k](w - update, fraction(random.master), t) for k, w in carry.master.items()}
  new = Carry(
      m,
      v,
      carry.moved + exact,
      store("mu", MU.all, new_m, fraction(random.mu)),
      store("nu", NU.all, new_v, fraction(random.nu)),
      masters,
      {k: carry.displaced[k] + x for k, x in displaced.items()},
      counts,
  )
  return new, None


@functools.partial(jax.jit, static_argnums=0)
def run_chunk(b2: float, carry: Carry, start: Array, grads: Array) -> Carry:
  return jax.lax.scan(functools.partial(step, b2), carry, (start + jnp.arange(EVERY, dtype=jnp.int32), grads))[0]


def rms(x: Any) -> float:
  return float(np.sqrt(np.mean(np.square(x)))) if np.size(x) else 0.0


def measure(grads: np.ndarray, b2: float) -> dict[str, dict[str, float]]:
  """All formats over one stream."""
  steps = len(grads) // EVERY * EVERY
  start = np.random.default_rng(7).normal(0, 0.02, SHAPE)
  start = np.asarray(jnp.asarray(start, jnp.bfloat16), np.float64)
  carry = initial(start)
  squares: dict[str, list[float]] = {}
  for first in range(0, steps, EVERY):
    carry = run_chunk(b2, carry, jnp.int32(first), jnp.asarray(grads[first : first + EVERY], jnp.float32))
    if first + EVERY <= steps // 4:
      continue
    m, v = np.asarray(carry.m), np.asarray(carry.v)
    seen = v > 0
    root = np.sqrt(v[seen])
    add = lambda key, error: squares.setdefault(key, []).append(float(np.mean(np.square(error))))
    for k, x in carry.mu.items():
      add(f"mu: {k}/m", (np.asarray(x, np.float64) - m)[seen] / root)
    for k, x in carry.nu.items():
      mine = np.sqrt(np.maximum(np.asarray(x, np.float64)[seen], 0))
      add(f"nu: {k}/root", mine / root - 1)
      add(f"nu: {k}/inverse", (root + EPS) / (mine + EPS) - 1)
  errors = {k: float(np.sqrt(np.mean(x))) for k, x in squares.items()}
  moved = np.asarray(carry.moved)
  rows: dict[str, dict[str, float]] = {}
  for key, x in carry.displaced.items():
    row = rows.setdefault(key, {})
    row["displacement"] = rms(np.asarray(x) - moved) / rms(moved)
    if key in carry.counts:
      row["flushed"], row["saturated"] = (float(c) / steps for c in carry.counts[key])
    row |= {what: errors[f"{key}/{what}"] for what in ("m", "root", "inverse") if f"{key}/{what}" in errors}
  for key, w in carry.master.items():
    right = start - LEARNING_RATE * moved
    rows[f"master: {key}"] = {"displacement": rms(np.asarray(w, np.float64) - right) / rms(LEARNING_RATE * moved)}
  return rows


# --- output ---------------------------------------------------------------------------------------------------------


def kinds(part: str) -> dict[str, str]:
  """The rows of a part and whose they are."""
  if part in ("mu", "nu"):
    table = MU if part == "mu" else NU
    rows = dict.fromkeys(table.ours, "ours") | dict.fromkeys(table.candidates, "candidate")
    rows |= dict.fromkeys(table.others, "other")
  elif part == "pair":
    rows = {k: "ours" if k.startswith("ours") else "other" for k in PAIRS}
  else:
    rows = {k: "other" if k.startswith(("FP8", "Flash")) else "ours" for k in MASTERS}
  # A new hash in every step is not in the package.
  return {k: "candidate" if k.startswith("candidate") or k.endswith(HASHED) else kind for k, kind in rows.items()}


def rows_of(part: str, results: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
  """One row for each format: errors over all streams (rms; shares: the largest), displacement for each stream."""
  rows = []
  for name, kind in kinds(part).items():
    each = [r[f"{part}: {name}"] for r in results.values()]
    row: dict[str, Any] = {part: name, "whose": kind}
    for column, what in (("m", "m"), ("sqrt(v)", "root"), ("1/(sqrt(v)+eps)", "inverse")):
      if what in each[0]:
        row[column] = rms([x[what] for x in each])
    for what in ("flushed", "saturated"):
      if what in each[0]:
        row[what] = max(x[what] for x in each)
    row |= {stream: r[f"{part}: {name}"]["displacement"] for stream, r in results.items()}
    row["all displacements"] = rms([x["displacement"] for x in each])
    rows.append(row)
  return rows


def short(row: dict[str, Any]) -> dict[str, Any]:
  return {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()}


# The columns of the tables in docs/numerics.md, behind a row's name and whose it is.
SHARES = ["flushed", "saturated"]
DOC_COLUMNS = {
    "pair": [*SYNTHETIC, "recorded", "all"],
    "nu": ["sqrt(v)", "1/(sqrt(v)+eps)", *SHARES, "stationary", "drifting", "wide", "recorded", "all"],
    "mu": ["m", *SHARES, "stationary", "wide", "recorded", "all"],
    "master": ["stationary", "drop", "sparse", "recorded", "all"],
}


def doc_number(x: float) -> str:
  if x == 0:
    return "0"
  if x < 1e-5:
    return "<1e-5"
  if x < 1e-4:
    return f"{x:.0e}"
  if x < 1:
    return f"{x:.4f}" if x < 0.01 else f"{x:.3f}"
  return f"{x:#.3g}" if x < 100 else f"{float(f'{x:.3g}'):.0f}"


def doc_table(part: str, rows: list[dict[str, Any]]) -> str:
  """The closest over all streams first; the recorded streams in one column, the rms of them."""
  heading = "mu and nu" if part == "pair" else part
  lines = []
  for row in sorted(rows, key=lambda r: r["all displacements"]):
    row = row | {"all": row["all displacements"], "recorded": rms([row[k] for k in RECORDED])}
    name = row[part].removeprefix("ours: ").removeprefix("candidate: ")
    lines.append({heading: name, "whose": row["whose"], **{c: doc_number(row[c]) for c in DOC_COLUMNS[part]}})
  return common.markdown(lines)


def rewrite_docs(out: str | None) -> None:
  """Writes the tables of docs/numerics.md from the result files."""
  folder = pathlib.Path(out) if out else common.RESULTS
  read = lambda name: json.loads((folder / f"{name}.json").read_text())["rows"]
  tables = {part: doc_table(part, rows) for part, rows in read("formats").items()}
  tables["pair, b2 = 0.95"] = doc_table("pair", read("formats_b2_0.95")["pair"])
  common.rewrite("numerics.md", tables)


def plot(tables: dict[str, list[dict[str, Any]]], streams: list[str], path: pathlib.Path) -> None:
  """Displacement error of every format: a dot for each stream, a bar for all together."""
  parts = {"pair": "whole optimizers (mu and nu)", "nu": "nu alone", "mu": "mu alone", "master": "master alone"}
  heights = [len(tables[p]) + 2 for p in parts]
  fig = figure.Figure(figsize=(11, 0.22 * sum(heights) + 1), layout="constrained")
  colors = {"ours": "tab:blue", "candidate": "tab:green", "other": "tab:red"}
  markers = "osD^v<>Pp*X"
  for axes, (part, title) in zip(fig.subplots(len(parts), height_ratios=heights), parts.items(), strict=True):
    rows = sorted(tables[part], key=lambda r: r["all displacements"], reverse=True)
    for y, row in enumerate(rows):
      color = colors[row["whose"]]
      axes.plot([row["all displacements"]], [y], marker="|", markersize=11, markeredgewidth=3, color=color)
      for marker, stream in zip(markers, streams, strict=False):
        axes.plot(
            [np.clip(row[stream], 1.1e-4, 9e2)],
            [y],
            marker=marker,
            markersize=3.5,
            color=color,
            alpha=0.55,
            linestyle="",
        )
    axes.set_yticks(range(len(rows)), [r[part] for r in rows], fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(1e-4, 1e3)
    axes.set_ylim(-1, len(rows))
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=9)
  axes.set_xlabel("displacement error: rms distance to float64 AdamW over its rms displacement")
  key = functools.partial(axes.plot, [], [], linestyle="")
  handles = [key(marker="|", color=c, markeredgewidth=3, label=k)[0] for k, c in colors.items()]
  handles += [key(marker=m, color="gray", markersize=4, label=s)[0] for m, s in zip(markers, streams, strict=False)]
  fig.legend(handles=handles, ncol=5, fontsize=7, loc="outside lower center")
  path.parent.mkdir(parents=True, exist_ok=True)
  fig.savefig(path, dpi=110)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=int, default=2000, help="of the synthetic streams, in fifties")
  parser.add_argument("--recorded-steps", type=int, default=600, help="of the recorded one; 0: none")
  parser.add_argument("--streams", nargs="*", default=list(SYNTHETIC), choices=SYNTHETIC, help="synthetic ones")
  parser.add_argument("--b2", type=float, default=0.999)
  parser.add_argument("--plot", type=pathlib.Path, default=ROOT / "docs" / "formats_error.png")
  args = common.parse_or_rewrite(parser, rewrite_docs)
  if args is None:
    return
  recorded = record(args.recorded_steps) if args.recorded_steps else {}
  jax.config.update("jax_enable_x64", True)
  streams = {name: SYNTHETIC[name](np.random.default_rng(1), args.steps).astype(np.float32) for name in args.streams}
  results = {}
  for name, grads in {**streams, **recorded}.items():
    print(f"{name}: {len(grads)} steps", flush=True)
    results[name] = measure(grads, args.b2)
  tables = {part: rows_of(part, results) for part in ("mu", "nu", "master", "pair")}
  for rows in tables.values():
    print("\n" + common.table([short(r) for r in rows], list(rows[0])))
  plot(tables, list(results), args.plot)
  name = "formats" if args.b2 == 0.999 else f"formats_b2_{args.b2:g}"
  print(f"plot: {args.plot.name}; written to {common.write(name, tables, args.out).name}")


if __name__ == "__main__":
  main()
