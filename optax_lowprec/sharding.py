"""The compiled step on a mesh: each device updates its own shard, with no communication but what a tensor scale needs.

Left to itself XLA gathers the operands of a call that it does not know. So the call says how it may be cut: along every
axis in front of its blocks, and between blocks. A shard boundary inside a block would need a scale from two devices;
such an axis is gathered first, with a warning that names the leaf.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any
import warnings

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from optax_lowprec import ffi
from optax_lowprec import formats as fmts
from optax_lowprec.ffi import Shard
from optax_lowprec.reference import Hyper, LeafOptions, LeafState

Array = jax.Array

# Compile time grows faster than the number of aliased buffers of one call; so do not put all leaves into one.
LEAVES_PER_CALL = 50


def tree_step(
    name: str,
    grads: Sequence[Array],
    params: Sequence[Array | None],
    states: Sequence[LeafState],
    hyper: Hyper,
    options: Sequence[LeafOptions],
    names: Sequence[str],
) -> list[tuple[Array, LeafState]]:
  """One step of float32, bfloat16 or float16 leaves by a compiled implementation: see ``reference.leaf_step``.

  ``names`` are the leaves' paths, for warnings.
  """
  step_words = ffi.words(hyper)
  has_param = params[0] is not None
  rows: list[tuple[Array, LeafState]] = []
  for i in range(0, len(grads), LEAVES_PER_CALL):
    chunk = slice(i, i + LEAVES_PER_CALL)
    call = _Call(name, tuple(options[chunk]), tuple(tuple(g.shape) for g in grads[chunk]), tuple(names[chunk]), has_param)
    flat = []
    for g, p, s, o in zip(grads[chunk], params[chunk], states[chunk], options[chunk], strict=True):
      arrays = {"grad": g, "param": p, **s._asdict()}
      flat += [arrays[operand.name] for operand in ffi.operands(o, has_param)]
    out = iter(call(step_words, *flat))
    for s, o in zip(states[chunk], options[chunk], strict=True):
      first = next(out)
      fields = [operand.name for operand in ffi.operands(o, has_param) if operand.name not in ("grad", "param")]
      rows.append((first, s._replace(**{k: next(out) for k in fields})))
  return rows


class _Call:
  """One call of an implementation for some leaves: as it is, batched by ``vmap``, and partitioned."""

  def __init__(
      self,
      name: str,
      options: tuple[LeafOptions, ...],
      shapes: tuple[tuple[int, ...], ...],
      names: tuple[str, ...],
      has_param: bool,
  ):
    self.name = name
    self.options = options
    self.shapes = shapes
    self.names = names
    self.has_param = has_param
    self.fields = [[x.name for x in ffi.operands(o, has_param)] for o in options]

  def __call__(self, *args: Array) -> list[Array]:
    partitioned = custom_partitioning(lambda *args: self._run(args, [Shard(s) for s in self.shapes]))
    rule, sizes = self._rule()
    partitioned.def_partition(partition=self._partition, sharding_rule=rule, **sizes)

    @jax.custom_batching.custom_vmap
    def batched(*args):
      return partitioned(*args)

    @batched.def_vmap
    def _(size, in_batched, *args):
      # One call for each element of the batch.
      mapped = [x for x, b in zip(args, in_batched, strict=True) if b]

      def one(xs):
        it = iter(xs)
        return batched(*[next(it) if b else x for x, b in zip(args, in_batched, strict=True)])

      del size
      out = lax.map(one, mapped)
      return out, jax.tree.map(lambda _: True, out)

    @jax.custom_jvp
    def step(*args):
      return batched(*args)

    @step.defjvp
    def _(primals, tangents):
      raise NotImplementedError(
          f"the {self.name} implementation of optax_lowprec cannot be differentiated: use implementation='jnp'"
      )

    return step(*args)

  def _run(self, args: Sequence[Array], shards: Sequence[Shard], **keywords: Any) -> list[Array]:
    it = iter(args[1:])
    arrays = [[next(it) for _ in fields] for fields in self.fields]
    rows = ffi.call(self.name, args[0], arrays, self.options, shards, self.has_param, **keywords)
    return [x for row in rows for x in row]

  # --- how it may be cut ---

  def _rule(self) -> tuple[str, dict[str, int]]:
    """The call in Shardy's notation, and the sizes of factors that no dimension shows.

    A factor for each axis, and two for an axis of whole blocks: which one, and where in it.
    """
    sizes: dict[str, int] = {}
    arguments, results = ["w"], []
    for i, (shape, o, fields) in enumerate(zip(self.shapes, self.options, self.fields, strict=True)):
      rows = _block_rows(shape, o)
      axis = fmts.block_geometry(shape, 1).axis
      common = math.lcm(*rows.values()) if rows else 0
      dims = [f"l{i}d{d}" for d in range(len(shape))]
      whole = bool(common and shape and shape[axis] % common == 0)
      if whole:
        dims[axis] = f"(l{i}c l{i}k)"
        sizes[f"l{i}k"] = common
        if common not in rows.values():
          sizes[f"l{i}c"] = shape[axis] // common
      for field in fields:
        text = " ".join(dims)
        if field.endswith("_scale"):
          part = field.removesuffix("_scale")
          if part not in rows or not shape:
            text = ""
          else:
            blocks = f"l{i}{part}b"
            if whole:
              blocks = f"l{i}c"
              if rows[part] != common:
                blocks = f"(l{i}c l{i}{part}b)"
                sizes[f"l{i}{part}b"] = common // rows[part]
            behind = [f"l{i}{part}d{d}" for d in range(axis + 1, len(shape))]  # all of size 1
            text = " ".join([*dims[:axis], blocks, *behind])
        arguments.append(text)
        if field == "grad" or field not in ("grad", "param"):
          results.append(text)
    return f"{', '.join(arguments)} -> {', '.join(results)}", sizes

  def _partition(self, mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
    del result_shapes
    axis_sizes = dict(mesh.shape)
    it = iter(arg_shapes[1:])
    argument_shardings = [NamedSharding(mesh, P())]
    result_shardings = []
    cuts = []
    for shape, o, name, fields in zip(self.shapes, self.options, self.names, self.fields, strict=True):
      given = {field: next(it).sharding for field in fields}
      cut = _allowed(_wanted(given, len(shape)), shape, o, axis_sizes, name)
      cuts.append(cut)
      geometry = fmts.block_geometry(shape, 1)
      for field in fields:
        spec = P(*cut)
        if field.endswith("_scale"):
          fmt = getattr(o.formats, field.removesuffix("_scale"))
          spec = P(*cut[: geometry.axis + 1]) if fmt.scaling == "block" else P()
        argument_shardings.append(NamedSharding(mesh, spec))
        if field != "param":
          result_shardings.append(NamedSharding(mesh, spec))
    # Over all axes that cut any leaf: a maximum may be taken more than once.
    axes = tuple(dict.fromkeys(a for cut, o in zip(cuts, self.options, strict=True) if ffi.has_tensor_scale(o)
                               for names in cut for a in names))  # fmt: skip

    def on_a_shard(*args: Array) -> list[Array]:
      shards = [_shard(shape, o, cut, axis_sizes) for shape, o, cut in zip(self.shapes, self.options, cuts, strict=True)]
      reduce_max = functools.partial(lax.pmax, axis_name=axes) if axes else lambda x: x
      return self._run(args, shards, max_over_shards=reduce_max)

    return mesh, on_a_shard, result_shardings, tuple(argument_shardings)


Cut = tuple[tuple[str, ...], ...]  # for each axis of a leaf, the mesh axes that it is cut along


def _block_rows(shape: tuple[int, ...], options: LeafOptions) -> dict[str, int]:
  """For each block-scaled part, how many indices of the blocks' axis make a block."""
  return {part: fmts.block_geometry(shape, f.block_size).rows for part, f in options.formats._asdict().items()
          if f is not None and f.scaling == "block"}  # fmt: skip


def _wanted(shardings: dict[str, Any], rank: int) -> Cut:
  """The sharding of the state where it has one, else of the parameter, else of the gradient."""
  cut: Cut = ((),) * rank
  for field in ("mu", "nu", "master", "param", "grad"):
    spec = getattr(shardings.get(field), "spec", None)
    if spec is not None:
      names = [() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in spec]
      cut = (*names, *((),) * (rank - len(names)))
      if any(cut):
        return cut
  return cut


def _allowed(cut: Cut, shape: tuple[int, ...], options: LeafOptions, axis_sizes: dict[str, int], name: str) -> Cut:
  """As much of a cut as gives every shard whole blocks; warns where that is not all of it."""
  rows = _block_rows(shape, options)
  axis = fmts.block_geometry(shape, 1).axis
  allowed: list[tuple[str, ...]] = []
  for d, names in enumerate(cut):
    fits = []
    for n in range(len(names), -1, -1):
      pieces = math.prod(axis_sizes[a] for a in names[:n])
      length, rest = divmod(shape[d], pieces)
      whole = not rows or d < axis or pieces == 1 or (d == axis and all(length % r == 0 for r in rows.values()))
      fits.append(rest == 0 and whole)
    allowed.append(names[: len(names) - fits.index(True)])
  if options.formats.stochastic:
    # The kernels follow positions through two cuts, and a third in front of everything.
    cuts = [d for d, names in enumerate(allowed) if names]
    while len(cuts) > 2 and (len(cuts) > 3 or math.prod(shape[: cuts[0]]) > 1):
      allowed[cuts.pop(0)] = ()
  if tuple(allowed) != cut:
    sizes = [math.prod(axis_sizes[a] for a in names) for names in cut]
    blocks = ", ".join(f"{part} in blocks of {r}" for part, r in rows.items())
    warnings.warn(
        f"optax_lowprec: {name} {list(shape)} is cut into {sizes} pieces, not whole blocks each ({blocks or 'uneven'}); "
        "it is gathered for every step. Choose another sharding or block_size for it.",
        RuntimeWarning,
        stacklevel=2,
    )
  return tuple(allowed)


def _shard(shape: tuple[int, ...], options: LeafOptions, cut: Cut, axis_sizes: dict[str, int]) -> Shard:
  """What the shard of this device is of the leaf; positions only where random bits need them."""
  if not options.formats.stochastic or not any(cut):
    return Shard(shape)
  local = [s // math.prod(axis_sizes[a] for a in names) for s, names in zip(shape, cut, strict=True)]
  strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
  base = jnp.uint32(0)
  for length, stride, names in zip(local, strides, cut, strict=True):
    index = jnp.uint32(0)
    for a in names:
      index = index * np.uint32(axis_sizes[a]) + lax.axis_index(a).astype(jnp.uint32)
    base = base + index * np.uint32((length * stride) & 0xFFFFFFFF)
  # From the innermost cut outwards; what lies in front of the outermost one is evenly spaced anyway.
  cuts = [d for d, names in enumerate(cut) if names][::-1]
  run = math.prod(local[cuts[0] :])
  run_stride = math.prod(shape[cuts[0] :])
  between = cuts[1] if len(cuts) > 1 else 0
  runs = math.prod(local[between : cuts[0]])
  return Shard(shape, base, run, run_stride, runs, math.prod(shape[between:]))
