"""The step of one leaf in jnp: the specification that every other implementation repeats.

Same bits everywhere: the order of operations below is part of the specification, every operation is a correctly
rounded float32 one, no product is contracted into an addition (``_mul``), and float32 subnormals count as zero.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from optax_lowprec import formats
from optax_lowprec.formats import LeafFormats

Array = jax.Array


class Hyper(NamedTuple):
  """The scalars of a step: float32 (float64 for float64 leaves), but for ``skip`` (bool) and the uint32s behind it."""

  learning_rate: Array
  b1: Array
  one_minus_b1: Array
  b2: Array
  one_minus_b2: Array
  eps: Array
  eps_root: Array
  weight_decay: Array
  mu_factor: Array  # bias correction of mu; with Nesterov momentum b1 / (1 - b1^(t + 1))
  grad_factor: Array  # 0; with Nesterov momentum (1 - b1) / (1 - b1^t)
  nu_factor: Array  # 1 / (1 - b2^t)
  sqrt_nu_factor: Array
  grad_scale: Array  # what gradients are multiplied with: unscaling and clipping
  skip: Array  # True leaves everything as it is
  key: Array  # of the random bits: ``formats.noise_key``
  phase: Array  # of the random bits in this step: ``formats.noise_phase``
  zero: Array  # uint32 0 that the compiler cannot see through


class LeafOptions(NamedTuple):
  """What is static about the step of one leaf."""

  formats: LeafFormats
  index: int  # type: ignore[assignment]  # (hides tuple.index) position among the leaves, for the random bits
  decay: bool  # weight decay applies
  nesterov: bool
  eps_root: bool  # False: eps_root is known to be 0
  direction: bool  # the update is Adam's direction alone (scale_by_adam), else -learning_rate * (direction + decay)
  fused: bool  # return the new parameter instead of the update
  skippable: bool
  out_dtype: Any


class LeafState(NamedTuple):
  """The arrays of one leaf: codes of the leaf's shape, and their scales."""

  mu: Array
  nu: Array
  master: Array
  mu_scale: Array
  nu_scale: Array
  master_scale: Array


@jax.custom_jvp
def _mul(x: Array, y: Array, zero: Array) -> Array:
  """A product that is rounded before it is added to something.

  XLA's CPU backend contracts ``x * y + z`` into a fused multiply-add where both land in one kernel, so that the same
  step gives other bits eager and jitted. Or-ing a zero that only the run time knows into the bits prevents it.
  """
  xy = x * y
  if xy.dtype != jnp.float32:
    return xy
  return lax.bitcast_convert_type(lax.bitcast_convert_type(xy, jnp.uint32) | zero, jnp.float32)


@_mul.defjvp
def _(primals: Any, tangents: Any) -> Any:
  x, y, _ = primals
  dx, dy, _ = tangents
  return _mul(*primals), dx * y + x * dy


def leaf_step(
    grad: Array, param: Array | None, state: LeafState, hyper: Hyper, options: LeafOptions
) -> tuple[Array, LeafState]:
  """One Adam(W) step of one leaf.

  Args:
    grad: gradients, any floating dtype, shape S.
    param: the parameter (S), None where only moments are kept.
    state: codes of shape S and their scales.
    hyper: scalars.
    options: formats and flags.

  Returns:
    The update or the new parameter (S, ``options.out_dtype``) and the new state.

  References:
    Kingma and Ba, Adam, arXiv:1412.6980; Loshchilov and Hutter, Decoupled Weight Decay Regularization,
    arXiv:1711.05101; Dozat, Incorporating Nesterov Momentum into Adam (with nu's bias correction as in optax).
  """
  fmt = options.formats
  wide = grad.dtype == jnp.float64 if param is None else param.dtype == jnp.float64
  compute = jnp.float64 if wide else jnp.float32
  h = hyper
  bits = formats.Noise(None, None, None)
  if fmt.stochastic:
    bits = formats.noise(grad.shape, h.key, h.phase, options.index)

  g = grad.astype(compute) * h.grad_scale
  if wide:
    mu_old, nu_old = state.mu, state.nu
  else:
    mu_old = formats.decode_stored(state.mu, state.mu_scale, fmt.mu)
    nu_old = formats.decode_stored(state.nu, state.nu_scale, fmt.nu)
    if fmt.nu.transform == "sqrt":
      nu_old = nu_old * nu_old
  mu = _mul(h.b1, mu_old, h.zero) + _mul(h.one_minus_b1, g, h.zero)
  nu = _mul(h.b2, nu_old, h.zero) + _mul(h.one_minus_b2, g * g, h.zero)

  denominator = _mul(jnp.sqrt(nu), h.sqrt_nu_factor, h.zero)
  if options.eps_root:
    rooted = jnp.sqrt(_mul(nu, h.nu_factor, h.zero) + h.eps_root)
    denominator = jnp.where(h.eps_root == 0, denominator, rooted)
  numerator = _mul(mu, h.mu_factor, h.zero)
  if options.nesterov:
    numerator = numerator + _mul(g, h.grad_factor, h.zero)
  direction = numerator / (denominator + h.eps)

  master, master_scale = state.master, state.master_scale
  if options.direction:
    out = formats.cast_to(direction, options.out_dtype)
  else:
    assert param is not None
    p = param.astype(compute)
    if fmt.master is None:
      w = p
    elif fmt.master.is_remainder:
      w = formats.decode_remainder(param, state.master)
    else:
      w = formats.decode_stored(state.master, state.master_scale, fmt.master, lambda x, y: _mul(x, y, h.zero))
    if options.decay:
      direction = direction + _mul(h.weight_decay, w, h.zero)
    step = _mul(h.learning_rate, direction, h.zero)
    new_w = w - step
    if fmt.master is None:
      out = formats.cast_to(new_w, param.dtype) if options.fused else formats.cast_to(-step, options.out_dtype)
    else:
      if fmt.master.is_remainder:
        new_p, master = formats.encode_remainder(new_w, param.dtype, fmt.master, bits.master)
      else:
        master, master_scale = formats.encode(new_w, fmt.master, noise32=bits.master)
        new_p = formats.cast_to(new_w, param.dtype)
      out = new_p if options.fused else formats.cast_to(new_p.astype(jnp.float32) - p, options.out_dtype)

  if wide:
    new = LeafState(mu, nu, master, state.mu_scale, state.nu_scale, master_scale)
  else:
    q_mu, mu_scale = formats.encode(mu, fmt.mu, noise32=bits.mu)
    q_nu, nu_scale = formats.encode(nu, fmt.nu, positive=True, noise32=bits.nu)
    new = LeafState(q_mu, q_nu, master, mu_scale, nu_scale, master_scale)
  # What stands for no scale stays: its shape follows from the whole leaf's, of which a shard may be all that is here.
  for part in ("mu", "nu", "master"):
    f = getattr(fmt, part)
    if f is None or f.scaling is None:
      new = new._replace(**{f"{part}_scale": getattr(state, f"{part}_scale")})
  if options.skippable:
    unchanged: Any = param if options.fused else jnp.zeros_like(out)
    out = jnp.where(h.skip, unchanged, out)
    new = LeafState(*(jnp.where(h.skip, old, x) for old, x in zip(state, new, strict=True)))
  return out, new


def hyperparameters(
    count: Array,
    *,
    learning_rate: Any,
    b1: Any,
    one_minus_b1: Any,
    b2: Any,
    one_minus_b2: Any,
    eps: Any,
    eps_root: Any,
    weight_decay: Any,
    nesterov: bool,
    grad_scale: Any,
    skip: Any,
    key: Array,
    dtype: Any = jnp.float32,
) -> Hyper:
  """The scalars of the step after ``count`` steps.

  The bias corrections are optax's expression, with its float32 error: at t = 1, ``1 - 0.999**t`` keeps four digits,
  and a more exact value would make the first steps differ from ``optax.adamw`` by more than rounding.
  """
  lr, b1, omb1, b2, omb2, eps, eps_root, wd, scale = (
      jnp.asarray(x, dtype)
      for x in (learning_rate, b1, one_minus_b1, b2, one_minus_b2, eps, eps_root, weight_decay, grad_scale)
  )
  t = optax.safe_increment(count)
  correction = lambda b, t: 1 - b**t
  nu_factor = 1 / correction(b2, t)
  if nesterov:
    mu_factor = b1 / correction(b1, optax.safe_increment(t))
    grad_factor = omb1 / correction(b1, t)
  else:
    mu_factor, grad_factor = 1 / correction(b1, t), jnp.zeros_like(b1)
  return Hyper(
      lr, b1, omb1, b2, omb2, eps, eps_root, wd, mu_factor, grad_factor, nu_factor, jnp.sqrt(nu_factor), scale,
      jnp.asarray(skip, bool), key, formats.noise_phase(count),
      lax.shift_right_logical(count, jnp.int32(31)).astype(jnp.uint32),
  )  # fmt: skip
