"""The compiled step on a mesh: each device updates its own shard, with no communication but what a tensor scale needs.

Left to itself XLA gathers the operands of a call that it does not know. So the call says how it may be cut: along every
axis in front of its blocks, and between blocks. A shard boundary inside a block would need a scale from two devices;
such an axis is gathered first, with a warning that names the leaf.
"""

from collections.abc import Callable, Sequence
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
import optax

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
  # Inside shard_map the results of a call vary over the mesh axes that any of its operands varies over.
  groups: dict[Any, list[int]] = {}
  for i, g in enumerate(grads):
    groups.setdefault(getattr(jax.typeof(g), "vma", None), []).append(i)
  rows: dict[int, tuple[Array, LeafState]] = {}
  for group in groups.values():
    for start in range(0, len(group), LEAVES_PER_CALL):
      chunk = group[start : start + LEAVES_PER_CALL]
      pick = lambda sequence, chunk=chunk: tuple(sequence[i] for i in chunk)
      shapes = tuple(tuple(g.shape) for g in pick(grads))
      call = _Call(name, pick(options), shapes, pick(names), has_param)
      flat = []
      for i, fields in zip(chunk, call.fields, strict=True):
        arrays = {"grad": grads[i], "param": params[i], **states[i]._asdict()}
        flat += [arrays[field] for field in fields]
      out = iter(call(step_words, *flat))
      for i, fields in zip(chunk, call.fields, strict=True):
        first = next(out)
        rows[i] = (first, states[i]._replace(**{k: next(out) for k in fields if k in LeafState._fields}))
  return [rows[i] for i in range(len(grads))]


def _explicit_mesh(tree: Any) -> Any:
  """The mesh on which arrays of a tree have their shardings in their types, or None."""
  for x in jax.tree.leaves(tree):
    mesh = jax.typeof(x).sharding.mesh
    if any(t == jax.sharding.AxisType.Explicit for t in mesh.axis_types):
      return mesh
  return None


def on_automatic_axes(f: Callable[..., Any], *args: Any, like: Any) -> Any:
  """``f(*args)``, on a mesh with Explicit axes too.

  Args:
    f: a function of arrays, which leaves it to the compiler how its results are cut.
    *args: its arguments.
    like: a tree like its result of the arrays that the results replace: they have their types.
  """
  mesh = _explicit_mesh((args, like))
  if mesh is None:
    return f(*args)
  return jax.sharding.auto_axes(f, axes=mesh.explicit_axes, out_sharding=_types(mesh, like))(*args)


def cut_alike(tree: Any, like: Any) -> Any:
  """On a mesh with Explicit axes, ``tree`` with the types of ``like``."""
  mesh = _explicit_mesh((tree, like))
  return tree if mesh is None else jax.tree.map(jax.sharding.reshard, tree, _types(mesh, like))


def _types(mesh: Any, like: Any) -> Any:
  def sharding_of(x):
    sharding = jax.typeof(x).sharding
    return NamedSharding(mesh, P()) if sharding.mesh.empty else sharding

  return jax.tree.map(sharding_of, like)


def _partitioned(
    plain: Callable[..., Any], partition: Callable[..., Any], rule: Callable[[int], tuple[str, dict[str, int]]], *,
    batched: Callable[..., Any] | None = None, jvp: Callable[..., Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
  """``plain``, with a say in how it is cut on a mesh; on one device and inside ``shard_map`` it is ``plain`` itself.

  ``rule`` gives Shardy's rule for a number of devices, and the sizes of factors that no dimension shows.
  ``custom_partitioning`` alone can neither be batched nor differentiated: under ``vmap`` and ``jvp`` these or ``plain``
  take its place.
  """
  automatic_axes = custom_partitioning(plain)
  automatic_axes.def_partition(partition=partition, sharding_rule=lambda mesh, *types: rule(mesh.size))

  def call(*args):
    mesh = _explicit_mesh(args)
    return automatic_axes(*args) if mesh is None else explicit_axes(mesh, *args)

  def explicit_axes(mesh, *args):
    # The cuts are known while tracing.
    mesh, on_a_shard, out, given = partition(mesh, [jax.typeof(x) for x in args], None)
    cut = [jax.sharding.reshard(x, sharding) for x, sharding in zip(args, given, strict=True)]
    specs = lambda shardings: jax.tree.map(lambda s: s.spec, shardings)
    return jax.shard_map(on_a_shard, mesh=mesh, in_specs=specs(given), out_specs=specs(out), check_vma=False)(*cut)

  @jax.custom_batching.custom_vmap
  def f(*args):
    return call(*args)

  @f.def_vmap
  def _(size, in_batched, *args):
    del size
    out = (batched or _batched(plain))(in_batched, *args)
    return out, jax.tree.map(lambda _: True, out)

  g = jax.custom_jvp(lambda *args: f(*args))
  g.defjvp(jvp or (lambda primals, tangents: jax.jvp(plain, primals, tangents)))
  # Inside shard_map there is nothing to cut, and these wrappers would hide over which axes a result varies.
  return lambda *args: (plain if any(getattr(jax.typeof(x), "vma", None) for x in args) else g)(*args)


def _batched(plain: Callable[..., Any]) -> Callable[..., Any]:
  return lambda in_batched, *args: jax.vmap(plain, [0 if b else None for b in in_batched])(*args)


class _Call:
  """One call of an implementation for some leaves."""

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
    plain = lambda *args: self._run(args, [Shard(s) for s in self.shapes])
    call: Callable[..., Any]

    def one_by_one(in_batched, *args):
      def one(xs):
        it = iter(xs)
        return call(*[next(it) if b else x for x, b in zip(args, in_batched, strict=True)])

      return lax.map(one, [x for x, b in zip(args, in_batched, strict=True) if b])

    def jvp(primals, tangents):
      raise NotImplementedError(
          f"the {self.name} implementation of optax_lowprec cannot be differentiated: use implementation='jnp'"
      )

    call = _partitioned(plain, self._partition, self._rule, batched=one_by_one, jvp=jvp)
    return call(*args)

  def _run(self, args: Sequence[Array], shards: Sequence[Shard], **keywords: Any) -> list[Array]:
    it = iter(args[1:])
    arrays = [[next(it) for _ in fields] for fields in self.fields]
    rows = ffi.call(self.name, args[0], arrays, self.options, shards, self.has_param, **keywords)
    return [x for row in rows for x in row]

  # --- how it may be cut ---

  def _rule(self, devices: int) -> tuple[str, dict[str, int]]:
    sizes: dict[str, int] = {}
    arguments, results = ["w"], []
    for i, (shape, o, fields) in enumerate(zip(self.shapes, self.options, self.fields, strict=True)):
      data, scales, leaf_sizes = _factors(f"l{i}", shape, _block_rows(shape, o), devices)
      sizes |= leaf_sizes
      for field in fields:
        text = scales.get(field.removesuffix("_scale"), "") if field.endswith("_scale") else data
        # The gradient is brought to the state, and has no say in how the state is cut.
        own = " ".join(f"l{i}g{d}" for d in range(len(shape)))
        arguments.append(own if field == "grad" else text)
        if field != "param":
          results.append(text)  # that of the gradient is the update or parameter
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
      shards = [
          _shard(shape, o, cut, axis_sizes) for shape, o, cut in zip(self.shapes, self.options, cuts, strict=True)
      ]
      reduce_max = functools.partial(lax.pmax, axis_name=axes) if axes else lambda x: x
      return self._run(args, shards, max_over_shards=reduce_max)

    return mesh, on_a_shard, result_shardings, tuple(argument_shardings)


# --- cuts -----------------------------------------------------------------------------------------------------------


Cut = tuple[tuple[str, ...], ...]  # for each axis of a leaf, the mesh axes that it is cut along


def _block_rows(shape: tuple[int, ...], options: LeafOptions) -> dict[str, int]:
  """For each block-scaled part, how many indices of the blocks' axis make a block."""
  return {part: fmts.block_geometry(shape, f.block_size).rows for part, f in options.formats._asdict().items()
          if f is not None and f.scaling == "block"}  # fmt: skip


def _factors(
    name: str, shape: tuple[int, ...], rows: dict[str, int], devices: int
) -> tuple[str, dict[str, str], dict[str, int]]:
  """A leaf in Shardy's notation: its dimensions, those of its scales, and the sizes of factors that no dimension shows.

  A factor for each axis, and two for an axis of whole blocks: which one, and where in it.
  """
  sizes: dict[str, int] = {}
  axis = fmts.block_geometry(shape, 1).axis
  common = math.lcm(*rows.values()) if rows and shape else 0
  dims = [f"{name}d{d}" for d in range(len(shape))]
  # Shardy has no factors of size 1 beside others. Of a number of blocks that does not divide among the devices it would
  # take a part of a mesh axis, for which JAX has no sharding: then scales have an axis of their own.
  blocks, rest = divmod(shape[axis], common) if common else (0, 0)
  whole = rest == 0 and blocks > 1 and blocks % devices == 0
  if whole and common == 1:
    dims[axis] = f"{name}c"
  elif whole:
    dims[axis] = f"({name}c {name}k)"
    sizes[f"{name}k"] = common
    if common not in rows.values():
      sizes[f"{name}c"] = blocks
  scales = {}
  for part, n in rows.items():
    dim = f"{name}{part}b"
    if whole and n == common:
      dim = f"{name}c"
    elif whole:
      sizes[dim] = common // n
      dim = f"({name}c {dim})"
    behind = [f"{name}{part}d{d}" for d in range(axis + 1, len(shape))]  # all of size 1
    scales[part] = " ".join([*dims[:axis], dim, *behind]) if shape else ""
  return " ".join(dims), scales, sizes


def _wanted(shardings: dict[str, Any], rank: int) -> Cut:
  """The sharding of the state where it has one, else of the parameter, else of the gradient."""
  cut: Cut = ((),) * rank
  for field in ("mu", "nu", "master", "param", "grad"):
    spec = getattr(shardings.get(field), "spec", None)
    if spec is not None:
      names = [_axes(x) for x in spec]
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
        f"optax_lowprec: {name} {list(shape)} is cut into {sizes} pieces, not whole blocks each "
        f"({blocks or 'uneven'}); it is gathered for every step. Choose another sharding or block_size for it.",
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


# --- state ----------------------------------------------------------------------------------------------------------


def fit(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
  """A parameter's sharding for an array of its rank (or a scalar), without the axes that do not divide it."""
  sizes = dict(sharding.mesh.shape)
  spec: list[Any] = []
  for length, axes in zip(shape, sharding.spec, strict=False):
    fits = length % math.prod(sizes[a] for a in _axes(axes)) == 0
    spec.append(axes if fits else None)
  return NamedSharding(sharding.mesh, P(*spec), memory_kind=sharding.memory_kind)


def _axes(entry: Any) -> tuple[str, ...]:
  return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def zeros_like(p: Any, kinds: Sequence[tuple[Any, int | None]]) -> list[Array]:
  """Zeros of some dtypes for each element of a parameter, or for each of its blocks, sharded as it is.

  Args:
    p: the parameter: an array, a tracer, or anything with a shape.
    kinds: for each result its dtype and, where it has one element a block, the block size.
  """
  shape = tuple(p.shape)
  shapes = [shape if size is None else fmts.block_geometry(shape, size).scale_shape for _, size in kinds]
  dtypes = [dtype for dtype, _ in kinds]
  plain = lambda *_: [jnp.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]
  if not isinstance(p, jax.Array):  # numpy, ShapeDtypeStruct
    return plain()
  traced = isinstance(p, jax.core.Tracer)
  sharding = jax.typeof(p).sharding if traced else p.sharding
  if isinstance(sharding, NamedSharding) and (not traced or _explicit_mesh(p) is not None):
    return [jnp.zeros(s, d, device=fit(sharding, s)) for s, d in zip(shapes, dtypes, strict=True)]
  if not traced:
    return [jnp.zeros_like(p, shape=s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]

  # The compiler would choose any sharding for a constant.
  def partition(mesh, arg_shapes, result_shapes):
    del result_shapes
    given = arg_shapes[0].sharding
    out = [fit(NamedSharding(mesh, getattr(given, "spec", P())), s) for s in shapes]
    local = [sharding.shard_shape(s) for sharding, s in zip(out, shapes, strict=True)]
    return mesh, lambda _: [jnp.zeros(s, d) for s, d in zip(local, dtypes, strict=True)], out, (given,)

  rows = {f"b{size}": fmts.block_geometry(shape, size).rows for _, size in kinds if size is not None}

  def rule(devices):
    data, scales, sizes = _factors("l", shape, rows, devices)
    results = ", ".join(data if size is None else scales[f"b{size}"] for _, size in kinds)
    return f"{data} -> {results}", sizes

  return _partitioned(plain, partition, rule)(p)


def state_shardings(tx: optax.GradientTransformation, params: Any, param_shardings: Any) -> Any:
  """The shardings of an optimizer's state, for ``jit(out_shardings=...)``, ``device_put`` and checkpoints.

  Args:
    tx: an Optax transform, with ours anywhere inside.
    params: parameters, or their ``jax.ShapeDtypeStruct``.
    param_shardings: a tree like ``params`` of ``NamedSharding``.

  Returns:
    A tree like ``tx.init(params)`` of ``NamedSharding``. What has the parameter's shape has its sharding; so do
    scales, along the axes that divide them; everything else is replicated. For ZeRO-1 pass the shardings that the
    state shall have, rather than those of the parameters.
  """
  shardings = jax.tree.leaves(param_shardings)
  if not shardings:
    raise ValueError("param_shardings is empty: give a NamedSharding for each parameter")
  replicated = NamedSharding(shardings[0].mesh, P())
  return optax.tree_utils.tree_map_params(
      tx,
      lambda x, sharding: x if isinstance(x, optax.MaskedNode) else fit(sharding, tuple(x.shape)),
      jax.eval_shape(tx.init, params),
      param_shardings,
      transform_non_params=lambda _: replicated,
      is_leaf=lambda x: isinstance(x, optax.MaskedNode),
  )


# --- gradients ------------------------------------------------------------------------------------------------------


def sums(grads: Sequence[Array], scale: Array, norm: bool, finite: bool) -> tuple[Array, Array]:
  """The sum of squares of all ``grads * scale``, and how many of them have elements that are not finite.

  On a mesh each device adds up what it has, and one reduction of a few numbers does the rest. What is not asked for
  is 0.
  """

  def of_leaf(g: Array, scale: Array) -> list[Array]:
    return [
        *([jnp.sum(jnp.square(g.astype(jnp.float32) * scale))] if norm else []),
        *([jnp.any(~jnp.isfinite(g)).astype(jnp.float32)] if finite else []),
    ]

  def plain(scale, *grads):
    return jnp.stack([x for g in grads for x in of_leaf(g, scale)])

  def partition(mesh, arg_shapes, result_shapes):
    del result_shapes
    given = [x.sharding for x in arg_shapes[1:]]
    cuts = [{a for entry in getattr(s, "spec", ()) for a in _axes(entry)} for s in given]
    names = tuple(a for a in mesh.axis_names if any(a in cut for cut in cuts))

    def on_a_shard(scale, *grads):
      values = []
      for g, cut in zip(grads, cuts, strict=True):
        # Of devices that have the same shard, one speaks.
        twins = [lax.axis_index(a) for a in names if a not in cut]
        values += [jnp.where(sum(twins) == 0, x, 0.0) if twins else x for x in of_leaf(g, scale)]
      return lax.psum(jnp.stack(values), names) if names else jnp.stack(values)

    replicated = NamedSharding(mesh, P())
    return mesh, on_a_shard, replicated, (replicated, *given)

  zero = jnp.float32(0)
  if not grads or not (norm or finite):
    return zero, zero
  dims = [" ".join(f"l{i}d{d}" for d in range(g.ndim)) for i, g in enumerate(grads)]
  per_leaf = _partitioned(plain, partition, lambda _: (f", {', '.join(dims)} -> n", {}))(scale, *grads)
  columns = per_leaf.reshape(len(grads), norm + finite)
  add = lambda column: functools.reduce(jnp.add, [columns[i, column] for i in range(len(grads))])
  return add(0) if norm else zero, add(int(norm)) if finite else zero
