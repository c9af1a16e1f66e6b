"""The optimizer state: its shape, how it is made, found inside other states, and decoded."""

from collections.abc import Callable, Iterator
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lowprec import formats as fmts
from optax_lowprec import sharding
from optax_lowprec.formats import Formats, LeafFormats, Part
from optax_lowprec.reference import LeafState

Array = jax.Array
PyTree = Any

PARTS: tuple[Part, ...] = ("mu", "nu", "master")
FIELDS = LeafState._fields


class FormatRecord(NamedTuple):
  """A state's formats, as a pytree without leaves.

  States must be decodable by themselves, and every tool that walks a state (optax, flax.serialization, Orbax)
  understands a NamedTuple; so the formats are an attribute of an empty NamedTuple's class, one class for each.
  """


@functools.cache
def format_record(formats: Formats) -> FormatRecord:
  attributes = {
      "__slots__": (),
      "formats": formats,
      "__repr__": lambda self: f"FormatRecord({formats})",
      "__reduce__": lambda self: (format_record, (formats,)),
  }
  return type("FormatRecord", (FormatRecord,), attributes)()


class LowPrecisionAdamState(NamedTuple):
  """State of ``adam``, ``adamw`` and ``scale_by_adam``: parallel trees with the structure of the parameters.

  Attributes:
    count: int32 scalar, steps taken.
    mu: codes of the first moment, each leaf of its parameter's shape.
    nu: codes of the second moment or of its square root.
    master: codes or remainders of the master parameters.
    mu_scale: float32, ``formats.scale_shape`` of the leaf.
    nu_scale: likewise.
    master_scale: likewise.
    formats: a leafless record of the formats.

  A field that no leaf can have under the transform's formats is ``()``. In a field that some leaves have, the others
  (a leaf without scales, or one that is its own master) have zeros of dtype int8: ``formats.absent_shape``.
  """

  count: Array  # type: ignore[assignment]  # (hides tuple.count)
  mu: PyTree
  nu: PyTree
  master: PyTree
  mu_scale: PyTree
  nu_scale: PyTree
  master_scale: PyTree
  formats: Any  # a FormatRecord


def is_state(x: Any) -> bool:
  return isinstance(x, LowPrecisionAdamState)


def is_box(x: Any) -> bool:
  """Flax metadata boxes (``nn.Partitioned``, ``nnx.Variable``) are pytree nodes around one array."""
  return hasattr(x, "unbox") or (hasattr(x, "get_metadata") and hasattr(x, "get_value")) or hasattr(x, "raw_value")


def is_float(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jnp.floating)


def check_leaf(path: Any, leaf: Any) -> None:
  """Refuses parameters that cannot be optimized.

  Raises:
    TypeError: naming the leaf, if it is not an array or has a complex or 8-bit float dtype.
  """
  name = jax.tree_util.keystr(path) or "the parameter"
  if not hasattr(leaf, "dtype"):
    raise TypeError(f"{name} is a {type(leaf).__name__}, not an array: partition it out of the parameters")
  dtype = leaf.dtype
  if jnp.issubdtype(dtype, jnp.complexfloating):
    raise TypeError(f"{name} has dtype {dtype}: complex parameters are not supported; split them (optax.contrib."
                    "split_real_and_imaginary) or leave them to optax.adamw with optax.multi_transform")  # fmt: skip
  if is_float(leaf) and jnp.dtype(dtype).name not in ("float64", "float32", "bfloat16", "float16"):
    raise TypeError(f"{name} has dtype {dtype}: parameters must be float32, bfloat16, float16 or float64")


def absent_fields(formats: Formats) -> frozenset[str]:
  """Fields that no leaf can have, whatever the parameters are."""
  absent = set()
  for part in PARTS:
    spec = getattr(formats, part)
    if part == "master" and (spec is None or spec == "absent"):
      absent |= {"master", "master_scale"}
    elif part == "master" and spec == "auto":
      absent.add("master_scale")
    elif isinstance(spec, fmts.StateFormat) and spec.scaling is None:
      absent.add(f"{part}_scale")
  return frozenset(absent)


# --- init -----------------------------------------------------------------------------------------------------------


def init_leaf(path: Any, p: Any, formats: Formats) -> LeafState:
  """The state of one leaf before the first step: zero moments, the parameter as master."""
  check_leaf(path, p)
  absent = (fmts.ABSENT_DTYPE, fmts.absent_blocks(tuple(p.shape)))
  if not is_float(p):
    return LeafState(*sharding.zeros_like(p, [absent] * len(FIELDS)))

  def scale(f: fmts.StateFormat | None) -> tuple[Any, int | None]:
    return (jnp.float32, f.block_size) if f is not None and f.scaling == "block" else absent

  f = formats.leaf(path, p)
  wide = jnp.dtype(p.dtype) == jnp.float64
  mu, nu = ((p.dtype if wide else x.storage_dtype, None) for x in (f.mu, f.nu))
  master = absent if f.master is None else (f.master.storage_dtype, None)
  leaf = LeafState(*sharding.zeros_like(p, [mu, nu, master, *(scale(x) for x in f)]))
  tensor = {f"{part}_scale": jnp.zeros((), jnp.float32) for part, x in zip(PARTS, f, strict=True)
            if x is not None and x.scaling == "tensor"}  # fmt: skip
  leaf = leaf._replace(**tensor)
  if f.master is None or f.master.is_remainder or isinstance(p, jax.ShapeDtypeStruct):
    return leaf
  nearest = fmts.dataclasses.replace(f.master, rounding="nearest")
  q, master_scale = fmts.encode(jnp.asarray(p).astype(jnp.float32), nearest)
  return leaf._replace(master=q, **({} if f.master.scaling is None else {"master_scale": master_scale}))


def init(params: PyTree, formats: Formats) -> LowPrecisionAdamState:
  treedef: Any
  leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  # Scales have another shape than the parameter, so a box's axis names would not fit them.
  unboxed: Any = jax.tree.structure(params, is_leaf=is_box)
  states = [init_leaf(path, p, formats) for path, p in leaves]
  trees = {}
  absent = absent_fields(formats)
  for i, field in enumerate(FIELDS):
    column = [s[i] for s in states]
    tree = treedef if field in PARTS or unboxed.num_leaves != len(column) else unboxed
    trees[field] = () if field in absent else jax.tree.unflatten(tree, column)
  return LowPrecisionAdamState(count=jnp.zeros([], jnp.int32), formats=format_record(formats), **trees)


# --- leaves ---------------------------------------------------------------------------------------------------------


def leaf_states(state: LowPrecisionAdamState, n: int) -> list[LeafState]:
  """The state's columns as one ``LeafState`` a leaf; None in a field that is absent altogether.

  Raises:
    ValueError: if the state does not have ``n`` leaves.
  """
  absent = absent_fields(state.formats.formats)
  columns = []
  for field in FIELDS:
    column = [None] * n if field in absent else jax.tree.leaves(getattr(state, field))
    if len(column) != n:
      raise ValueError(f"the optimizer state's {field!r} has {len(column)} leaves, the parameters have {n}: "
                       "the state belongs to another tree; make it with init(params)")  # fmt: skip
    columns.append(column)
  return [LeafState(*row) for row in zip(*columns, strict=True)]


def fill_absent(leaf: LeafState, shape: tuple[int, ...]) -> LeafState:
  absent = fmts.absent(shape) if any(x is None for x in leaf) else None
  return LeafState(*(absent if x is None else x for x in leaf))


def replace_leaves(state: LowPrecisionAdamState, leaves: list[LeafState], count: Array) -> LowPrecisionAdamState:
  absent = absent_fields(state.formats.formats)
  trees = {}
  for i, field in enumerate(FIELDS):
    if field not in absent:
      trees[field] = jax.tree.unflatten(jax.tree.structure(getattr(state, field)), [s[i] for s in leaves])
  return state._replace(count=count, **trees)


def _fits(leaf: LeafState, p: Any, f: LeafFormats) -> bool:
  shape = tuple(p.shape)
  wide = jnp.dtype(p.dtype) == jnp.float64
  for q, scale, x in ((leaf.mu, leaf.mu_scale, f.mu), (leaf.nu, leaf.nu_scale, f.nu),
                      (leaf.master, leaf.master_scale, f.master)):  # fmt: skip
    if x is None:
      if q is not None and q.dtype != fmts.ABSENT_DTYPE:
        return False
      continue
    if q is None or tuple(q.shape) != shape or q.dtype != (jnp.float64 if wide else x.storage_dtype):
      return False
    if scale is None:
      if x.scaling is not None:
        return False
    elif x.scaling is None:
      if scale.dtype != fmts.ABSENT_DTYPE:
        return False
    elif scale.dtype != jnp.float32 or tuple(scale.shape) != fmts.scale_shape(shape, x):
      return False
  return True


def stored_formats(path: Any, p: Any, leaf: LeafState, formats: Formats) -> LeafFormats:
  """The formats in which a leaf's state is stored.

  Read off the state, since whether a leaf counts as small was decided on its global shape, and inside ``shard_map``
  only a shard of it is seen.

  Raises:
    ValueError: naming the leaf, if the state fits none of the transform's formats.
  """
  first = formats.leaf(path, p)
  for f in (first, formats.leaf(path, p, small=False), formats.leaf(path, p, small=True)):
    if _fits(leaf, p, f):
      return f
  have = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in zip(FIELDS, leaf, strict=True) if x is not None)
  want = ", ".join(f"{n} {x}" for n, x in zip(PARTS, first, strict=True))
  raise ValueError(
      f"{jax.tree_util.keystr(path) or 'the parameter'} ({p.dtype}{list(p.shape)}): its state ({have}) is not stored in"
      f" this optimizer's formats ({want}); make the state with this optimizer's init"
  )


# --- finding and reading --------------------------------------------------------------------------------------------


def find_states(state: PyTree) -> list[LowPrecisionAdamState]:
  """Our states inside any state (chained, masked, injected, ...), in tree order.

  Raises:
    ValueError: if there is none.
  """
  found = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
  if not found:
    raise ValueError("no optax_lowprec state in this optimizer state: it belongs to another optimizer")
  return found


def leaves_of(
    state: LowPrecisionAdamState, params: PyTree
) -> Iterator[tuple[str, Any, Any, LeafState, LeafFormats | None]]:
  """For each leaf of a state its name, path, parameter, arrays and formats (None: not optimized)."""
  by_path = {jax.tree_util.keystr(k): (k, p) for k, p in jax.tree_util.tree_flatten_with_path(params)[0]}
  paths = [k for k, _ in jax.tree_util.tree_flatten_with_path(state.mu)[0]]
  for path, leaf in zip(paths, leaf_states(state, len(paths)), strict=True):
    name = jax.tree_util.keystr(path)
    if name not in by_path:
      raise ValueError(f"the optimizer state has a leaf {name or '()'} that the parameters do not have")
    p = by_path[name][1]
    f = stored_formats(path, p, leaf, state.formats.formats) if is_float(p) else None
    yield name, path, p, leaf, f


def _collect(state: PyTree, params: PyTree, read: Callable[[Any, LeafState, LeafFormats], Any]) -> dict[str, Any]:
  values: dict[str, Any] = {}
  for s in find_states(state):
    for name, _, p, leaf, f in leaves_of(s, params):
      if f is None:
        continue
      if name in values:
        raise ValueError(f"{name or 'the parameter'} is in two optax_lowprec states: pass one of them")
      values[name] = read(p, fill_absent(leaf, tuple(p.shape)), f)
  return values


def as_tree(params: PyTree, values: dict[str, Any], default: Callable[[Any], Any]) -> PyTree:
  treedef: Any
  leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  return treedef.unflatten([values[k] if (k := jax.tree_util.keystr(path)) in values else default(p)
                            for path, p in leaves])  # fmt: skip


def _read_master(p: Any, leaf: LeafState, f: LeafFormats) -> Array:
  if f.master is None:
    return jnp.asarray(p) if p.dtype == jnp.float64 else jnp.asarray(p).astype(jnp.float32)
  if f.master.is_remainder:
    return fmts.decode_remainder(jnp.asarray(p), leaf.master)
  return fmts.decode(leaf.master, leaf.master_scale, f.master)


def master_params(state: PyTree, params: PyTree) -> PyTree:
  """What the optimizer believes the parameters are, in float32.

  Args:
    state: an optimizer state with ours somewhere inside.
    params: the parameters that it belongs to.

  Returns:
    A tree like ``params``: float32 masters (float64 parameters as they are). Leaves that none of our transforms
    handles are the parameter itself, in float32; integer leaves are returned as they are.

  Raises:
    ValueError: if our state is not there or belongs to other parameters.
  """
  values = _collect(state, params, _read_master)
  narrow = lambda p: jnp.asarray(p).astype(jnp.float32) if is_float(p) and p.dtype != jnp.float64 else p
  return as_tree(params, values, narrow)


def moments(state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
  """The first and second moments, decoded to float32.

  Args:
    state: an optimizer state with ours somewhere inside.
    params: the parameters that it belongs to.

  Returns:
    ``(mu, nu)``, trees like ``params``, without bias correction, as in ``optax.adamw``'s state; leaves that none of
    our transforms handles are ``optax.MaskedNode()``.

  Raises:
    ValueError: if our state is not there or belongs to other parameters.
  """
  read = lambda p, s, f: (fmts.decode(s.mu, s.mu_scale, f.mu), fmts.decode(s.nu, s.nu_scale, f.nu))
  values = _collect(state, params, read)
  trees = [as_tree(params, {k: v[i] for k, v in values.items()}, lambda p: optax.MaskedNode()) for i in range(2)]
  return trees[0], trees[1]


def with_master_params(state: PyTree, params: PyTree, masters: PyTree) -> tuple[PyTree, PyTree]:
  """Puts float32 masters into an optimizer state.

  So that a narrow model made from float32 weights loses nothing::

      params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
      state = tx.init(params)
      params, state = olp.with_master_params(state, params, weights)

  Args:
    state: an optimizer state with ours somewhere inside.
    params: parameters, of the dtypes that the model uses.
    masters: float32 values, a tree like ``params``.

  Returns:
    ``(params, state)``: the parameters that stand for the masters (nearest; with ``"remainder16"``, the tie just
    above an even bfloat16 goes to its odd neighbour) and the state with the masters stored in its formats. Where a
    leaf has no separate master the parameter takes the value itself.

  Raises:
    ValueError: if our state is not there, or a leaf's shape differs.
  """
  given = {jax.tree_util.keystr(k): w for k, w in jax.tree_util.tree_flatten_with_path(masters)[0]}
  new_params: dict[str, Any] = {}

  def one(s: LowPrecisionAdamState) -> LowPrecisionAdamState:
    leaves = []
    for name, _, p, leaf, f in leaves_of(s, params):
      if f is not None:
        w = given.get(name)
        if w is None or tuple(w.shape) != tuple(p.shape):
          shape = "missing" if w is None else f"of shape {tuple(w.shape)}"
          raise ValueError(f"the master of {name or 'the parameter'} is {shape}; it must have shape {tuple(p.shape)}")
        if p.dtype == jnp.float64:
          new_params[name] = jnp.asarray(w, jnp.float64)
        else:
          w = jnp.asarray(w, jnp.float32)
          new_params[name], leaf = _store_master(w, p, leaf, f)
      leaves.append(leaf)
    return replace_leaves(s, leaves, s.count)

  find_states(state)
  new_state = jax.tree.map(lambda x: one(x) if is_state(x) else x, state, is_leaf=is_state)
  return as_tree(params, new_params, lambda p: p), new_state


def _store_master(w: Array, p: Any, leaf: LeafState, f: LeafFormats) -> tuple[Array, LeafState]:
  if f.master is None:
    return fmts.cast_to(w, p.dtype), leaf
  nearest = fmts.dataclasses.replace(f.master, rounding="nearest")
  if f.master.is_remainder:
    p, rest = fmts.encode_remainder(w, p.dtype, nearest)
    return p, leaf._replace(master=rest)
  q, scale = fmts.encode(w, nearest)
  # The master is no alias of the caller's weights, which a donated step would delete.
  leaf = leaf._replace(master=jnp.copy(q) if q is w else q)
  return fmts.cast_to(w, p.dtype), leaf if leaf.master_scale is None else leaf._replace(master_scale=scale)


def storage_bytes(tree: PyTree) -> int:
  return sum(int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
