"""The tables of the suite: trees, storage formats and their tolerances, optimizers. A new one is a row here."""

import contextlib
import dataclasses
import functools
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowprec as olp
from optax_lowprec import StateFormat

# --- trees ----------------------------------------------------------------------------------------------------------

SHAPES = {
    "scalar": (),
    "one": (1,),
    "bias": (7,),
    "short": (5, 3),
    "ragged": (64, 257),
    "conv": (3, 3, 16, 32),
    "empty": (0,),
    "matrix": (4096, 128),
}
# The same kinds of leaves, small: for tests where the sizes do not matter and compile time does.
SMALL_SHAPES = {"scalar": (), "short": (5, 3), "ragged": (4, 257), "empty": (0,)}
_SMALL_LEAVES = 64  # elements: leaves below are judged together


def tree(shapes: dict[str, tuple[int, ...]] | None = None, dtype: Any = jnp.float32, seed: int = 0) -> dict[str, Any]:
  """Normal parameters. ``dtype`` may be a function of the leaf's number."""
  shapes = SHAPES if shapes is None else shapes
  rng = np.random.default_rng(seed)
  dtype_of = (
      dtype if callable(dtype) and not isinstance(dtype, type) and not hasattr(dtype, "dtype") else lambda i: dtype
  )
  return {k: jnp.asarray(rng.normal(size=s).astype(np.float32), dtype_of(i)) for i, (k, s) in enumerate(shapes.items())}


class Gradients:
  """Gradients that do not depend on the parameters: float32 values that numpy and XLA compute alike.

  Step t is one of three normal bases times an amplitude that swings and falls, so that a wrong b1 or b2 shows.
  ``scales`` gives a leaf gradients so large that eps plays no part, or so small that it does.
  """

  def __init__(self, shapes: dict[str, tuple[int, ...]], scale: float = 1.0, scales: dict[str, float] | None = None,
               seed: int = 1):  # fmt: skip
    rng = np.random.default_rng(seed)
    size = lambda k: np.float32((scales or {}).get(k, 1.0))
    self.bases = {k: rng.normal(size=(3, *s)).astype(np.float32) * size(k) for k, s in shapes.items()}
    t = np.arange(200)
    self.amplitudes = (scale * (1 + 0.5 * np.cos(0.9 * t)) * 2.0 ** (-t / 16)).astype(np.float32)

  def numpy(self, t: int, key: str) -> np.ndarray:
    return self.bases[key][t % 3] * self.amplitudes[t]

  def at(self, t: Any, like: dict[str, Any]) -> dict[str, Any]:
    amplitude = jnp.asarray(self.amplitudes)[t]
    return {k: (jnp.asarray(self.bases[k])[t % 3] * amplitude).astype(p.dtype) for k, p in like.items()}


# --- float64 AdamW, right and wrong ---------------------------------------------------------------------------------

HYPER = dict(learning_rate=0.1, b1=0.9, b2=0.999, eps=0.2, weight_decay=0.05)
GRADIENT_SCALES = {"conv": 10.0, "ragged": 0.1}


@dataclasses.dataclass(frozen=True)
class Wrong:
  """One mistake in AdamW."""

  bias_correction: bool = True
  b2_error: float = 0.0
  eps_inside: bool = False
  coupled_decay: bool = False


WRONG = {
    "no_bias_correction": Wrong(bias_correction=False),
    "wrong_b2": Wrong(b2_error=-0.05),
    "eps_inside_the_root": Wrong(eps_inside=True),
    "coupled_decay": Wrong(coupled_decay=True),
}


def adamw64(w: np.ndarray, grads: Any, steps: int, wrong: Wrong = Wrong(), **hyper: float) -> tuple[np.ndarray, ...]:
  """AdamW in float64 numpy: ``(w, mu, nu)`` after ``steps`` steps of gradients ``grads(t)``."""
  h = {**HYPER, **hyper}
  w = np.asarray(w, np.float64)
  mu, nu = np.zeros_like(w), np.zeros_like(w)
  b1, b2 = h["b1"], h["b2"] + wrong.b2_error
  for t in range(steps):
    g = np.asarray(grads(t), np.float64)
    if wrong.coupled_decay:
      g = g + h["weight_decay"] * w
    mu = b1 * mu + (1 - b1) * g
    nu = b2 * nu + (1 - b2) * g * g
    m_hat, n_hat = (mu / (1 - b1 ** (t + 1)), nu / (1 - b2 ** (t + 1))) if wrong.bias_correction else (mu, nu)
    direction = m_hat / (np.sqrt(n_hat + h["eps"]) if wrong.eps_inside else np.sqrt(n_hat) + h["eps"])
    decay = 0 if wrong.coupled_decay else h["weight_decay"] * w
    w = w - h["learning_rate"] * (direction + decay)
  return w, mu, nu


def group_errors(
    values: dict[str, Any], right: dict[str, Any], start: dict[str, Any] | None = None
) -> dict[str, float]:
  """Relative rms error of each large leaf, and of all small ones together; with ``start``, of the way from there."""
  groups: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
  for k, r in right.items():
    r = np.asarray(r, np.float64)
    origin = 0.0 if start is None else np.asarray(start[k], np.float64)
    name = k if r.size >= _SMALL_LEAVES else "small leaves"
    groups.setdefault(name, []).append(((np.asarray(values[k], np.float64) - r).ravel(), (r - origin).ravel()))
  errors = {}
  for name, pairs in groups.items():
    difference, size = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    errors[name] = float(np.sqrt(np.mean(difference**2)) / np.sqrt(np.mean(size**2)))
  return errors


# --- formats --------------------------------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
SCALINGS = (None, "tensor", "block")
ROUNDINGS = ("nearest", "stochastic")

MU_FORMATS = tuple(StateFormat(d, s, rounding=r) for d, s, r in itertools.product(DTYPES, SCALINGS, ROUNDINGS))
NU_FORMATS = tuple(
    StateFormat(d, s, transform=t, rounding=r)
    for t, d, s, r in itertools.product(("sqrt", None), DTYPES, SCALINGS, ROUNDINGS)
)
MASTER_FORMATS = tuple(f for f in MU_FORMATS if f.scaling or not f.dtype.startswith("float8")) + tuple(
    StateFormat(d, rounding=r) for d, r in itertools.product(("remainder16", "remainder8"), ROUNDINGS)
)


# Relative rms errors after 50 steps, against AdamW in float64, for (part, dtype, scaling, transform).
# Moments: (of the moment itself, of the parameters' way), nearest and stochastic rounding; masters: of the way.
# Each is 1.6 times what was measured, at least 2e-6 (2e-5 of the way).
TOLERANCES = {
    ("mu", "float32", None, None): ((2e-06, 2e-05), (2e-06, 2e-05)),
    ("mu", "float32", "tensor", None): ((2e-06, 2e-05), (2e-06, 2e-05)),
    ("mu", "float32", "block", None): ((2e-06, 2e-05), (2e-06, 2e-05)),
    ("mu", "bfloat16", None, None): ((0.012, 0.0031), (0.011, 0.005)),
    ("mu", "bfloat16", "tensor", None): ((0.008, 0.0031), (0.011, 0.0044)),
    ("mu", "bfloat16", "block", None): ((0.008, 0.003), (0.0099, 0.004)),
    ("mu", "float16", None, None): ((0.0012, 0.00042), (0.0014, 0.00056)),
    ("mu", "float16", "tensor", None): ((0.00095, 0.00039), (0.0014, 0.00054)),
    ("mu", "float16", "block", None): ((0.00088, 0.00037), (0.0013, 0.00052)),
    ("mu", "float8_e4m3fn", None, None): ((0.24, 0.055), (0.3, 0.09)),
    ("mu", "float8_e4m3fn", "tensor", None): ((0.14, 0.055), (0.17, 0.069)),
    ("mu", "float8_e4m3fn", "block", None): ((0.13, 0.058), (0.16, 0.066)),
    ("mu", "float8_e5m2", None, None): ((1.8, 0.34), (0.35, 0.17)),
    ("mu", "float8_e5m2", "tensor", None): ((0.31, 0.13), (0.32, 0.14)),
    ("mu", "float8_e5m2", "block", None): ((0.27, 0.13), (0.32, 0.14)),
    ("nu", "float32", None, "sqrt"): ((2e-06, 2e-05), (2e-06, 2e-05)),
    ("nu", "float32", "tensor", "sqrt"): ((2e-06, 2e-05), (2e-06, 2e-05)),
    ("nu", "float32", "block", "sqrt"): ((2e-06, 2e-05), (2e-06, 2e-05)),
    ("nu", "bfloat16", None, "sqrt"): ((0.035, 0.0065), (0.038, 0.0079)),
    ("nu", "bfloat16", "tensor", "sqrt"): ((0.034, 0.0065), (0.041, 0.0086)),
    ("nu", "bfloat16", "block", "sqrt"): ((0.031, 0.0067), (0.037, 0.0083)),
    ("nu", "float16", None, "sqrt"): ((0.012, 0.00095), (0.0059, 0.0012)),
    ("nu", "float16", "tensor", "sqrt"): ((0.0043, 0.00078), (0.0056, 0.0011)),
    ("nu", "float16", "block", "sqrt"): ((0.0039, 0.00077), (0.0051, 0.0011)),
    ("nu", "float8_e4m3fn", None, "sqrt"): ((0.49, 0.17), (0.42, 0.11)),
    ("nu", "float8_e4m3fn", "tensor", "sqrt"): ((0.45, 0.088), (0.37, 0.11)),
    ("nu", "float8_e4m3fn", "block", "sqrt"): ((0.25, 0.073), (0.36, 0.1)),
    ("nu", "float8_e5m2", None, "sqrt"): ((0.68, 0.3), (0.63, 0.18)),
    ("nu", "float8_e5m2", "tensor", "sqrt"): ((0.72, 0.12), (0.59, 0.18)),
    ("nu", "float8_e5m2", "block", "sqrt"): ((0.46, 0.13), (0.57, 0.18)),
    ("nu", "float32", None, None): ((2e-06, 2e-05), (2e-06, 2e-05)),
    ("nu", "float32", "tensor", None): ((2e-06, 2e-05), (2e-06, 2e-05)),
    ("nu", "float32", "block", None): ((2e-06, 2e-05), (2e-06, 2e-05)),
    ("nu", "bfloat16", None, None): ((0.024, 0.0033), (0.022, 0.0042)),
    ("nu", "bfloat16", "tensor", None): ((0.018, 0.0032), (0.021, 0.0043)),
    ("nu", "bfloat16", "block", None): ((0.017, 0.0032), (0.02, 0.0043)),
    ("nu", "float16", None, None): ((0.0029, 0.00039), (0.0028, 0.00053)),
    ("nu", "float16", "tensor", None): ((0.0022, 0.00039), (0.0028, 0.00055)),
    ("nu", "float16", "block", None): ((0.002, 0.00039), (0.0027, 0.00054)),
    ("nu", "float8_e4m3fn", None, None): ((17, 0.7), (18, 0.7)),
    ("nu", "float8_e4m3fn", "tensor", None): ((0.17, 0.042), (0.22, 0.059)),
    ("nu", "float8_e4m3fn", "block", None): ((0.17, 0.051), (0.21, 0.058)),
    ("nu", "float8_e5m2", None, None): ((0.49, 0.17), (0.42, 0.11)),
    ("nu", "float8_e5m2", "tensor", None): ((0.43, 0.098), (0.37, 0.11)),
    ("nu", "float8_e5m2", "block", None): ((0.24, 0.075), (0.35, 0.1)),
    ("master", "float32", None, None): (2e-05, 2e-05),
    ("master", "float32", "tensor", None): (2e-05, 2e-05),
    ("master", "float32", "block", None): (2e-05, 2e-05),
    ("master", "bfloat16", None, None): (0.047, 0.032),
    ("master", "bfloat16", "tensor", None): (0.049, 0.032),
    ("master", "bfloat16", "block", None): (0.044, 0.03),
    ("master", "float16", None, None): (0.0029, 0.004),
    ("master", "float16", "tensor", None): (0.0029, 0.004),
    ("master", "float16", "block", None): (0.0028, 0.0038),
    ("master", "float8_e4m3fn", "tensor", None): (0.91, 0.31),
    ("master", "float8_e4m3fn", "block", None): (0.93, 0.32),
    ("master", "float8_e5m2", "tensor", None): (1.3, 0.47),
    ("master", "float8_e5m2", "block", None): (1.3, 0.48),
    ("master", "remainder16", None, None): (2e-05, 2e-05),
    ("master", "remainder8", None, None): (8.7e-05, 0.00013),
}


def table_column(fmt: StateFormat) -> int:
  return ROUNDINGS.index(fmt.rounding)


@dataclasses.dataclass(frozen=True)
class Row:
  """One combination of formats; ``flip`` says whether even or odd leaves are bfloat16, the others being float32."""

  mu: StateFormat
  nu: StateFormat
  master: StateFormat
  flip: bool

  def __str__(self) -> str:
    return f"mu {self.mu}, nu {self.nu}, master {self.master}, {'bf16/f32' if self.flip else 'f32/bf16'}"

  def dtype(self, i: int) -> Any:
    return jnp.bfloat16 if (i % 2 == 0) == self.flip else jnp.float32

  def tolerances(self) -> tuple[float, float, float]:
    """Of mu, of nu, and of the parameters' way from their start."""
    find = lambda part, f: TOLERANCES[part, f.dtype, f.scaling, f.transform][table_column(f)]
    (mu, way_mu), (nu, way_nu) = find("mu", self.mu), find("nu", self.nu)
    return mu, nu, way_mu + way_nu + find("master", self.master)

  def keywords(self) -> dict[str, Any]:
    return dict(mu=self.mu, nu=self.nu, master=self.master, min_quantized_size=0)


def _rows() -> tuple[Row, ...]:
  """Every nu format once, every mu and master format with float32 and with bfloat16 in each leaf.

  A moment depends on its own format alone (gradients are given), so its error is judged in whatever company. The
  strides pair unlike formats.
  """
  n = len(MU_FORMATS)
  assert len(MASTER_FORMATS) == n and len(NU_FORMATS) == 2 * n
  return tuple(
      Row(MU_FORMATS[(7 * i) % n], NU_FORMATS[i], MASTER_FORMATS[(11 * i + 3) % n], i >= n) for i in range(2 * n)
  )


ROWS = _rows()
ROW_IDS = tuple(str(r).replace(" ", "_") for r in ROWS)

# Every row for every implementation, not only for the first.
ALL_ROWS = bool(os.environ.get("OPTAX_LOWPREC_ALL_ROWS"))

# A few that stand for all, where a test is about something else than numbers.
FEW = {
    "all_float32": dict(mu="float32", nu="float32", master="float32"),
    "default": {},
    "stochastic": dict(
        mu=StateFormat("float8_e4m3fn", rounding="stochastic"),
        nu=StateFormat("float8_e4m3fn", transform="sqrt", rounding="stochastic"),
        master=StateFormat("float16", rounding="stochastic"),
    ),
    "bfloat16_and_tensor": dict(
        mu="bfloat16", nu=StateFormat("float8_e5m2", "tensor", transform="sqrt"), master="remainder8"
    ),
}


# --- optimizers and modes of running --------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": (
        functools.partial(olp.adamw, 1e-2, weight_decay=0.1),
        functools.partial(optax.adamw, 1e-2, weight_decay=0.1),
    ),
    "adam": (functools.partial(olp.adam, 1e-2), functools.partial(optax.adam, 1e-2)),
    "scale_by_adam": (olp.scale_by_adam, optax.scale_by_adam),
}


def optimizer_keywords(name: str, formats: dict[str, Any]) -> dict[str, Any]:
  """``scale_by_adam`` keeps no master."""
  return {k: v for k, v in formats.items() if name != "scale_by_adam" or k != "master"}


# What XLA does by default, for programs that are compared bit by bit: see conftest.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def run_steps(tx: Any, params: Any, grads: Any, steps: int, mode: str = "scan", fused: bool = False, state: Any = None):
  """``steps`` steps of gradients ``grads(t, params)``; mode is eager, jit (of one step) or scan (of all)."""
  state = tx.init(params) if state is None else state

  def step(params, state, t):
    g = grads(t, params)
    if fused:
      return olp.apply_gradients(tx, g, state, params)
    updates, state = tx.update(g, state, params)
    return optax.apply_updates(params, updates), state

  if mode == "scan":
    run = lambda p, s: jax.lax.scan(lambda c, t: (step(*c, t), None), (p, s), jnp.arange(steps))[0]
    return jax.jit(run)(params, state)
  step = jax.jit(step) if mode == "jit" else step
  for t in range(steps):
    params, state = step(params, state, jnp.asarray(t))
  return params, state


def x64() -> contextlib.AbstractContextManager:
  """Double precision, under the name that this jax has for it."""
  if hasattr(jax, "enable_x64"):
    return jax.enable_x64(True)
  return jax.experimental.enable_x64()


def bits(x: Any) -> np.ndarray:
  x = np.asarray(x)
  return x.view(f"u{x.dtype.itemsize}") if x.dtype.itemsize in (1, 2, 4, 8) and x.dtype != bool else x


def assert_same_bits(a: Any, b: Any, what: str = "") -> None:
  """Bitwise equality of two trees, dtypes and structure included, NaNs too."""
  assert jax.tree.structure(a) == jax.tree.structure(b), what
  for (path, x), (_, y) in zip(*(jax.tree_util.tree_flatten_with_path(t)[0] for t in (a, b)), strict=True):
    assert x.dtype == y.dtype, f"{what} {path}: {x.dtype} {y.dtype}"
    np.testing.assert_array_equal(bits(x), bits(y), err_msg=f"{what} {jax.tree_util.keystr(path)}")


def shapes_and_dtypes(t: Any) -> Any:
  return jax.tree.map(lambda x: (tuple(x.shape), jnp.dtype(x.dtype).name), t)
