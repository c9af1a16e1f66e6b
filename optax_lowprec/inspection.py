"""What a saved state holds, leaf by leaf, without restoring it."""

from collections.abc import Iterator
import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lowprec import checkpoint
from optax_lowprec import conversions
from optax_lowprec import formats as fmts
from optax_lowprec import state as state_lib
from optax_lowprec.formats import Part, StateFormat


@dataclasses.dataclass(frozen=True)
class PartRow:
  """One part of one leaf of a saved state.

  Attributes:
    leaf: the leaf's path, as ``jax.tree_util.keystr`` writes it.
    part: ``"mu"``, ``"nu"`` or ``"master"``.
    format: how it is stored; None is a master that is the parameter itself.
    shape: of the leaf.
    bytes: of codes and scales.
    low: the smallest value (decoded; NaN if any is, or if there is none).
    high: the largest value.
    saturated: share of codes that are the largest of their dtype, in magnitude (a block's maximum is one of them, so
      1/128 is usual for blocks of 128); None for remainders.
    zero: share of values that are 0.
  """

  leaf: str
  part: Part
  format: StateFormat | None
  shape: tuple[int, ...]
  bytes: int
  low: float
  high: float
  saturated: float | None
  zero: float


@dataclasses.dataclass(frozen=True)
class Inspection:
  """A saved state; printing it prints the table.

  Attributes:
    path: of the checkpoint.
    counts: the steps taken, of each of our states.
    rows: parts of leaves.
    parameter_bytes: bytes of the parameters.
  """

  path: str
  counts: tuple[int, ...]
  rows: tuple[PartRow, ...]
  parameter_bytes: int

  def __str__(self) -> str:
    head = ("leaf", "part", "format", "shape", "bytes", "min", "max", "saturated", "zero")
    table = [head]
    for r in self.rows:
      share = lambda x: "-" if x is None else f"{100 * x:.3f}%"
      table.append((
          r.leaf or "()", r.part, str(r.format or "the parameter"), "x".join(map(str, r.shape)) or "scalar",
          f"{r.bytes:,}", f"{r.low:.4g}", f"{r.high:.4g}", share(r.saturated), share(r.zero),
      ))  # fmt: skip
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    line = lambda row: "  ".join(
        x.ljust(w) if i < 4 else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    lines = [line(head), "-" * len(line(head)), *map(line, table[1:])]
    state_bytes = sum(r.bytes for r in self.rows)
    counts = ", ".join(map(str, self.counts))
    return "\n".join(
        [
            f"{self.path}: step {counts}; {state_bytes:,} bytes of state, {self.parameter_bytes:,} of parameters",
            *lines,
        ]
    )


def inspect(path: str | os.PathLike[str], *, progress: bool = False) -> Inspection:
  """Reads a checkpoint of ``optax_lowprec.checkpoint.save`` or ``save_args``, one leaf at a time.

  Args:
    path: its directory.
    progress: show a bar (needs tqdm).

  Returns:
    An ``Inspection``.

  Raises:
    CheckpointError: if there is no checkpoint, or it is damaged or a newer version's.
    ImportError: without Orbax, or without tqdm where it is asked for.
  """
  path = os.path.abspath(path)
  states = checkpoint.parse_record(checkpoint.read_record(path))
  with checkpoint.reading(path):
    trees = {item: checkpoint.read_metadata(path, item) for item in ("params", "state")}
    counts = [_read(path, "state", trees["state"], [(*s.path, "count")])[0] for s in states]
    leaves = [(s, name, leaf) for s in states for name, leaf in s.leaves.items() if leaf.formats is not None]
    rows: list[PartRow] = []
    for s, name, leaf in conversions.progress_bar(leaves, len(leaves), "inspect", progress):
      rows += _rows(path, trees, s, name, leaf)
  size = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(trees["params"]))
  return Inspection(path, tuple(int(n) for n in counts if n is not None), tuple(rows), size)


def _read(path: str, item: str, tree: Any, wanted: list[tuple[str, ...]]) -> list[np.ndarray | None]:
  """Some arrays of an item, to host memory; None where there is none."""
  ocp = checkpoint.orbax()
  treedef: Any
  flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
  ask = [0 if conversions.keys(k) in wanted else ocp.PLACEHOLDER for k, _ in flat]
  arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    restore = ocp.args.PyTreeRestore(item=treedef.unflatten(ask), restore_args=arguments)
    found = checkpointer.restore(os.path.join(path, item), restore)
  by_path = {conversions.keys(k): x for k, x in jax.tree_util.tree_flatten_with_path(found)[0]}
  return [x if isinstance(x := by_path.get(k), np.ndarray) else None for k in wanted]


def _rows(path: str, trees: dict[str, Any], s: Any, name: str, leaf: Any) -> Iterator[PartRow]:
  wanted = [(*s.path, field, *leaf.path) for field in state_lib.FIELDS]
  # Scales are kept without the box that their parameter may have.
  bare = [(*s.path, field, *leaf.path[:-1]) for field in state_lib.FIELDS]
  arrays = _read(path, "state", trees["state"], wanted + bare)
  stored = dict(zip(state_lib.FIELDS, arrays, strict=False))
  for field, x in zip(state_lib.FIELDS, arrays[len(wanted) :], strict=True):
    stored[field] = x if stored[field] is None else stored[field]
  param = None
  for part in state_lib.PARTS:
    fmt = getattr(leaf.formats, part)
    if math.prod(leaf.shape) == 0:
      yield PartRow(name, part, fmt, leaf.shape, 0, math.nan, math.nan, None, 0.0)
      continue
    if fmt is None or fmt.is_remainder:
      param = _read(path, "params", trees["params"], [leaf.path])[0] if param is None else param
    if fmt is None:
      assert param is not None
      yield PartRow(name, part, None, leaf.shape, 0, *_range(np.asarray(param, np.float64)), None, _zeros(param))
      continue
    q, scale = stored[part], stored[f"{part}_scale"]
    if q is None or tuple(q.shape) != leaf.shape or (fmt.scaling and scale is None):
      raise checkpoint.CheckpointError(f"{name or 'the parameter'}: {part} is not there in the record's format {fmt}")
    if fmt.is_remainder:
      values = np.asarray(fmts.decode_remainder(jnp.asarray(param), jnp.asarray(q)))
    elif q.dtype == np.float64:
      values = q
    else:
      values = np.asarray(fmts.decode(jnp.asarray(q), jnp.asarray(0.0 if scale is None else scale), fmt))
    bytes_ = q.nbytes + (scale.nbytes if fmt.scaling and scale is not None else 0)
    largest = None if fmt.is_remainder else float(jnp.finfo(q.dtype).max)
    saturated = None if largest is None else float(np.mean(np.abs(q.astype(np.float64)) == largest))
    yield PartRow(name, part, fmt, leaf.shape, bytes_, *_range(values), saturated, _zeros(values))


def _range(values: np.ndarray) -> tuple[float, float]:
  return float(values.min()), float(values.max())


def _zeros(values: np.ndarray) -> float:
  return float(np.mean(values == 0))
