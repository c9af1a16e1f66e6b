"""Which implementation runs a step, and running it over a tree's leaves."""

from collections.abc import Sequence
from typing import Any

import jax

from optax_lowprec import reference
from optax_lowprec.reference import Hyper, LeafOptions, LeafState

Array = jax.Array
NAMES = ("cuda", "cpu", "jnp")


def available_implementations() -> tuple[str, ...]:
  """The implementations that can be used here, best first; ``"jnp"`` always is one."""
  return ("jnp",)


def check(implementation: str | None) -> str | None:
  """Checks an ``implementation=`` argument.

  Raises:
    ValueError: if the name is unknown, or the implementation is not available here; says how to get it.
  """
  if implementation is None:
    return None
  if implementation not in NAMES:
    raise ValueError(f"implementation must be None or one of {', '.join(NAMES)}, not {implementation!r}")
  if implementation not in available_implementations():
    raise ValueError(
        f"implementation={implementation!r} is not available here; `python -m optax_lowprec` says what is missing"
    )
  return implementation


def tree_step(
    grads: Sequence[Array],
    params: Sequence[Array | None],
    states: Sequence[LeafState],
    hypers: Sequence[Hyper],
    options: Sequence[LeafOptions],
    implementation: str | None,
) -> list[tuple[Array, LeafState]]:
  """One step of every leaf: see ``reference.leaf_step``."""
  del implementation
  return [_leaf_step(*row) for row in zip(grads, params, states, hypers, options, strict=True)]


# Leaves of one shape and format share a trace.
_leaf_step: Any = jax.jit(reference.leaf_step, static_argnums=4)


def explain() -> dict[str, str]:
  """For each implementation, whether it is available and, if not, why and what to do."""
  return {"jnp": "available (XLA, any platform)"}
