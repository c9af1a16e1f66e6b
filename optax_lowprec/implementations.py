"""Which implementation runs a step, and running it over a tree's leaves."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from optax_lowprec import ffi
from optax_lowprec import reference
from optax_lowprec import sharding
from optax_lowprec.reference import Hyper, LeafOptions, LeafState

Array = jax.Array
KERNELS = ("cuda", "cpu")
NAMES = (*KERNELS, "jnp")


def _why_not(name: str) -> str | None:
  """Why an implementation cannot be used here, or None if it can."""
  if name == "jnp":
    return None
  try:
    ffi.load(name)
  except ffi.UnusableLibraryError as e:
    return str(e)
  try:
    jax.devices(name)
  except RuntimeError:
    return f"jax has no {name} device here: install jax[{name}13] or jax[{name}12]" if name == "cuda" else "no device"
  return None


def available_implementations() -> tuple[str, ...]:
  """The implementations that can be used here, best first; ``"jnp"`` always is one."""
  return tuple(name for name in NAMES if _why_not(name) is None)


def explain() -> dict[str, str]:
  """For each implementation, whether it is available and, if not, why and what to do."""
  return {name: _why_not(name) or "available" for name in NAMES}


def check(implementation: str | None) -> str | None:
  """Checks an ``implementation=`` argument.

  Raises:
    ValueError: if the name is unknown, or the implementation is not available here; says how to get it.
  """
  if implementation is None:
    return None
  if implementation not in NAMES:
    raise ValueError(f"implementation must be None or one of {', '.join(NAMES)}, not {implementation!r}")
  why_not = _why_not(implementation)
  if why_not:
    raise ValueError(f"implementation={implementation!r} is not available here: {why_not}")
  return implementation


def tree_step(
    grads: Sequence[Array],
    params: Sequence[Array | None],
    states: Sequence[LeafState],
    hypers: Sequence[Hyper],
    options: Sequence[LeafOptions],
    implementation: str | None,
    names: Sequence[str],
) -> list[tuple[Array, LeafState]]:
  """One step of every leaf: see ``reference.leaf_step``.

  Args:
    grads: gradients.
    params: parameters, or Nones.
    states: the leaves' states.
    hypers: the leaves' scalars (float64 ones for float64 leaves).
    options: what is static about each leaf.
    implementation: a name, or None to choose by the platform that the computation is lowered for.
    names: the leaves' paths, for warnings.

  Returns:
    For each leaf the update or new parameter, and the new state.
  """
  # The kernels compute in float32, so float64 leaves are jnp's; empty leaves need no kernel.
  plain = [
      o.out_dtype == jnp.float64 or g.dtype == jnp.float64 or g.size == 0 for g, o in zip(grads, options, strict=True)
  ]
  rows: list[Any] = [None] * len(plain)
  leaves = list(zip(grads, params, states, hypers, options, strict=True))
  for name, index in (
      ("jnp", [i for i, p in enumerate(plain) if p]),
      (implementation, [i for i, p in enumerate(plain) if not p]),
  ):
    if index:
      *arrays, chosen = zip(*(leaves[i] for i in index), strict=True)
      done = _run(tuple(list(x) for x in arrays), list(chosen), name, [names[i] for i in index])
      for i, row in zip(index, done, strict=True):
        rows[i] = row
  return rows


def _run(
    arrays: tuple[Any, ...], options: list[LeafOptions], implementation: str | None, names: list[str]
) -> list[Any]:
  run_jnp = functools.partial(_jnp, options=options)
  run_ffi = {name: functools.partial(_ffi, name=name, options=options, names=names) for name in KERNELS}
  if implementation == "jnp":
    return run_jnp(*arrays)
  if implementation is not None:
    return run_ffi[implementation](*arrays)
  built: dict[str, Callable[..., Any]] = {name: f for name, f in run_ffi.items() if ffi.usable(name)}
  if not built:
    return run_jnp(*arrays)
  return lax.platform_dependent(*arrays, **built, default=run_jnp)


def _jnp(grads: Any, params: Any, states: Any, hypers: Any, *, options: list[LeafOptions]) -> list[Any]:
  run = lambda *arrays: [_leaf_step(*row) for row in zip(*arrays, options, strict=True)]
  return sharding.on_automatic_axes(run, grads, params, states, hypers, like=_results_like(grads, params, states))


def _ffi(
    grads: Any, params: Any, states: Any, hypers: Any, *, name: str, options: list[LeafOptions], names: list[str]
) -> list[Any]:
  rows = sharding.tree_step(name, grads, params, states, hypers[0], options, names)
  return sharding.cut_alike(rows, _results_like(grads, params, states))


def _results_like(grads: Any, params: Any, states: Any) -> list[Any]:
  return [(g if p is None else p, s) for g, p, s in zip(grads, params, states, strict=True)]


# Leaves of one shape and format share a trace.
_leaf_step: Any = jax.jit(reference.leaf_step, static_argnums=4)
