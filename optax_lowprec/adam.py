"""The Optax transforms, and the fused application of a step."""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lowprec import formats as fmts
from optax_lowprec import implementations
from optax_lowprec import reference
from optax_lowprec import sharding
from optax_lowprec import state as state_lib
from optax_lowprec.formats import Formats
from optax_lowprec.reference import LeafOptions, LeafState
from optax_lowprec.state import LowPrecisionAdamState

Array = jax.Array
PyTree = Any

_DEFAULTS = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0, "weight_decay": 1e-4}


class _Options(NamedTuple):
  """What a transform was made with; everything static but the hyperparameters."""

  formats: Formats
  mask: Any
  nesterov: bool
  direction: bool
  skip_nonfinite: bool
  seed: int
  implementation: str | None


class _StepFlags(NamedTuple):
  """The static part of a whole step, beside the leaves' options."""

  nesterov: bool
  clip: bool
  skip_nonfinite: bool
  seed: int
  implementation: str | None


# --- the public transforms ------------------------------------------------------------------------------------------


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: jax.typing.ArrayLike = 1e-4,
    mask: Any | None = None,
    *,
    nesterov: bool = False,
    mu: Any = "float8_e4m3fn",
    nu: Any = "float8_e4m3fn",
    master: Any = "auto",
    max_grad_norm: jax.typing.ArrayLike | None = None,
    skip_nonfinite: bool = False,
    min_quantized_size: int | None = None,
    seed: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
  """AdamW with low-precision state: ``optax.adamw`` and its arguments first, then what is stored and how.

  Args:
    learning_rate: a scalar or a schedule of the step count.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the denominator, outside the square root.
    eps_root: added to the denominator, inside the square root.
    mu_dtype: where given, ``mu`` in this dtype, unscaled, as in optax.
    weight_decay: strength of the decoupled weight decay.
    mask: a tree of bools, a prefix of the parameters or a callable that makes one of them: where decay applies.
    nesterov: Nesterov momentum.
    mu: how the first moment is stored: a ``StateFormat``, a dtype or its name (with that dtype's default scaling:
      blocks for float8 and float16, none for bfloat16 and float32), or a callable ``(path, leaf) -> one of these``.
    nu: likewise for the second moment; a float8 dtype or name means its square root, and that or bfloat16 means
      stochastic rounding, without which it would not follow small changes. A ``StateFormat`` is taken as it is.
    master: likewise for the master parameters, or ``None`` (the parameters are the master), ``"remainder16"``,
      ``"remainder8"`` (the bits that rounding to a bfloat16 or float16 parameter dropped), or ``"auto"``: ``None``
      for float32 and ``"remainder16"`` for bfloat16 and float16 parameters.
    max_grad_norm: gradients are scaled down to this global norm, as by ``optax.clip_by_global_norm``, without ever
      being written.
    skip_nonfinite: a step with a gradient that is not finite changes nothing, the count included; its updates are 0.
    min_quantized_size: leaves with fewer elements keep float32 moments, and a float32 master where one is needed;
      counted on the global shape. None means 4096.
    seed: of the stochastic rounding. None means 0.
    implementation: ``"cuda"``, ``"cpu"`` or ``"jnp"``; None picks the best one for the platform.

  Returns:
    A ``GradientTransformationExtraArgs``. Its updates have the parameters' dtype. ``update`` takes an extra argument
    ``grad_scale``: gradients are divided by it first (loss scaling). ``apply_gradients`` runs it fused.

  Raises:
    ValueError: if a format is unknown or cannot hold its part, or the implementation is not available.

  Examples:
    >>> import jax.numpy as jnp, optax_lowprec as olp, optax
    >>> tx = optax.chain(optax.clip_by_global_norm(1.0), olp.adamw(3e-4))
    >>> params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
    >>> state = tx.init(params)
    >>> updates, state = tx.update(params, state, params)
    >>> optax.apply_updates(params, updates)["w"].dtype
    dtype(bfloat16)

  References:
    Loshchilov and Hutter, `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, 2019.
  """
  formats = _formats(mu, nu, master, mu_dtype, min_quantized_size)
  hyper = dict(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root, weight_decay=weight_decay)
  options = _options(formats, mask, nesterov, False, skip_nonfinite, seed, implementation)
  return _transform(hyper, max_grad_norm, options)


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
    mu: Any = "float8_e4m3fn",
    nu: Any = "float8_e4m3fn",
    master: Any = "auto",
    max_grad_norm: jax.typing.ArrayLike | None = None,
    skip_nonfinite: bool = False,
    min_quantized_size: int | None = None,
    seed: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Adam with low-precision state: ``optax.adam``'s arguments, then those of :func:`adamw`.

  Args:
    learning_rate: see :func:`adamw`, as for the rest.
    b1: see :func:`adamw`.
    b2: see :func:`adamw`.
    eps: see :func:`adamw`.
    eps_root: see :func:`adamw`.
    mu_dtype: see :func:`adamw`.
    nesterov: see :func:`adamw`.
    mu: see :func:`adamw`.
    nu: see :func:`adamw`.
    master: see :func:`adamw`.
    max_grad_norm: see :func:`adamw`.
    skip_nonfinite: see :func:`adamw`.
    min_quantized_size: see :func:`adamw`.
    seed: see :func:`adamw`.
    implementation: see :func:`adamw`.

  Returns:
    A ``GradientTransformationExtraArgs``, as :func:`adamw`'s.

  References:
    Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2014.
  """
  return adamw(
      learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay=0.0, nesterov=nesterov, mu=mu, nu=nu,
      master=master, max_grad_norm=max_grad_norm, skip_nonfinite=skip_nonfinite,
      min_quantized_size=min_quantized_size, seed=seed, implementation=implementation,
  )  # fmt: skip


def scale_by_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
    mu: Any = "float8_e4m3fn",
    nu: Any = "float8_e4m3fn",
    max_grad_norm: jax.typing.ArrayLike | None = None,
    skip_nonfinite: bool = False,
    min_quantized_size: int | None = None,
    seed: int | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Adam's direction with low-precision moments, for the middle of a chain: ``optax.scale_by_adam``.

  Args:
    b1: see :func:`adamw`, as for the rest.
    b2: see :func:`adamw`.
    eps: see :func:`adamw`.
    eps_root: see :func:`adamw`.
    mu_dtype: see :func:`adamw`.
    nesterov: see :func:`adamw`.
    mu: see :func:`adamw`.
    nu: see :func:`adamw`.
    max_grad_norm: see :func:`adamw`.
    skip_nonfinite: see :func:`adamw`.
    min_quantized_size: see :func:`adamw`.
    seed: see :func:`adamw`.
    implementation: see :func:`adamw`.

  Returns:
    A ``GradientTransformationExtraArgs`` whose updates have the gradients' dtype. It keeps no master and does not
    need ``params``: what follows in the chain decides what becomes of them.
  """
  formats = _formats(mu, nu, "absent", mu_dtype, min_quantized_size)
  hyper = dict(learning_rate=1.0, b1=b1, b2=b2, eps=eps, eps_root=eps_root, weight_decay=0.0)
  options = _options(formats, None, nesterov, True, skip_nonfinite, seed, implementation)
  return _transform(hyper, max_grad_norm, options)


def apply_gradients(
    tx: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any
) -> tuple[PyTree, PyTree]:
  """A step that writes new parameters instead of updates, in one pass.

  Works with any ``tx``. Where ours is the last to touch a leaf (alone, at the end of a chain, masked, in a
  partition) its kernel writes the parameter itself; where something follows it or wraps it in a condition, this is
  ``tx.update`` and ``optax.apply_updates``. The state is the same either way.

  Args:
    tx: a gradient transformation.
    grads: gradients.
    state: ``tx``'s state.
    params: parameters.
    **extra_args: for ``tx.update``.

  Returns:
    ``(new_params, new_state)``.

  Raises:
    ValueError: as ``tx.update``.
  """
  update: Any = tx.update
  if isinstance(tx, optax.GradientTransformationExtraArgs) and _takes_any_argument(update):
    fused = _Fused()
    updates, new_state = update(grads, state, params, **extra_args, _fused=fused)
    new_params = fused.new_params(updates, params)
    if new_params is not None:
      return new_params, new_state
    if not fused.asked:
      return optax.apply_updates(params, updates), new_state
  updates, new_state = update(grads, state, params, **extra_args)
  return optax.apply_updates(params, updates), new_state


# --- fused application ----------------------------------------------------------------------------------------------


def _takes_any_argument(update: Any) -> bool:
  """Whether ``update`` has ``**extra_args``, which not all do that should (``optax.contrib.sam``)."""
  return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(update).parameters.values())


@jax.tree_util.register_static
class _Fused:
  """Passed down through ``update``'s extra arguments to ask our transforms for new parameters as well.

  They return updates as ever, and leave here the new parameter that belongs to each. An update that arrives at the
  end unchanged is proof that nothing touched it on the way: its new parameter stands. What is then not needed of the
  two is dead code to the compiler.
  """

  def __init__(self):
    self._new: dict[int, tuple[Any, Any]] = {}  # id of the update: update, new parameter

  @property
  def asked(self) -> bool:
    return bool(self._new)

  def answer(self, updates: list[Any], new_params: list[Any]) -> None:
    self._new |= {id(u): (u, new) for u, new in zip(updates, new_params, strict=True)}

  def new_params(self, updates: PyTree, params: PyTree) -> PyTree | None:
    """The new parameters, or None if an update was changed after it left us."""
    leaves = jax.tree.leaves(updates)
    treedef: Any
    old, treedef = jax.tree.flatten(params)
    if not self._new or len(old) != len(leaves) or not self._new.keys() <= {id(u) for u in leaves}:
      return None
    return treedef.unflatten([self._new[id(u)][1] if id(u) in self._new else optax.apply_updates(p, u)
                              for p, u in zip(old, leaves, strict=True)])  # fmt: skip


# --- construction ---------------------------------------------------------------------------------------------------


def _formats(mu: Any, nu: Any, master: Any, mu_dtype: Any, min_quantized_size: Any) -> Formats:
  if mu_dtype is not None:
    mu = fmts.StateFormat(mu_dtype, scaling=None)
  if min_quantized_size is None:
    min_quantized_size = fmts.MIN_QUANTIZED_SIZE
  if isinstance(min_quantized_size, bool) or not isinstance(min_quantized_size, (int, np.integer)):
    raise ValueError(f"min_quantized_size must be an integer, not {min_quantized_size!r}: it decides how leaves are "
                     "stored; with inject_hyperparams leave it None or name it in static_args")  # fmt: skip
  return Formats(
      fmts.canonical_format(mu, "mu"),
      fmts.canonical_format(nu, "nu"),
      master if isinstance(master, str) and master == "absent" else fmts.canonical_format(master, "master"),
      int(min_quantized_size),
  )


def _options(
    formats: Formats, mask: Any, nesterov: Any, direction: bool, skip: Any, seed: Any, implementation: Any
) -> _Options:
  if seed is None:
    seed = 0
  if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
    raise ValueError(f"seed must be an integer, not {seed!r}; with inject_hyperparams leave it None or name it in "
                     "static_args")  # fmt: skip
  return _Options(
      formats, mask, bool(nesterov), direction, bool(skip), int(seed), implementations.check(implementation)
  )


def _transform(hyper: dict[str, Any], max_grad_norm: Any, options: _Options) -> optax.GradientTransformationExtraArgs:
  hyper = {k: _widen(k, v) for k, v in hyper.items()}

  def init_fn(params: PyTree) -> LowPrecisionAdamState:
    return state_lib.init(params, options.formats)

  def update_fn(
      updates: PyTree,
      state: LowPrecisionAdamState,
      params: PyTree | None = None,
      *,
      grad_scale: Any = None,
      _fused: _Fused | None = None,
      **extra_args: Any,
  ) -> tuple[PyTree, LowPrecisionAdamState]:
    del extra_args
    arguments = (updates, state, params, hyper, max_grad_norm, grad_scale, options)
    out, new_state = _update(*arguments, fused=False)
    if _fused is not None and not options.direction:
      new_params, new_state = _update(*arguments, fused=True)
      _fused.answer(jax.tree.leaves(out), jax.tree.leaves(new_params))
    return out, new_state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _widen(name: str, value: Any) -> Any:
  """Undoes ``optax.inject_hyperparams``' cast of our defaults to a narrow parameter dtype.

  It casts every hyperparameter to the parameters' dtype, and 0.999 in bfloat16 is 1: nu would never move.
  """
  dtype = getattr(value, "dtype", None)
  if dtype not in (jnp.bfloat16, jnp.float16):
    return value
  wide = jnp.asarray(value).astype(jnp.float32)
  if name not in _DEFAULTS:
    return wide
  default = np.float32(_DEFAULTS[name])
  return jnp.where(wide == default.astype(dtype).astype(np.float32), default, wide)


# --- one update -----------------------------------------------------------------------------------------------------


def _paths(tree: PyTree) -> list[str]:
  return [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _check_same_tree(grads: PyTree, params: PyTree) -> None:
  strip: Any = lambda t: jax.tree.structure(t, is_leaf=state_lib.is_box)
  structure: Any = jax.tree.structure
  if structure(grads) == structure(params) or strip(grads) == strip(params):
    return
  mine, theirs = _paths(grads), _paths(params)
  for name in theirs:
    if name not in mine:
      raise ValueError(f"the gradients have no leaf {name}, which the parameters have: they must be the same tree")
  for name in mine:
    if name not in theirs:
      raise ValueError(
          f"the gradients have a leaf {name}, which the parameters do not have: they must be the same tree"
      )
  raise ValueError(f"gradients and parameters are different trees: {strip(grads)} and {strip(params)}")


def _decay_mask(mask: Any, params: PyTree, n: int) -> list[bool]:
  if mask is None:
    return [True] * n
  tree = mask(params) if callable(mask) else mask
  try:
    full = jax.tree.map(lambda m, sub: jax.tree.map(lambda _: m, sub), tree, params)
  except ValueError as e:
    raise ValueError(f"the mask is neither a tree like the parameters nor a prefix of it: {e}") from None
  return [bool(m) for m in jax.tree.leaves(full)]


def _is_static_zero(x: Any) -> bool:
  return isinstance(x, (int, float, np.number)) and not isinstance(x, bool) and float(x) == 0.0


def _update(
    grads: PyTree,
    state: LowPrecisionAdamState,
    params: PyTree | None,
    hyper: dict[str, Any],
    max_grad_norm: Any,
    grad_scale: Any,
    options: _Options,
    *,
    fused: bool,
) -> tuple[PyTree, LowPrecisionAdamState]:
  if not state_lib.is_state(state):
    raise ValueError(f"expected this transform's state, a LowPrecisionAdamState, not {type(state).__name__}")
  if state.formats != state_lib.format_record(options.formats) or state.formats.formats != options.formats:
    raise ValueError(f"the state is stored as {state.formats.formats}, this optimizer stores {options.formats}")
  if params is None:
    if not options.direction:
      raise ValueError("this optimizer needs the parameters: call tx.update(grads, state, params)")
  else:
    _check_same_tree(grads, params)
  with_path, treedef = jax.tree_util.tree_flatten_with_path(grads)
  paths = [k for k, _ in with_path]
  g = [x for _, x in with_path]
  p = [None] * len(g) if params is None else jax.tree.leaves(params)
  leaves = state_lib.leaf_states(state, len(g))
  decay = _decay_mask(options.mask, grads if params is None else params, len(g))
  if _is_static_zero(hyper["weight_decay"]):
    decay = [False] * len(g)

  live = []  # indices of the leaves that are optimized
  leaf_options = []
  for i, (path, grad, param, leaf) in enumerate(zip(paths, g, p, leaves, strict=True)):
    like = grad if param is None else param
    state_lib.check_leaf(path, like)
    if not state_lib.is_float(like):
      continue
    name = jax.tree_util.keystr(path) or "the parameter"
    if not hasattr(grad, "dtype") or not state_lib.is_float(grad):
      raise TypeError(f"the gradient of {name} has dtype {getattr(grad, 'dtype', type(grad))}; it must be floating")
    if tuple(grad.shape) != tuple(like.shape):
      raise ValueError(f"the gradient of {name} has shape {tuple(grad.shape)}, the parameter {tuple(like.shape)}")
    f = state_lib.stored_formats(path, like, leaf, options.formats)
    live.append(i)
    leaf_options.append(
        LeafOptions(
            formats=f,
            index=i if f.stochastic else 0,
            decay=decay[i],
            nesterov=options.nesterov,
            eps_root=not _is_static_zero(hyper["eps_root"]),
            direction=options.direction,
            fused=fused,
            skippable=options.skip_nonfinite,
            out_dtype=jnp.dtype(grad.dtype if options.direction else like.dtype),
        )
    )

  # 1 - b before b becomes float32: a Python float keeps its digits, as in optax.
  scalars = {**hyper, "one_minus_b1": 1 - hyper["b1"], "one_minus_b2": 1 - hyper["b2"]}
  if callable(scalars["learning_rate"]):
    scalars["learning_rate"] = scalars["learning_rate"](state.count)
  scalars["max_grad_norm"] = 0.0 if max_grad_norm is None else max_grad_norm
  scalars["grad_scale"] = 1.0 if grad_scale is None else grad_scale
  flags = _StepFlags(
      options.nesterov, max_grad_norm is not None, options.skip_nonfinite, options.seed, options.implementation
  )
  out, new_leaves, count = _step(
      [g[i] for i in live],
      [p[i] for i in live],
      [state_lib.fill_absent(leaves[i], tuple(g[i].shape)) for i in live],
      state.count,
      scalars,
      tuple(leaf_options),
      flags,
      tuple(jax.tree_util.keystr(paths[i]) or "the parameter" for i in live),
  )

  result = []
  it = iter(zip(out, new_leaves, strict=True))
  for i, (grad, param) in enumerate(zip(g, p, strict=True)):
    if i in set(live):
      value, leaves[i] = next(it)
    elif fused:
      value = param
    else:
      value = grad if param is None else jnp.zeros_like(param)
    result.append(value)
  new_state = state_lib.replace_leaves(state, leaves, count)
  return jax.tree.unflatten(treedef, result), new_state


@functools.partial(jax.jit, static_argnums=(5, 6, 7), inline=True)
def _step(
    grads: list[Array],
    params: list[Array | None],
    states: list[LeafState],
    count: Array,
    scalars: dict[str, Any],
    leaf_options: tuple[LeafOptions, ...],
    flags: _StepFlags,
    names: tuple[str, ...],
) -> tuple[list[Array], list[LeafState], Array]:
  """One compiled step of all leaves; a jit of its own so that an eager step computes what a jitted one does."""
  wide = [(g.dtype if p is None else p.dtype) == jnp.float64 for g, p in zip(grads, params, strict=True)]
  scale = 1 / jnp.asarray(scalars.pop("grad_scale"), jnp.float32)
  limit = jnp.asarray(scalars.pop("max_grad_norm"), jnp.float32)
  square, not_finite = sharding.sums(grads, scale, flags.clip, flags.skip_nonfinite)
  finite = not_finite == 0
  if flags.clip:
    norm = jnp.sqrt(square)
    scale = scale * jnp.where(norm < limit, 1.0, limit / norm)
  hypers = {}
  for dtype in {jnp.float64 if w else jnp.float32 for w in wide}:
    hypers[dtype] = reference.hyperparameters(
        count,
        **scalars,
        nesterov=flags.nesterov,
        grad_scale=scale,
        skip=~finite,
        key=fmts.noise_key(flags.seed),
        dtype=dtype,
    )
  rows = implementations.tree_step(
      grads,
      params,
      states,
      [hypers[jnp.float64 if w else jnp.float32] for w in wide],
      leaf_options,
      flags.implementation,
      names,
  )
  new_count = jnp.where(finite, optax.safe_increment(count), count)
  return [out for out, _ in rows], [s for _, s in rows], new_count
