"""Saving, restoring and converting the optimizer state, one leaf at a time.

A state is an ordinary pytree, so Orbax and flax.serialization save it bit for bit by themselves. What they do not save
is what its bytes mean, and Orbax casts to whatever dtype it is asked for. Hence the record: a JSON-able dict beside the
arrays, compared before anything is read.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
import numpy as np
import optax

from optax_lowprec import __version__
from optax_lowprec import state as state_lib
from optax_lowprec.conversions import convert
from optax_lowprec.conversions import delete
from optax_lowprec.conversions import export_float32
from optax_lowprec.conversions import from_optax
from optax_lowprec.conversions import import_float32
from optax_lowprec.conversions import keys
from optax_lowprec.conversions import same_meaning
from optax_lowprec.conversions import to_optax
from optax_lowprec.formats import LeafFormats, StateFormat
from optax_lowprec.sharding import fit
from optax_lowprec.state import LowPrecisionAdamState

PyTree = Any

__all__ = [
    "CheckpointError",
    "check",
    "convert",
    "export_float32",
    "from_optax",
    "import_float32",
    "record",
    "restore",
    "save",
    "save_args",
    "to_device",
    "to_host",
    "to_optax",
]

RECORD_VERSION = 1
_RECORD_KEY = "optax_lowprec_record"
_CONVERT = (
    "restore with the optimizer that saved it and change the formats with"
    " optax_lowprec.checkpoint.convert(state, params, tx_old, tx_new)"
)


class CheckpointError(ValueError):
  """A saved state cannot be used: it is damaged, incomplete, too new, or another optimizer's."""


# --- small tools ----------------------------------------------------------------------------------------------------


def orbax() -> Any:
  """Orbax, which is an extra.

  Raises:
    ImportError: if it is not there.
  """
  try:
    import orbax.checkpoint
  except ImportError as e:
    raise ImportError("saving and restoring need Orbax: pip install 'optax-lowprec[checkpoint]'") from e
  return orbax.checkpoint


def _flat(tree: PyTree) -> dict[tuple[str, ...], Any]:
  return {keys(k): x for k, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _states(state: PyTree) -> list[tuple[tuple[str, ...], LowPrecisionAdamState]]:
  state_lib.find_states(state)
  found = jax.tree_util.tree_flatten_with_path(state, is_leaf=state_lib.is_state)[0]
  return [(keys(k), s) for k, s in found if state_lib.is_state(s)]


def _without_empty(tree: PyTree) -> PyTree:
  """Orbax refuses empty arrays."""
  return jax.tree.map(lambda x: None if math.prod(x.shape) == 0 else x, tree)


def _describe(x: Any) -> str:
  return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"


# --- the record -----------------------------------------------------------------------------------------------------


def record(state: PyTree, params: PyTree) -> dict[str, Any]:
  """What the bytes of a state mean: formats, leaf by leaf, with shapes and dtypes of the parameters.

  Save it beside the state (``ocp.args.JsonSave``, a JSON file, a string in a msgpack) and give it to :func:`check`
  before restoring. :func:`save` and :func:`save_args` do that by themselves.

  Args:
    state: an optimizer state with ours somewhere inside, or ``jax.eval_shape`` of one.
    params: the parameters that it belongs to, or their shapes and dtypes.

  Returns:
    A dict of strings, integers, lists and dicts.

  Raises:
    ValueError: if no state of ours is there, or it belongs to other parameters.
  """
  states = []
  for at, s in _states(state):
    leaves = {}
    for name, path, p, _, f in state_lib.leaves_of(s, params):
      entry: dict[str, Any] = {"path": list(keys(path)), "shape": list(p.shape), "dtype": jnp.dtype(p.dtype).name}
      for part in state_lib.PARTS:
        fmt = None if f is None else getattr(f, part)
        entry[part] = None if fmt is None else dataclasses.asdict(fmt)
      leaves[name] = entry
    states.append({"path": list(at), "leaves": leaves})
  return {_RECORD_KEY: RECORD_VERSION, "version": __version__, "states": states}


class SavedLeaf(NamedTuple):
  """One leaf of a record."""

  path: tuple[str, ...]
  shape: tuple[int, ...]
  dtype: str
  formats: LeafFormats | None  # None: not optimized (an integer)


class SavedState(NamedTuple):
  """One state of a record: where it was in the optimizer's state, and its leaves by name."""

  path: tuple[str, ...]
  leaves: dict[str, SavedLeaf]


def parse_record(saved: Any) -> list[SavedState]:
  """Reads a record, trusting nothing in it.

  Raises:
    CheckpointError: if it is none, or a newer version's.
  """
  if not isinstance(saved, Mapping) or _RECORD_KEY not in saved:
    raise CheckpointError("this is no record of optax_lowprec.checkpoint.record")
  version = saved[_RECORD_KEY]
  if not isinstance(version, int) or isinstance(version, bool) or version < 1:
    raise CheckpointError(f"damaged record: its version is {version!r}")
  if version > RECORD_VERSION:
    raise CheckpointError(
        f"the record has version {version}, written by optax_lowprec {str(saved.get('version'))[:32]!r}; this one"
        f" ({__version__}) reads up to version {RECORD_VERSION}: update optax_lowprec"
    )

  def fmt(x: Any) -> StateFormat | None:
    return None if x is None else StateFormat(**{f.name: x[f.name] for f in dataclasses.fields(StateFormat)})

  try:
    states = []
    for s in saved["states"]:
      leaves = {}
      for name, x in s["leaves"].items():
        parts = {part: fmt(x[part]) for part in state_lib.PARTS}
        f = None if parts["mu"] is None or parts["nu"] is None else LeafFormats(**parts)  # type: ignore[arg-type]
        shape = tuple(int(n) for n in x["shape"])
        leaves[str(name)] = SavedLeaf(tuple(map(str, x["path"])), shape, jnp.dtype(x["dtype"]).name, f)
      states.append(SavedState(tuple(map(str, s["path"])), leaves))
  except (AttributeError, KeyError, TypeError, ValueError) as e:
    raise CheckpointError(f"damaged record: {type(e).__name__}: {e}") from e
  return states


def _check_record(saved: Any, abstract: PyTree, params: PyTree) -> None:
  have, want = parse_record(saved), parse_record(record(abstract, params))
  if [s.path for s in have] != [s.path for s in want]:
    show = lambda states: ", ".join("/".join(s.path) or "the root" for s in states)
    raise CheckpointError(f"the checkpoint has low-precision states at {show(have)}, this optimizer at {show(want)}: "
                          "it was saved by another optimizer")  # fmt: skip
  for old, new in zip(have, want, strict=True):
    for name in [*old.leaves, *new.leaves]:
      if name not in new.leaves or name not in old.leaves:
        where = ("saved", "given") if name in old.leaves else ("given", "saved")
        raise CheckpointError(f"{name or 'the parameter'} is in the {where[0]} tree of parameters and not in the "
                              f"{where[1]} one: the checkpoint belongs to another model")  # fmt: skip
      a, b = old.leaves[name], new.leaves[name]
      label = name or "the parameter"
      if a.shape != b.shape:
        raise CheckpointError(f"{label} was saved with shape {a.shape}, the parameter has {b.shape}")
      if a.dtype != b.dtype:
        raise CheckpointError(f"{label} was saved as a {a.dtype} parameter, this one is {b.dtype}: restore it as "
                              "saved, and go on from there with export_float32 and import_float32")  # fmt: skip
      for part in state_lib.PARTS:
        x, y = (None if leaf.formats is None else getattr(leaf.formats, part) for leaf in (a, b))
        if not same_meaning(x, y):
          raise CheckpointError(f"{label}: {part} is saved as {str(x)!r}, this optimizer stores {str(y)!r}; {_CONVERT}")


def _check_arrays(saved: PyTree, abstract: PyTree, what: str) -> None:
  for attribute in ("item_metadata", "tree"):  # Orbax's wrappers
    saved = getattr(saved, attribute, saved)
  have = {k: x for k, x in _flat(saved).items() if hasattr(x, "shape") and math.prod(x.shape)}
  want = {k: x for k, x in _flat(abstract).items() if math.prod(x.shape)}
  for k in [*want, *have]:
    name = "/".join(k)
    if k not in have:
      raise CheckpointError(f"{what}: the checkpoint has no array {name}: it is another optimizer's or model's")
    if k not in want:
      raise CheckpointError(f"{what}: the checkpoint has an array {name} that has no place here: it is another "
                            "optimizer's or model's")  # fmt: skip
    if tuple(have[k].shape) != tuple(want[k].shape) or jnp.dtype(have[k].dtype) != jnp.dtype(want[k].dtype):
      raise CheckpointError(f"{what}: {name} is saved as {_describe(have[k])}, expected is {_describe(want[k])}; if "
                            f"its format differs, {_CONVERT}")  # fmt: skip


def check(saved: Any, tx: optax.GradientTransformation, params: PyTree) -> None:
  """Whether a saved state may be restored into this optimizer; for those who call Orbax or flax themselves.

  Args:
    saved: the record that was saved with it (the better check), or, where there is none, what Orbax says of the
      state's arrays (``StandardCheckpointer().metadata(path)``) or any tree of arrays: then only shapes and dtypes are
      compared.
    tx: the optimizer that is to go on.
    params: its parameters, or their shapes and dtypes.

  Raises:
    CheckpointError: naming the leaf and both formats, shapes or dtypes, where they differ; if the tree is another one;
      if the record is damaged or a newer version's.
  """
  abstract = jax.eval_shape(tx.init, params)
  if isinstance(saved, Mapping) and _RECORD_KEY in saved:
    _check_record(saved, abstract, params)
  else:
    _check_arrays(saved, abstract, "the optimizer state")


# --- Orbax ----------------------------------------------------------------------------------------------------------


def save_args(params: PyTree, state: PyTree) -> Any:
  """Parameters, state and record as one ``ocp.args.Composite``.

  For ``CheckpointManager.save(step, args=...)`` or an ``AsyncCheckpointer``. :func:`restore` reads the directory of
  that step. Empty arrays, which Orbax refuses, are left out.

  Args:
    params: parameters.
    state: the optimizer's state.

  Returns:
    ``ocp.args.Composite(params=StandardSave, state=StandardSave, record=JsonSave)``.

  Raises:
    ValueError: if no state of ours is there, or it belongs to other parameters.
  """
  ocp = orbax()
  return ocp.args.Composite(
      params=ocp.args.StandardSave(_without_empty(params)),
      state=ocp.args.StandardSave(_without_empty(state)),
      record=ocp.args.JsonSave(record(state, params)),
  )


def save(path: str | os.PathLike[str], params: PyTree, state: PyTree) -> None:
  """Saves parameters and optimizer state with their record, by Orbax, and waits until they are written.

  Orbax writes beside ``path`` and renames at the end: a process that dies leaves no half-written ``path``.

  Args:
    path: a directory that does not exist yet.
    params: parameters.
    state: the optimizer's state.

  Raises:
    CheckpointError: if ``path`` exists.
    ValueError: if no state of ours is in ``state``, or it belongs to other parameters.
  """
  ocp = orbax()
  path = os.path.abspath(path)
  if os.path.lexists(path):
    # To overwrite means to delete first, and then there is a moment without any checkpoint.
    raise CheckpointError(f"{path} exists: save each checkpoint into a directory of its own and delete old ones after")
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
    checkpointer.save(path, save_args(params, state))


def restore(
    path: str | os.PathLike[str], tx: optax.GradientTransformation, params_like: PyTree
) -> tuple[PyTree, PyTree]:
  """Restores what :func:`save` or :func:`save_args` wrote, bit for bit.

  The record and Orbax's metadata are compared with what is expected before any array is read.

  Args:
    path: the directory (of one step, with a ``CheckpointManager``).
    tx: the optimizer that goes on.
    params_like: a tree like the parameters, of arrays or of ``jax.ShapeDtypeStruct``, with the shardings (another
      mesh's or memory kind's too) that they are to have; the state takes those of its parameters. Arrays are not read,
      so pass shapes and keep the memory free. Where a leaf is a numpy array, it and its state are restored to host
      memory.

  Returns:
    ``(params, state)``.

  Raises:
    CheckpointError: if there is no complete checkpoint or it is damaged; if it was written by a newer version; or
      if its tree, shapes, dtypes or formats are not those of ``tx`` and ``params_like``: the leaf and both formats are
      named.
  """
  ocp = orbax()
  path = os.path.abspath(path)
  saved = read_record(path)
  params, state = _restore_targets(tx, params_like)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
  _check_record(saved, shapes[1], shapes[0])
  with reading(path):
    for what, tree in (("params", shapes[0]), ("state", shapes[1])):
      _check_arrays(read_metadata(path, what), tree, what)
    with ocp.Checkpointer(_handler()) as checkpointer:
      args = ocp.args.Composite(
          params=ocp.args.StandardRestore(_without_empty(params)), state=ocp.args.StandardRestore(_without_empty(state))
      )
      found = checkpointer.restore(path, args)
      restored = jax.block_until_ready((found["params"], found["state"]))
  # Built like what was asked for: nodes without leaves, such as our record of formats, are in no file.
  treedef: Any
  likes, treedef = jax.tree.flatten((params, state))
  it = iter(jax.tree.leaves(restored))
  out = treedef.unflatten([next(it) if math.prod(like.shape) else _empty(like) for like in likes])
  for x, like in zip(jax.tree.leaves(out), likes, strict=True):
    if _describe(x) != _describe(like):
      raise CheckpointError(f"{path} gave {_describe(x)} where {_describe(like)} was asked for")
  return out


def _empty(like: Any) -> Any:
  if isinstance(like, np.ndarray):
    return np.zeros(like.shape, like.dtype)
  return jax.device_put(jnp.zeros(like.shape, like.dtype), like.sharding)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
  """Turns whatever a reader raises on broken files into one error that says so."""
  try:
    yield
  except (CheckpointError, ImportError, MemoryError):
    raise
  except Exception as e:
    text = f"{type(e).__name__}: {e}"
    text = text if len(text) < 500 else text[:500] + "..."
    raise CheckpointError(f"{path} cannot be read, so it is incomplete or damaged: {text}") from e


def _handler() -> Any:
  ocp = orbax()
  standard = ocp.StandardCheckpointHandler
  return ocp.CompositeCheckpointHandler(params=standard(), state=standard(), record=ocp.JsonCheckpointHandler())


def read_record(path: str | os.PathLike[str]) -> Any:
  """The record of a saved checkpoint, unchecked.

  Raises:
    CheckpointError: if the directory is missing, incomplete or damaged, or has no record.
  """
  ocp = orbax()
  path = os.path.abspath(path)
  if not os.path.isdir(path):
    raise CheckpointError(f"there is no checkpoint at {path}: no such directory")
  if not os.path.isdir(os.path.join(path, "record")):
    raise CheckpointError(f"{path} has no record of optax_lowprec: it was written by something else than "
                          "optax_lowprec.checkpoint.save or save_args")  # fmt: skip
  with reading(path):
    if not ocp.utils.is_checkpoint_finalized(path):
      raise CheckpointError(f"{path} is incomplete: it was interrupted while being written")
    with ocp.Checkpointer(_handler()) as checkpointer:
      return checkpointer.restore(path, ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]


def read_metadata(path: str | os.PathLike[str], item: str) -> PyTree:
  """Shapes and dtypes of an item's arrays, as Orbax keeps them: a tree of dicts and lists."""
  ocp = orbax()
  with ocp.Checkpointer(_handler()) as checkpointer:
    return checkpointer.metadata(os.path.abspath(path)).item_metadata[item].tree


def _restore_targets(tx: optax.GradientTransformation, params_like: PyTree) -> tuple[PyTree, PyTree]:
  """What Orbax is asked for: shapes with shardings, or numpy arrays (of one element's memory) for the host."""
  shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params_like)
  state = jax.eval_shape(tx.init, shapes)
  likes = {keys(k): p for k, p in jax.tree_util.tree_flatten_with_path(params_like)[0]}
  default = SingleDeviceSharding(jax.local_devices()[0])

  def target(x: Any, like: Any, sharding: Any = None) -> Any:
    if isinstance(like, np.ndarray):
      return np.broadcast_to(np.zeros((), x.dtype), x.shape)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or getattr(like, "sharding", None) or default)

  def beside(x: Any, like: Any, is_scale: bool = False) -> Any:
    """What is not of its parameter's shape: scales, counts."""
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding):
      return target(x, like)
    if not is_scale:
      sharding = NamedSharding(sharding.mesh, P(), memory_kind=sharding.memory_kind)
    return target(x, like, fit(sharding, tuple(x.shape)))

  any_like = next(iter(likes.values()), None)

  def one(path: Any, x: Any) -> Any:
    # Every mirrored leaf ends in its parameter's path (scales lack the box that their parameter may have).
    at = keys(path)
    for i in range(len(at) + 1):
      like = likes.get(at[i:], likes.get((*at[i:], "value")))
      if like is not None:
        same = tuple(like.shape) == tuple(x.shape)
        return target(x, like) if same else beside(x, like, is_scale=True)
    return beside(x, any_like)

  return jax.tree.map(lambda p: target(p, p), params_like), jax.tree_util.tree_map_with_path(one, state)


# --- host memory ----------------------------------------------------------------------------------------------------


def to_host(tree: PyTree, *, donate: bool = False) -> PyTree:
  """Moves arrays to the host's pinned memory, from where they return fast; shardings stay.

  Args:
    tree: a state, or any tree. Leaves that are not jax arrays are returned as they are.
    donate: free each array on the device as soon as it is on the host.

  Returns:
    The tree, with ``pinned_host`` as its arrays' memory kind.

  Raises:
    ValueError: if the platform has no such memory; nothing was moved.
  """
  return _move(tree, "pinned_host", donate)


def to_device(tree: PyTree, *, donate: bool = False) -> PyTree:
  """Moves arrays back to the device's own memory: the inverse of :func:`to_host`.

  Args:
    tree: a state, or any tree.
    donate: free each array on the host as soon as it is on the device.

  Returns:
    The tree, with the device's default memory kind.

  Raises:
    ValueError: if a device has no memory of its own; nothing was moved.
  """
  return _move(tree, None, donate)


def _move(tree: PyTree, kind: str | None, donate: bool) -> PyTree:
  def sharding(x: Any) -> Any:
    device = next(iter(x.sharding.device_set))
    wanted = device.default_memory().kind if kind is None else kind
    there = [m.kind for m in device.addressable_memories()]
    if wanted not in there:
      raise ValueError(f"{device.platform} devices have no {wanted} memory in this jax (only {', '.join(there)}); "
                       "keep the state on the device, or on the host as numpy arrays (jax.device_get)")  # fmt: skip
    return x.sharding.with_memory_kind(wanted)

  shardings = [sharding(x) if isinstance(x, jax.Array) else None for x in jax.tree.leaves(tree)]

  def one(x: Any, s: Any) -> Any:
    if s is None or x.sharding == s:
      return x
    new = jax.device_put(x, s)
    if donate:
      delete((x,), (new,))
    return new

  treedef: Any
  leaves, treedef = jax.tree.flatten(tree)
  return treedef.unflatten([one(x, s) for x, s in zip(leaves, shardings, strict=True)])
