"""What an optimizer will cost: bytes a parameter, before anything is allocated."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lowprec import state as state_lib

PyTree = Any


@dataclasses.dataclass(frozen=True)
class MemoryReport:
  """Bytes of the parameters and of everything that the optimizer keeps; printing it prints the table.

  Attributes:
    parameters: number of floating-point parameters.
    parts: bytes of each part, the parameters first.
    baseline: the same for float32 parameters with ``optax.adamw``.
  """

  parameters: int
  parts: dict[str, int]
  baseline: dict[str, int]

  @property
  def total_bytes(self) -> int:
    return sum(self.parts.values())

  @property
  def bytes_per_parameter(self) -> float:
    return self.total_bytes / max(1, self.parameters)

  @property
  def baseline_bytes_per_parameter(self) -> float:
    return sum(self.baseline.values()) / max(1, self.parameters)

  def __str__(self) -> str:
    n = max(1, self.parameters)
    head = f"{'part':<14}{'bytes':>16}{'a parameter':>14}{'optax.adamw f32':>18}"
    rows = [head, "-" * len(head)]
    for name in dict.fromkeys([*self.parts, *self.baseline]):
      mine, theirs = self.parts.get(name, 0), self.baseline.get(name, 0)
      rows.append(f"{name:<14}{mine:>16,}{mine / n:>14.3f}{theirs / n:>18.3f}")
    rows.append("-" * len(head))
    rows.append(
        f"{'total':<14}{self.total_bytes:>16,}{self.bytes_per_parameter:>14.3f}"
        f"{self.baseline_bytes_per_parameter:>18.3f}"
    )
    return "\n".join(rows)


def memory_report(tx: optax.GradientTransformation, params: PyTree) -> MemoryReport:
  """Bytes of parameters and optimizer state, per part, beside float32 parameters with ``optax.adamw``.

  Args:
    tx: any gradient transformation; parts of our states are listed by name, everything else as ``other state``.
    params: parameters, or ``ShapeDtypeStruct``s of them. Nothing is allocated.

  Returns:
    A ``MemoryReport``.
  """
  shapes = jax.eval_shape(lambda p: p, params)
  state = jax.eval_shape(tx.init, shapes)
  floats = [p for p in jax.tree.leaves(shapes) if jnp.issubdtype(p.dtype, jnp.floating)]
  parts = {"parameters": state_lib.storage_bytes(shapes)}
  counted = 0
  for s in jax.tree.leaves(state, is_leaf=state_lib.is_state):
    if state_lib.is_state(s):
      for part in state_lib.PARTS:
        for name, field in ((part, part), (f"{part} scales", f"{part}_scale")):
          size = state_lib.storage_bytes(getattr(s, field))
          counted += size
          if size:
            parts[name] = parts.get(name, 0) + size
  parts["other state"] = state_lib.storage_bytes(state) - counted
  wide = [jax.ShapeDtypeStruct(p.shape, jnp.float32) for p in floats]
  adamw = jax.eval_shape(optax.adamw(1e-3).init, wide)
  each = sum(4 * math.prod(p.shape) for p in floats)
  baseline = {"parameters": each, "mu": each, "nu": each, "other state": state_lib.storage_bytes(adamw) - 2 * each}
  return MemoryReport(sum(math.prod(p.shape) for p in floats), parts, baseline)
