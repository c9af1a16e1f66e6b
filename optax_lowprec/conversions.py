"""Conversions of the optimizer state: to and from float32, optax's states, and other formats.

One leaf at a time, and large ones in pieces, so that the device never holds a second whole state. Public as
``optax_lowprec.checkpoint``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import optax

from optax_lowprec import formats as fmts
from optax_lowprec import state as state_lib
from optax_lowprec.formats import LeafFormats, Part, StateFormat
from optax_lowprec.pieces import assemble
from optax_lowprec.pieces import Index
from optax_lowprec.pieces import pieces
from optax_lowprec.pieces import scale_index
from optax_lowprec.pieces import take
from optax_lowprec.reference import LeafState
from optax_lowprec.sharding import fit

Array = jax.Array
PyTree = Any


# --- small tools ----------------------------------------------------------------------------------------------------


def progress_bar(items: Iterable[Any], total: int, what: str, progress: bool) -> Iterable[Any]:
  """``items`` behind a bar on stderr, if ``progress``.

  Raises:
    ImportError: if tqdm is needed and not there.
  """
  if not progress:
    return items
  try:
    import tqdm
  except ImportError as e:
    raise ImportError("progress=True needs tqdm: pip install 'optax-lowprec[checkpoint]'") from e
  return tqdm.tqdm(items, total=total, desc=what, unit="leaf")


def keys(path: Any) -> tuple[str, ...]:
  """A tree path as Orbax names it: dict keys, fields and indices, all as strings."""
  names = [next(getattr(k, a) for a in ("key", "idx", "name") if hasattr(k, a)) for k in path]
  return tuple(str(n) for n in names)


def _named(tree: PyTree) -> dict[str, Any]:
  return {jax.tree_util.keystr(k): x for k, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def delete(old: Iterable[Any], new: Iterable[Any]) -> None:
  """Frees arrays of ``old`` that are not handed on in ``new``, once ``new`` is there."""
  kept = {id(x) for x in jax.block_until_ready(list(new))}
  for x in old:
    if isinstance(x, jax.Array) and id(x) not in kept and not x.is_deleted():
      x.delete()


def same_meaning(a: StateFormat | None, b: StateFormat | None) -> bool:
  """Whether the same bytes mean the same numbers. How the next step rounds does not matter."""
  if a is None or b is None:
    return a is b
  size = lambda f: f.block_size if f.scaling == "block" else 0
  return (a.dtype, a.scaling, size(a), a.transform) == (b.dtype, b.scaling, size(b), b.transform)


# --- one leaf, to float32 and back ----------------------------------------------------------------------------------


def _is_plain(fmt: StateFormat) -> bool:
  return fmt.dtype == "float32" and fmt.scaling is None and fmt.transform is None


def _nearest(fmt: StateFormat) -> StateFormat:
  return dataclasses.replace(fmt, rounding="nearest")


@functools.partial(jax.jit, static_argnames=("fmt",))
def _decode_jit(q: Array, scale: Array, fmt: StateFormat) -> Array:
  return fmts.decode(q, scale, fmt)


@jax.jit
def _decode_remainder_jit(p: Array, rest: Array) -> Array:
  return fmts.decode_remainder(p, rest)


def _put(x: Any, like: Any, dtype: Any = None) -> Array:
  """On the devices where ``like`` is, cut as it is; an array that is there already is returned itself."""
  sharding = getattr(like, "sharding", None)
  if isinstance(sharding, NamedSharding):
    sharding = fit(sharding, tuple(x.shape))
  if dtype is not None and x.dtype != dtype:
    x = x.astype(dtype)
  if isinstance(x, jax.Array) and (sharding is None or x.sharding.is_equivalent_to(sharding, x.ndim)):
    return x
  return jax.device_put(x, sharding)


def _piece(x: Any, index: Index | None, like: Any, dtype: Any = None) -> Array:
  """A piece of ``x`` where ``like`` is. Of an array on the host, nothing but the piece goes to the device."""
  return _put(take(_put(x, like) if isinstance(x, jax.Array) else x, index), like, dtype)


class _Stored(NamedTuple):
  """A part of a leaf as it is stored: its float32 values are decoded when and where they are needed."""

  part: Part
  p: Any
  leaf: LeafState
  formats: LeafFormats

  @property
  def format(self) -> StateFormat | None:
    return getattr(self.formats, self.part)

  @property
  def is_float32(self) -> bool:
    """Whether what is stored are the values themselves (or those of a float64 leaf)."""
    fmt = self.format
    dtype = self.p.dtype if fmt is None else getattr(self.leaf, self.part).dtype
    return dtype == jnp.float64 or (dtype == jnp.float32 if fmt is None else _is_plain(fmt))


def _values(x: Any, like: Any, index: Index | None = None) -> Array:
  """Float32 values (of float64 leaves, as they are) of a ``_Stored`` or of any kind of array, or a piece of them."""
  if not isinstance(x, _Stored):
    return _piece(x, index, like, jnp.float32)
  fmt = x.format
  if fmt is None:
    return _piece(x.p, index, like, None if x.p.dtype == jnp.float64 else jnp.float32)
  q = _piece(getattr(x.leaf, x.part), index, like)
  if fmt.is_remainder:
    return _decode_remainder_jit(_piece(x.p, index, like), q)
  if x.is_float32:
    return q
  scale = fmts.absent(())
  if fmt.scaling is not None:
    scale = _piece(getattr(x.leaf, f"{x.part}_scale"), scale_index(index, tuple(x.p.shape), fmt), like)
  return _decode_jit(q, scale, fmt)


def _cut(x: Any, like: Any, *formats: StateFormat | None) -> list[Index | None]:
  """The pieces in which ``x`` is read."""
  return pieces(tuple(like.shape), like, [*formats, x.format if isinstance(x, _Stored) else None])


def _map(x: Any, like: Any, f: Callable[[Array], tuple[Array, ...]], results: int = 1) -> list[Array]:
  """Arrays of the leaf's shape, made element by element from the values of ``x``."""
  make = lambda index: [(y, index) for y in f(_values(x, like, index))]
  return assemble(_cut(x, like), [tuple(like.shape)] * results, like, make)


def _read(x: Any, like: Any) -> Array:
  """All values of ``x`` at once."""
  if not isinstance(x, _Stored) or x.is_float32:
    return _values(x, like)
  return _map(x, like, lambda w: (w,))[0]


def _read_to_host(x: _Stored) -> np.ndarray:
  """All values of ``x``, in an array that is the caller's."""
  cut = _cut(x, x.p)
  if len(cut) == 1:
    return np.array(_values(x, x.p))
  out = None
  for index in cut:
    values = _values(x, x.p, index)
    if out is None:
      out = np.empty(x.p.shape, values.dtype)
    out[index] = values
  assert out is not None
  return out


# --- encoding what was decoded --------------------------------------------------------------------------------------
#
# Encoding maps a block's maximum to the largest code. A decoded block's maximum is that code times the scale, rounded,
# so that the scale computed from it may be off in its last places; and with stochastic rounding the maximum may have
# become a neighbour of the largest code. So scales around are tried, and one that gives back every value of a block is
# taken.


def _absmax(x: Array, fmt: StateFormat) -> Array:
  """The largest finite magnitude under each scale, as it is stored."""
  a = jnp.abs(x)
  absmax = fmts.region_max(jnp.where(a < jnp.inf, a, 0.0), fmt)
  return jnp.sqrt(absmax) if fmt.transform == "sqrt" else absmax


def _tops(f: fmts.Float) -> list[float]:
  """Codes that a block's maximum may have had: the largest, and its neighbours."""
  place = 2.0**-f.mantissa * 2.0 ** math.floor(math.log2(f.max_scaled))
  below = f.max_scaled - (place / 2 if f.max_scaled == 2.0 ** round(math.log2(f.max_scaled)) else place)
  return [f.max_scaled, below] + ([f.max_scaled + place] if f.max_scaled + place <= f.max else [])


_OFFSETS = np.asarray([0, 1, -1, 2, -2], np.int32)  # in last places of a scale


def _candidate(i: Array, absmax: Array, fmt: StateFormat) -> Array:
  """The ith scale to try (one number, or one for each scale); the first is the one of ``formats.encode``."""
  inverses = jnp.asarray([1.0 / top for top in _tops(fmt.float)], jnp.float32)
  base = lax.bitcast_convert_type(absmax * inverses[i // len(_OFFSETS)], jnp.int32)
  scale = lax.bitcast_convert_type(base + jnp.asarray(_OFFSETS)[i % len(_OFFSETS)], jnp.float32)
  return fmts.clip_scale(scale, absmax, fmt.float)


def _are_exact(x: Array, absmax: Array, fmt: StateFormat, positive: bool) -> Array:
  """For each candidate and each scale, whether it gives back all values under it."""

  def is_exact(i: Array) -> Array:
    scale = _candidate(i, absmax, fmt)
    back = fmts.decode(*fmts.encode(x, fmt, positive=positive, scale=scale), fmt)
    wrong = (back != x) & ~(jnp.isnan(back) & jnp.isnan(x))
    return fmts.region_max(wrong.astype(jnp.float32), fmt) == 0

  return lax.map(is_exact, jnp.arange(len(_tops(fmt.float)) * len(_OFFSETS)))


def _first_exact(exact: Array, absmax: Array, fmt: StateFormat) -> Array:
  return _candidate(jnp.argmax(exact, axis=0), absmax, fmt)  # where none is, the first


@functools.partial(jax.jit, static_argnames=("fmt", "positive"))
def _encode_jit(x: Array, fmt: StateFormat, positive: bool, scale: Array | None = None) -> tuple[Array, Array]:
  """``formats.encode``, except that values which were decoded from this format are kept exactly."""
  if fmt.scaling is not None and scale is None:
    absmax = _absmax(x, fmt)
    scale = _first_exact(_are_exact(x, absmax, fmt, positive), absmax, fmt)
  return fmts.encode(x, fmt, positive=positive, scale=scale)


_absmax_jit = jax.jit(_absmax, static_argnames=("fmt",))
_are_exact_jit = jax.jit(_are_exact, static_argnames=("fmt", "positive"))
_first_exact_jit = jax.jit(_first_exact, static_argnames=("fmt",))


def _leaf_scale(x: Any, fmt: StateFormat, like: Any, cut: list[Index | None], positive: bool) -> Array:
  """The scale that ``_encode_jit`` chooses for a whole leaf, from its pieces."""

  def over_pieces(f: Callable[[Array], Array], join: Callable[[Array, Array], Array]) -> Array:
    # Waits for each piece, so that its memory is free for the next.
    return functools.reduce(join, (jax.block_until_ready(f(_values(x, like, index))) for index in cut))

  absmax = over_pieces(lambda v: _absmax_jit(v, fmt), jnp.maximum)
  exact = over_pieces(lambda v: _are_exact_jit(v, absmax, fmt, positive), jnp.logical_and)
  return _first_exact_jit(exact, absmax, fmt)


def _encode(x: Any, fmt: StateFormat, like: Any, positive: bool = False) -> tuple[Array, Array | None]:
  """Codes and scales, rounded to nearest, of the values of a ``_Stored`` or of any kind of array."""
  if like.dtype == jnp.float64:
    return _put(_read(x, like) if isinstance(x, _Stored) else x, like, jnp.float64), None
  if _is_plain(fmt):
    return _read(x, like), None
  nearest = _nearest(fmt)
  shape = tuple(like.shape)
  cut = _cut(x, like, fmt)
  if fmt.scaling is None or (fmt.scaling == "tensor" and len(cut) > 1):
    scale = None if fmt.scaling is None else _leaf_scale(x, nearest, like, cut, positive)
    codes = lambda index: [(_encode_jit(_values(x, like, index), nearest, positive, scale)[0], index)]
    return assemble(cut, [shape], like, codes)[0], scale

  def codes_and_scales(index: Index | None) -> list[tuple[Array, Index | None]]:
    q, scale = _encode_jit(_values(x, like, index), nearest, positive)
    return [(q, index), (scale, scale_index(index, shape, fmt))]

  q, scale = assemble(cut, [shape, fmts.scale_shape(shape, fmt)], like, codes_and_scales)
  return q, scale


@functools.partial(jax.jit, static_argnames=("fmt", "dtype"))
def _encode_remainder_jit(w: Array, dtype: Any, fmt: StateFormat) -> tuple[Array, Array]:
  return fmts.encode_remainder(w, dtype, fmt)


@functools.partial(jax.jit, static_argnames=("dtype",))
def _cast_jit(w: Array, dtype: Any) -> Array:
  return fmts.cast_to(w, dtype)


def _cast(x: Any, like: Any, dtype: Any) -> Array:
  """The values of ``x`` in a parameter's dtype."""
  if dtype == jnp.float64 and not isinstance(x, _Stored):
    return _put(x, like, dtype)
  if dtype in (jnp.float32, jnp.float64):
    return _put(_read(x, like), like, dtype)
  return _map(x, like, lambda w: (_cast_jit(w, jnp.dtype(dtype)),))[0]


class _Kept(NamedTuple):
  """A part that is handed on as it is stored."""

  codes: Any
  scale: Any


def _write(p: Any, f: LeafFormats | None, part_of: Callable[[Part], Any]) -> tuple[Any, LeafState]:
  """A leaf's parameter and state from its parts, one after the other.

  ``part_of`` gives float32 values, a ``_Stored``, or a ``_Kept``; for the master, None leaves the parameter as it is.
  """
  shape = tuple(p.shape)
  # An array each: a step cannot donate one buffer twice.
  absent = lambda: _put(fmts.absent(shape), p)
  if f is None:
    return p, LeafState(*(absent() for _ in state_lib.FIELDS))
  new: dict[str, Any] = {}
  for part in state_lib.PARTS:
    fmt = getattr(f, part)
    x = part_of(part)
    q, scale = None, None
    if isinstance(x, _Kept):
      q, scale = x
    elif x is not None and fmt is None:
      p = _cast(x, p, p.dtype)
    elif x is not None and fmt.is_remainder:
      encode = functools.partial(_encode_remainder_jit, dtype=jnp.dtype(p.dtype), fmt=_nearest(fmt))
      p, q = _map(x, p, encode, results=2)
    elif x is not None:
      q, scale = _encode(x, fmt, p, part == "nu")
      if part == "master":
        p = _cast(x, p, p.dtype)
    new[part] = absent() if q is None else _put(q, p)
    new[f"{part}_scale"] = absent() if scale is None or fmt.scaling is None else _put(scale, p)
    # Else the next part's values might be on their way before this one's are freed.
    jax.block_until_ready((p, q))
  return p, LeafState(**new)


# --- what is around our state ---------------------------------------------------------------------------------------


def _is_adam(x: Any, whole_chain: bool = False) -> bool:
  """An ``optax.scale_by_adam`` state; or the tuple of an ``optax.adamw``, whose other states count steps or nothing."""
  if not whole_chain:
    return isinstance(x, optax.ScaleByAdamState)
  if _is_adam(x):
    return True
  if type(x) is not tuple or not x or not _is_adam(x[0]):
    return False
  return all(_is_schedule(y) for y in jax.tree.leaves(x[1:], is_leaf=_is_schedule))


def _is_schedule(x: Any) -> bool:
  return isinstance(x, optax.ScaleByScheduleState)


def _is_ours(x: Any, whole_chain: bool = False) -> bool:
  del whole_chain
  return state_lib.is_state(x)


def _join(
    source: PyTree,
    target: PyTree,
    is_source: Callable[..., bool],
    is_target: Callable[..., bool],
    counts: list[Any],
) -> Callable[[list[Any]], PyTree]:
  """How the states around Adam's go over from one optimizer's state to another's.

  Where both are built alike they are handed on. Else the new optimizer may have none but schedules' counts.

  Returns:
    A function from the list of new Adam states to the whole new state.

  Raises:
    ValueError: if a state would be lost or have to be made up.
  """
  treedef: Any
  fits = False
  whole = False
  for whole in (False, True):
    old, old_def = jax.tree.flatten(source, is_leaf=functools.partial(is_source, whole_chain=whole))
    new, treedef = jax.tree.flatten(target, is_leaf=functools.partial(is_target, whole_chain=whole))
    if old_def == treedef and [is_source(x, whole) for x in old] == [is_target(x, whole) for x in new]:
      for x, y in zip(old, new, strict=True):
        if not is_source(x, whole) and tuple(np.shape(x)) != tuple(y.shape):
          raise ValueError(f"a state beside Adam's has shape {np.shape(x)}, the new optimizer needs {tuple(y.shape)}")
      carried = list(old)
      fits = True
      break
  if not fits:
    whole = False
    new, treedef = jax.tree.flatten(target, is_leaf=lambda x: is_target(x) or _is_schedule(x))
    others = [x for x in new if not is_target(x) and not _is_schedule(x)]
    if others:
      raise ValueError(
          f"the new optimizer has {len(others)} arrays beside Adam's state that the old one has not: wrap both alike"
          " (optax.chain, inject_hyperparams, masked, ...), or convert the inner state alone"
      )
    carried = [optax.ScaleByScheduleState(count=counts[0]) if _is_schedule(x) else x for x in new]
  if whole or not fits:  # schedules' counts are left behind
    for s in jax.tree.leaves(source, is_leaf=_is_schedule):
      if _is_schedule(s) and int(s.count) != int(counts[0]):
        raise ValueError(f"a schedule is at step {int(s.count)}, Adam at step {int(counts[0])}: one count must do")

  def build(states: list[Any]) -> PyTree:
    it, count = iter(states), iter(counts)

    def fill(x: Any) -> Any:
      if not is_target(x, whole):
        return x
      state, n = next(it), next(count)
      if type(x) is tuple:  # optax.adamw's chain
        rest = jax.tree.map(lambda s: optax.ScaleByScheduleState(count=n), x[1:], is_leaf=_is_schedule)
        return (state, *rest)
      return state

    slots = [x if is_target(x, whole) else y for x, y in zip(new, carried, strict=True)]
    return treedef.unflatten([fill(x) for x in slots])

  return build


def _adam_states(opt_state: PyTree) -> list[optax.ScaleByAdamState]:
  found = [x for x in jax.tree.leaves(opt_state, is_leaf=_is_adam) if _is_adam(x)]
  if not found:
    raise ValueError("no state of optax.adam, adamw or scale_by_adam in this optimizer state")
  return found


def _check_names(old: Iterable[str], new: Iterable[str]) -> None:
  old, new = set(old), set(new)
  for name in sorted(old ^ new):
    where = ("old", "new") if name in old else ("new", "old")
    raise ValueError(f"{name or 'the parameter'} is in the {where[0]} optimizer's state and not in the {where[1]} "
                     "one's: they belong to other parameters or are masked otherwise")  # fmt: skip


def _same_number(old: int, new: int) -> None:
  if old != new:
    raise ValueError(f"the old optimizer state has {old} Adam states inside, the new one {new}: they must correspond")


# --- conversions ----------------------------------------------------------------------------------------------------


def from_optax(
    opt_state: PyTree,
    params: PyTree,
    tx: optax.GradientTransformation,
    *,
    donate: bool = False,
    progress: bool = False,
) -> PyTree:
  """A state of ``optax.adamw`` or ``adam`` as one of ours, at the same step.

  Not for use under ``jit``. For a narrower model, cast the parameters first and call ``with_master_params`` after::

    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    state = olp.checkpoint.from_optax(opt_state, narrow, tx)
    narrow, state = olp.with_master_params(state, narrow, params)

  Args:
    opt_state: a state with optax's somewhere inside (chained, injected, masked, ...), of jax or numpy arrays.
    params: the parameters that training goes on with.
    tx: our optimizer, wrapped as the old one is, or in nothing that has a state.
    donate: free each array of the old moments once its successor is written, so that the device never holds more than
      the old state and what one leaf needs.
    progress: show a bar (needs tqdm).

  Returns:
    A state of ``tx``. Moments are rounded to nearest; what formats can hold is kept exactly.

  Raises:
    ValueError: if there is no such state, trees or shapes differ, or states around it would be lost. Then nothing was
      freed.
  """
  adams = _adam_states(opt_state)
  target = jax.eval_shape(tx.init, params)
  ours = state_lib.find_states(target)
  _same_number(len(adams), len(ours))
  work = []
  for adam, s in zip(adams, ours, strict=True):
    mu, nu = _named(adam.mu), _named(adam.nu)
    rows = list(state_lib.leaves_of(s, params))
    _check_names(mu, (name for name, *_ in rows))
    for name, _, p, _, _ in rows:
      if tuple(mu[name].shape) != tuple(p.shape):
        raise ValueError(f"{name or 'the parameter'}: optax's mu has shape {tuple(mu[name].shape)}, the parameter has "
                         f"{tuple(p.shape)}")  # fmt: skip
    work.append((s, adam, [(p, f, mu[name], nu[name]) for name, _, p, _, f in rows]))
  build = _join(opt_state, target, _is_adam, _is_ours, [a.count for a in adams])

  def one(p: Any, f: LeafFormats | None, mu: Any, nu: Any) -> LeafState:
    def part_of(part: Part) -> Any:
      if part != "master":
        return mu if part == "mu" else nu
      if f is None or f.master is None:
        return None
      if f.master.is_remainder:
        return _Kept(jnp.zeros_like(p, dtype=f.master.storage_dtype), None)
      return _Kept(*_encode(p, f.master, p))

    leaf = _write(p, f, part_of)[1]
    if donate:
      delete((mu, nu), leaf)
    return leaf

  rows_of = lambda: ((i, row) for i, (_, _, rows) in enumerate(work) for row in rows)
  leaves: list[list[LeafState]] = [[] for _ in work]
  for i, row in progress_bar(rows_of(), sum(len(w[2]) for w in work), "from optax", progress):
    leaves[i].append(one(*row))
  return build(
      [
          state_lib.replace_leaves(s, new, jnp.asarray(adam.count, jnp.int32))
          for (s, adam, _), new in zip(work, leaves, strict=True)
      ]
  )


def to_optax(
    state: PyTree,
    params: PyTree,
    tx_optax: optax.GradientTransformation,
    *,
    donate: bool = False,
    progress: bool = False,
) -> PyTree:
  """The inverse of :func:`from_optax`. It goes with ``olp.master_params(state, params)`` as parameters.

  Args:
    state: an optimizer state with ours somewhere inside.
    params: the parameters that it belongs to.
    tx_optax: ``optax.adamw`` or ``adam``, wrapped as ours is, or in nothing that has a state.
    donate: free each array of our moments once its successor is written.
    progress: show a bar (needs tqdm).

  Returns:
    A state of ``tx_optax`` for float32 parameters: moments in float32, or ``mu_dtype``.

  Raises:
    ValueError: as :func:`from_optax`.
  """
  ours = state_lib.find_states(state)
  widen = lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32 if _narrow(p) else p.dtype)
  target = jax.eval_shape(tx_optax.init, jax.tree.map(widen, params))
  adams = _adam_states(target)
  _same_number(len(ours), len(adams))
  work = []
  for s, adam in zip(ours, adams, strict=True):
    mu, nu = _named(adam.mu), _named(adam.nu)
    rows = list(state_lib.leaves_of(s, params))
    _check_names((name for name, *_ in rows), mu)
    work.append((s, adam, [(p, leaf, f, mu[name], nu[name]) for name, _, p, leaf, f in rows]))
  build = _join(state, target, _is_ours, _is_adam, [s.count for s in ours])

  def one(p: Any, leaf: LeafState, f: LeafFormats | None, mu: Any, nu: Any) -> tuple[Array, Array]:
    if f is None:
      return jnp.zeros(mu.shape, mu.dtype), jnp.zeros(nu.shape, nu.dtype)
    new = (_cast(_Stored("mu", p, leaf, f), p, mu.dtype), _read(_Stored("nu", p, leaf, f), p))
    if donate:
      delete((leaf.mu, leaf.nu, leaf.mu_scale, leaf.nu_scale), new)
    return new

  rows_of = lambda: ((i, row) for i, (_, _, rows) in enumerate(work) for row in rows)
  pairs: list[list[tuple[Array, Array]]] = [[] for _ in work]
  for i, row in progress_bar(rows_of(), sum(len(w[2]) for w in work), "to optax", progress):
    pairs[i].append(one(*row))
  states = []
  for (s, adam, _), new in zip(work, pairs, strict=True):
    trees = [jax.tree.unflatten(jax.tree.structure(t), [x[i] for x in new]) for i, t in enumerate((adam.mu, adam.nu))]
    states.append(optax.ScaleByAdamState(count=s.count, mu=trees[0], nu=trees[1]))
  return build(states)


def _narrow(p: Any) -> bool:
  return state_lib.is_float(p) and p.dtype != jnp.float64


def convert(
    state: PyTree,
    params: PyTree,
    tx_old: optax.GradientTransformation,
    tx_new: optax.GradientTransformation,
    *,
    donate: bool = False,
    progress: bool = False,
) -> tuple[PyTree, PyTree]:
  """Changes the formats of a state.

  Parts whose format stays are handed on, the same arrays: a step that donates the new state then frees them in the old
  one too. The others are decoded and rounded to nearest, one leaf at a time.

  Args:
    state: a state of ``tx_old``. Its arrays may be numpy's (see :func:`restore`): then the device never holds it.
    params: the parameters that it belongs to.
    tx_old: the optimizer whose state it is.
    tx_new: the optimizer to go on with.
    donate: free each array of the old state once its successor is written. Parameters are never freed.
    progress: show a bar (needs tqdm).

  Returns:
    ``(params, state)`` for ``tx_new``. A parameter changes only where the master's format does: it is then what stands
    for the new master, as with ``with_master_params``.

  Raises:
    ValueError: if the state is not one of ``tx_old``, or the optimizers are not built alike. Then nothing was freed.
  """
  old_target, target = jax.eval_shape(tx_old.init, params), jax.eval_shape(tx_new.init, params)
  olds, news = state_lib.find_states(state), state_lib.find_states(target)
  structure: Any = jax.tree.structure
  if structure(state) != structure(old_target):
    raise ValueError("the state is not one of tx_old: its structure or its formats differ")
  _same_number(len(olds), len(news))
  work = []
  for old, new in zip(olds, news, strict=True):
    by_name = {name: (leaf, f) for name, _, _, leaf, f in state_lib.leaves_of(old, params)}
    rows = list(state_lib.leaves_of(new, params))
    _check_names(by_name, (name for name, *_ in rows))
    work.append((old, new, [(name, p, *by_name[name], f) for name, _, p, _, f in rows]))
  build = _join(state, target, _is_ours, _is_ours, [s.count for s in olds])

  def one(p: Any, leaf: LeafState, f: LeafFormats | None, new_f: LeafFormats | None) -> tuple[Any, LeafState]:
    def part_of(part: Part) -> Any:
      assert f is not None
      if same_meaning(getattr(f, part), getattr(new_f, part)):
        q = None if getattr(f, part) is None else getattr(leaf, part)
        return _Kept(q, getattr(leaf, f"{part}_scale") if q is not None and getattr(f, part).scaling else None)
      return _Stored(part, p, leaf, f)

    new_p, new = _write(p, new_f, part_of)
    if donate:
      delete(leaf, (*new, new_p, p))
    return new_p, new

  rows_of = lambda: ((i, row) for i, (_, _, rows) in enumerate(work) for row in rows)
  new_params: dict[str, Any] = {}
  leaves: list[list[LeafState]] = [[] for _ in work]
  for i, (name, *row) in progress_bar(rows_of(), sum(len(w[2]) for w in work), "convert", progress):
    new_params[name], leaf = one(*row)
    leaves[i].append(leaf)
  states = [state_lib.replace_leaves(new, x, old.count) for (old, new, _), x in zip(work, leaves, strict=True)]
  return state_lib.as_tree(params, new_params, lambda p: p), build(states)


def export_float32(
    state: PyTree, params: PyTree, *, progress: bool = False
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
  """Masters and moments in float32 on the host, one leaf after the other.

  At any time the device holds a piece of one leaf in float32 besides the state, and the host one leaf.

  Args:
    state: an optimizer state with ours somewhere inside.
    params: the parameters that it belongs to.
    progress: show a bar (needs tqdm).

  Returns:
    An iterator over ``(path, {"master": ..., "mu": ..., "nu": ...})``; paths as ``jax.tree_util.keystr`` writes them,
    arrays of the parameter's shape (float64 leaves in float64), which are the caller's. Leaves that our optimizer does
    not handle are not among them.

  Raises:
    ValueError: if our state is not there or belongs to other parameters.
  """
  rows = [row for s in state_lib.find_states(state) for row in state_lib.leaves_of(s, params) if row[4] is not None]

  def leaves() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    for name, _, p, leaf, f in progress_bar(rows, len(rows), "export", progress):
      parts: tuple[Part, ...] = ("master", "mu", "nu")
      yield name, {part: _read_to_host(_Stored(part, p, leaf, f)) for part in parts}

  if progress:
    progress_bar((), 0, "export", True)  # so that a missing tqdm shows here and not at the first leaf
  return leaves()


def import_float32(
    leaves: Iterable[tuple[str, Mapping[str, Any]]],
    params: PyTree,
    tx: optax.GradientTransformation,
    count: Any,
    *,
    progress: bool = False,
) -> tuple[PyTree, PyTree]:
  """The inverse of :func:`export_float32`: a state of ``tx`` from float32 masters and moments.

  Args:
    leaves: ``(path, {"master": ..., "mu": ..., "nu": ...})`` in any order, each leaf of the optimizer once; an iterator
      is read one leaf at a time.
    params: the parameters, whose shapes, dtypes and shardings are taken. Leaves that the optimizer does not handle are
      returned as they are.
    tx: an optimizer with ours somewhere inside, whatever its formats.
    count: the steps taken. It becomes the count of every state that counts steps; other states begin anew.
    progress: show a bar (needs tqdm).

  Returns:
    ``(params, state)``: parameters that stand for the masters, and the state.

  Raises:
    ValueError: for a path that is unknown, missing or there twice, a missing part, another shape, or a negative second
      moment.
  """
  target = jax.eval_shape(tx.init, params)
  wanted: dict[str, tuple[Any, LeafFormats | None]] = {}
  for s in state_lib.find_states(target):
    wanted |= {name: (p, f) for name, _, p, _, f in state_lib.leaves_of(s, params)}
  count = jnp.asarray(count, jnp.int32)
  done = {name: _write(p, None, _no_part) for name, (p, f) in wanted.items() if f is None}
  for name, parts in progress_bar(leaves, len(wanted) - len(done), "import", progress):
    label = name or "the parameter"
    if name not in wanted:
      raise ValueError(f"{label} is no leaf that this optimizer handles")
    if name in done:
      raise ValueError(f"{label} is there twice")
    p, f = wanted[name]
    for part in state_lib.PARTS:
      if part not in parts:
        raise ValueError(f"{label} has no {part!r}; each leaf needs 'master', 'mu' and 'nu'")
      if tuple(parts[part].shape) != tuple(p.shape):
        raise ValueError(f"{label}: {part} has shape {tuple(parts[part].shape)}, the parameter has {tuple(p.shape)}")
    nu = parts["nu"]
    if bool(_any_negative_jit(nu) if isinstance(nu, jax.Array) else (nu < 0).any()):
      raise ValueError(f"{label}: nu has negative values; it is a mean of squares")
    done[name] = _write(p, f, parts.__getitem__)
  for name in wanted:
    if name not in done:
      raise ValueError(f"{name or 'the parameter'} is missing")
  state = _fresh_state(tx, params, target, done, count)
  return state_lib.as_tree(params, {name: p for name, (p, _) in done.items()}, lambda p: p), state


@jax.jit
def _any_negative_jit(x: Array) -> Array:
  return jnp.any(x < 0)


def _no_part(part: Part) -> None:
  del part


def _fresh_state(
    tx: optax.GradientTransformation,
    params: PyTree,
    target: PyTree,
    done: dict[str, tuple[Any, LeafState]],
    count: Array,
) -> PyTree:
  """A whole new state around our leaves, without ever making ours by ``init``."""
  treedef: Any
  flat, treedef = jax.tree_util.tree_flatten_with_path(target, is_leaf=state_lib.is_state)
  others = lambda s: [x for x in jax.tree.leaves(s, is_leaf=state_lib.is_state) if not state_lib.is_state(x)]
  rest: Iterator[Any] = iter(())
  if any(not state_lib.is_state(x) for _, x in flat):
    rest = iter(jax.jit(lambda p: others(tx.init(p)))(params))  # our part of init is dead code to the compiler
  leaves: list[Any] = []
  for path, x in flat:
    if state_lib.is_state(x):
      names = [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_flatten_with_path(x.mu)[0]]
      leaves.append(state_lib.replace_leaves(x, [done[name][1] for name in names], count))
      continue
    value = next(rest)
    counts = bool(path) and keys(path)[-1] == "count" and not x.shape and jnp.issubdtype(x.dtype, jnp.integer)
    leaves.append(count.astype(x.dtype) if counts else value)
  return treedef.unflatten(leaves)
