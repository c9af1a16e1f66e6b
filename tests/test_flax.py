"""With Flax and with trees in Equinox's manner: train states, boxes, filters, loss scaling, whole scripts."""

import argparse
import functools
import inspect
import pathlib

import chex
from conftest import runnable_implementations
import flax
from flax import nnx
import flax.linen as nn
from flax.training import dynamic_scale
from flax.training import train_state
import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import table

import optax_lowprec as olp
from optax_lowprec import flax as olp_flax

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(128, 32)).astype(np.float32)
Y = np.tanh(X @ _RNG.normal(size=(32, 4)).astype(np.float32) * 0.3)


# What is the same for every implementation is tried with one.
ONE = pytest.mark.parametrize("implementation", runnable_implementations()[:1])


def _mlp(dtype="float32", width=96, **kernel):
  dense = functools.partial(nn.Dense, dtype=dtype, param_dtype=dtype)
  return nn.Sequential([dense(width, **kernel), nn.tanh, dense(4)])


def _loss_of(model):
  return lambda params: jnp.mean(jnp.square(model.apply({"params": params}, X).astype(jnp.float32) - Y))


def _train_state(kind, tx, model=None):
  model = _mlp() if model is None else model
  params = jax.jit(model.init)(jax.random.key(0), X)["params"]
  return kind.create(apply_fn=model.apply, params=params, tx=tx), _loss_of(model)


def _adamw(implementation, **keywords):
  return olp.adamw(1e-2, min_quantized_size=0, implementation=implementation, **keywords)


# --- linen ----------------------------------------------------------------------------------------------------------


@ONE
def test_train_state_is_a_drop_in(implementation):
  """Flax's own and ours: the same trees and, with float32 parameters, bits; a checkpoint of one fits the other."""
  ends = []
  for kind in (train_state.TrainState, olp_flax.TrainState):
    state, loss = _train_state(kind, optax.chain(optax.clip_by_global_norm(1.0), _adamw(implementation)))
    step = jax.jit(lambda s, loss=loss: s.apply_gradients(grads=jax.grad(loss)(s.params)))
    ends.append(functools.reduce(lambda s, _: step(s), range(3), state))
  theirs, ours = ends
  assert isinstance(ours, train_state.TrainState)
  assert int(ours.step) == int(theirs.step) == 3
  table.assert_same_bits((ours.params, ours.opt_state), (theirs.params, theirs.opt_state))
  for saved, target in ((theirs, ours), (ours, theirs)):
    restored = flax.serialization.from_bytes(target, flax.serialization.to_bytes(saved))
    assert type(restored) is type(target)
    table.assert_same_bits((restored.params, restored.opt_state), (saved.params, saved.opt_state))


@ONE
def test_train_state_takes_the_fused_path(implementation):
  """A bfloat16 parameter that the step writes is its float32 master rounded; p + u would miss it somewhere."""
  tx = _adamw(implementation, master="float32")
  state, loss = _train_state(olp_flax.TrainState, tx, _mlp("bfloat16"))
  step = jax.jit(lambda s: s.apply_gradients(grads=jax.grad(loss)(s.params)))
  state = functools.reduce(lambda s, _: step(s), range(4), state)
  masters = olp.master_params(state.opt_state, state.params)
  chex.assert_trees_all_equal(state.params, jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters))


@ONE
def test_train_state_subclasses_and_extra_fields(implementation):
  """Further fields are replaced in the same call, as in Flax's documentation of batch statistics."""

  class State(olp_flax.TrainState):
    batch_stats: dict

  params = {"w": jnp.ones((4, 64))}
  state = State.create(apply_fn=None, params=params, tx=_adamw(implementation), batch_stats={"mean": jnp.zeros(3)})
  new = jax.jit(lambda s: s.apply_gradients(grads=s.params, batch_stats={"mean": jnp.ones(3)}))(state)
  assert float(new.batch_stats["mean"][0]) == 1 and int(new.step) == 1
  assert float(new.params["w"].max()) < 1


@ONE
def test_overwritten_with_gradient(implementation):
  """Flax's float8 scales are not optimized: their "gradient" is their new value."""
  key = "_overwrite_with_gradient"
  params = {"params": {"w": jnp.ones((4, 64))}, key: {"scale": jnp.ones(2)}}
  tx = _adamw(implementation)
  state = olp_flax.TrainState(step=0, apply_fn=None, params=params, tx=tx, opt_state=tx.init(params["params"]))
  grads = {"params": {"w": jnp.ones((4, 64))}, key: {"scale": jnp.full(2, 7.0)}}
  theirs = train_state.TrainState(step=0, apply_fn=None, params=params, tx=tx, opt_state=tx.init(params["params"]))
  new, right = state.apply_gradients(grads=grads), theirs.apply_gradients(grads=grads)
  table.assert_same_bits((new.params, new.opt_state), (right.params, right.opt_state))
  assert float(new.params[key]["scale"][0]) == 7


BOXES = {
    "Partitioned": (lambda init: nn.with_partitioning(init, ("in", "out")), nn.Partitioned),
    "LogicallyPartitioned": (lambda init: nn.with_logical_partitioning(init, ("in", "out")), nn.LogicallyPartitioned),
}


@ONE
@pytest.mark.parametrize(
    "box, kind", [("Partitioned", train_state.TrainState), *((box, olp_flax.TrainState) for box in BOXES)]
)
def test_boxed_parameters_survive(box, kind, implementation):
  """Boxes and their names are there after a step, around moments too, and make no difference to the numbers."""
  wrap, cls = BOXES[box]
  init = nn.initializers.lecun_normal()
  ends = {}
  for name, kernel_init in (("boxed", wrap(init)), ("bare", init)):
    state, loss = _train_state(kind, _adamw(implementation), _mlp(kernel_init=kernel_init))
    step = jax.jit(lambda s, loss=loss: s.apply_gradients(grads=jax.grad(loss)(s.params)))
    ends[name] = (start, new) = state, step(step(state))
    assert jax.tree.structure(new.params) == jax.tree.structure(start.params)
    assert table.shapes_and_dtypes(new.opt_state) == table.shapes_and_dtypes(start.opt_state)
  boxed = ends["boxed"][1]
  for tree in (boxed.params, boxed.opt_state.mu, boxed.opt_state.nu):
    kernel = tree["layers_0"]["kernel"]
    assert isinstance(kernel, cls) and kernel.names == ("in", "out")
  assert nn.get_partition_spec(boxed.params)["layers_0"]["kernel"] == jax.sharding.PartitionSpec("in", "out")
  bare = ends["bare"][1]
  table.assert_same_bits(*(jax.tree.leaves((s.params, s.opt_state)) for s in (boxed, bare)))


# --- nnx ------------------------------------------------------------------------------------------------------------


class Adapter(nnx.Param):
  """Parameters that are fine-tuned."""


class Model(nnx.Module):

  def __init__(self, rngs):
    tagged = nnx.with_metadata(nnx.initializers.lecun_normal(), tag="kernel of the body")
    self.body = nnx.Linear(32, 96, kernel_init=tagged, rngs=rngs)
    self.adapter = Adapter(jnp.zeros((96, 4)))
    self.head = nnx.Linear(96, 4, rngs=rngs)

  def __call__(self, x):
    x = jnp.tanh(self.body(x))
    return self.head(x) + x @ self.adapter[...]


def _nnx_loss(model):
  return jnp.mean(jnp.square(model(X) - Y))


def _nnx_train(kind, tx, wrt=nnx.Param, steps=3, **extra):
  model = Model(nnx.Rngs(0))
  optimizer = kind(model, tx, wrt=wrt)

  @nnx.jit
  def step(model, optimizer):
    loss, grads = nnx.value_and_grad(_nnx_loss, argnums=nnx.DiffState(0, wrt))(model)
    optimizer.update(model, grads, **extra)
    return loss

  losses = [float(step(model, optimizer)) for _ in range(steps)]
  return model, optimizer, losses


def _arrays(tree):
  return jax.tree.leaves(nnx.state(tree))


@ONE
def test_nnx_optimizer_is_a_drop_in(implementation):
  """nnx's own and ours: the same state and, with float32 parameters, bits."""
  tx = optax.chain(optax.clip_by_global_norm(1.0), _adamw(implementation))
  theirs, their_optimizer, losses = _nnx_train(nnx.Optimizer, tx)
  ours, our_optimizer, our_losses = _nnx_train(olp_flax.Optimizer, tx)
  assert isinstance(our_optimizer, nnx.Optimizer) and int(our_optimizer.step[...]) == 3
  assert our_losses == losses and losses[-1] < losses[0]
  table.assert_same_bits(_arrays(ours), _arrays(theirs))
  table.assert_same_bits(_arrays(our_optimizer), _arrays(their_optimizer))
  assert jax.tree.structure(nnx.state(our_optimizer)) == jax.tree.structure(nnx.state(their_optimizer))


@ONE
@pytest.mark.parametrize("kind", [nnx.Optimizer, olp_flax.Optimizer], ids=["flax", "ours"])
def test_nnx_metadata_survives(kind, implementation):
  """A Variable's type and metadata, in the model and on its moments."""
  model, optimizer, _ = _nnx_train(kind, _adamw(implementation))
  assert model.body.kernel.get_metadata()["tag"] == "kernel of the body"
  assert type(model.adapter) is Adapter and type(model.body.kernel) is nnx.Param
  for part in (optimizer.opt_state.mu, optimizer.opt_state.nu):
    assert part["body"]["kernel"].get_metadata()["tag"] == "kernel of the body"


FILTERS = {
    "by_type": (Adapter, {"adapter"}),
    "by_path": (nnx.All(nnx.Param, nnx.PathContains("head")), {"head"}),
    "all_but": (nnx.All(nnx.Param, nnx.Not(nnx.PathContains("body"))), {"adapter", "head"}),
}


@ONE
@pytest.mark.parametrize("wrt", FILTERS)
@pytest.mark.parametrize("kind", [nnx.Optimizer, olp_flax.Optimizer], ids=["flax", "ours"])
def test_nnx_wrt_filters(wrt, kind, implementation):
  """Only what the filter chooses has a state and moves."""
  wrt, chosen = FILTERS[wrt]
  start = Model(nnx.Rngs(0))
  model, optimizer, losses = _nnx_train(kind, _adamw(implementation), wrt)
  assert losses[-1] < losses[0]
  for name in ("adapter", "body", "head"):
    pairs = zip(*(_arrays(getattr(m, name)) if name != "adapter" else [m.adapter[...]] for m in (model, start)),
                strict=True)  # fmt: skip
    assert all(bool((a != b).any()) == (name in chosen) for a, b in pairs), name
  assert set(nnx.to_pure_dict(nnx.state(optimizer.opt_state))["mu"]) == chosen


@ONE
def test_nnx_extra_arguments(implementation):
  """``grad_scale`` reaches the step."""
  tx = _adamw(implementation, max_grad_norm=1.0)
  model, _, _ = _nnx_train(olp_flax.Optimizer, tx, grad_scale=jnp.float32(8.0))
  right, _, _ = _nnx_train(nnx.Optimizer, tx, grad_scale=jnp.float32(8.0))
  other, _, _ = _nnx_train(nnx.Optimizer, tx)
  table.assert_same_bits(_arrays(model), _arrays(right))
  assert any((a != b).any() for a, b in zip(_arrays(model), _arrays(other), strict=True))


# --- loss scaling ---------------------------------------------------------------------------------------------------


@ONE
def test_dynamic_scale_with_float16(implementation):
  """Flax's ``DynamicScale`` selects the old state at an overflow; ``grad_scale`` and ``skip_nonfinite`` do the same.

  With them gradients go to the step as float16 and scaled: no float32 copy of them is written.
  """
  tx = _adamw(implementation, skip_nonfinite=True)
  start, loss = _train_state(olp_flax.TrainState, tx, _mlp("float16"))
  scales = [2.0**10, 2.0**40, 2.0**10, 2.0**10]  # the second overflows

  @jax.jit
  def by_flax(state, scale):
    # The factor is in the loss, in float16 past the model: so its gradients overflow there.
    result = dynamic_scale.DynamicScale(scale=scale).value_and_grad(loss)(state.params)
    new = state.apply_gradients(grads=result.grad)
    select = functools.partial(jnp.where, result.finite)
    return (
        new.replace(
            params=jax.tree.map(select, new.params, state.params),
            opt_state=jax.tree.map(select, new.opt_state, state.opt_state),
        ),
        result.finite,
    )

  @jax.jit
  def by_grad_scale(state, scale):
    grads = jax.grad(lambda p: scale * loss(p))(state.params)
    assert all(g.dtype == jnp.float16 for g in jax.tree.leaves(grads))
    return state.apply_gradients(grads=grads, extra_args={"grad_scale": scale})

  one = two = start
  finite = []
  for scale in scales:
    one, good = by_flax(one, jnp.float32(scale))
    two = by_grad_scale(two, jnp.float32(scale))
    finite.append(bool(good))
    assert int(two.opt_state.count) == int(one.opt_state.count) == sum(finite)
  assert finite == [True, False, True, True]
  # Powers of two: unscaling is exact, in float32 as in the kernel.
  if jax.default_backend() == "cpu":
    table.assert_same_bits((two.params, two.opt_state), (one.params, one.opt_state))
  else:  # there XLA computes the gradients of the two programs in different orders
    chex.assert_trees_all_close(two.params, one.params, rtol=0, atol=2e-3)
  chex.assert_tree_all_finite(two.params)
  assert float(loss(two.params)) < float(loss(start.params))


# --- trees in Equinox's manner --------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class Layer:
  """A module that is a pytree: arrays, an activation function, and a bias that may be None."""

  def __init__(self, weight, bias, activation):
    self.weight, self.bias, self.activation = weight, bias, activation

  def tree_flatten(self):
    return (self.weight, self.bias, self.activation), None

  @classmethod
  def tree_unflatten(cls, _, children):
    return cls(*children)

  def __call__(self, x):
    x = x @ self.weight
    return self.activation(x if self.bias is None else x + self.bias)


def _partition(tree, keep):
  """Two trees: leaves that are kept, and the others; None in place of what is in the other."""
  return (jax.tree.map(lambda x: x if keep(x) else None, tree), jax.tree.map(lambda x: None if keep(x) else x, tree))


def _combine(a, b):
  return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=lambda x: x is None)


def _layers(dtype=jnp.float32):
  w = lambda *s, seed: jnp.asarray(np.random.default_rng(seed).normal(size=s) * s[0] ** -0.5, dtype)
  return [Layer(w(32, 96, seed=1), jnp.zeros(96, dtype), jnp.tanh), Layer(w(96, 4, seed=2), None, lambda x: x)]


@ONE
@pytest.mark.parametrize("fused", [False, True], ids=["chain", "fused"])
def test_modules_that_are_trees(fused, implementation):
  """Callables and None leaves go to the static half; what trains is what bare arrays would."""
  is_array = lambda x: isinstance(x, jax.Array)
  arrays, static = _partition(_layers(), is_array)
  loss = lambda arrays: jnp.mean(jnp.square(_combine(arrays, static)[1](_combine(arrays, static)[0](X)) - Y))
  tx = _adamw(implementation)
  start = loss(arrays)
  new, state = table.run_steps(tx, arrays, lambda t, p: jax.grad(loss)(p), 3, "jit", fused)
  assert jax.tree.structure(new) == jax.tree.structure(arrays) and new[1].bias is None
  assert loss(new) < start and state.mu[0].activation is None
  bare = lambda p: [p[0].weight, p[0].bias, p[1].weight]
  unbare = lambda a: [Layer(a[0], a[1], None), Layer(a[2], None, None)]
  right, _ = table.run_steps(tx, bare(arrays), lambda t, p: bare(jax.grad(loss)(unbare(p))), 3, "jit", fused)
  table.assert_same_bits(bare(new), right)
  assert jax.tree.structure(olp.master_params(state, new)) == jax.tree.structure(new)
  with pytest.raises(TypeError, match="not an array"):
    tx.init(_layers())


@ONE
def test_a_frozen_part_by_filter(implementation):
  """Only the last layer is optimized: the rest is static, with no state."""
  model = _layers()
  last = {id(model[1].weight)}
  arrays, static = _partition(model, lambda x: id(x) in last)
  loss = lambda arrays: jnp.mean(jnp.square(_combine(arrays, static)[1](_combine(arrays, static)[0](X)) - Y))
  new, state = table.run_steps(_adamw(implementation), arrays, lambda t, p: jax.grad(loss)(p), 3, "jit", True)
  assert len(jax.tree.leaves(state.mu)) == 1 and loss(new) < loss(arrays)


# --- transformations ------------------------------------------------------------------------------------------------


def _step_of_leaves(implementation):
  """A step on flat lists, as one exports it: ``jax.export`` stores no NamedTuple that it has not been told of."""
  params = table.tree({"w": (4, 160), "b": (7,)})
  tx = _adamw(implementation)
  leaves, treedef = jax.tree.flatten((params, tx.init(params), params))

  def step(*leaves):
    grads, state, params = jax.tree.unflatten(treedef, leaves)
    return jax.tree.leaves(olp.apply_gradients(tx, grads, state, params))

  return step, leaves


def test_export(implementation):
  """jnp exports; a kernel's call has no compatibility guarantee in JAX, which says so until told otherwise."""
  step, leaves = _step_of_leaves(implementation)
  checks = []
  if implementation != "jnp":
    with pytest.raises(ValueError, match=f"optax_lowprec_{implementation}_step"):
      export.export(jax.jit(step))(*leaves)
    checks = [export.DisabledSafetyCheck.custom_call(f"optax_lowprec_{implementation}_step")]
  exported = export.export(jax.jit(step), disabled_checks=checks)(*leaves)
  table.assert_same_bits(exported.call(*leaves), jax.jit(step)(*leaves))


@ONE
def test_scan_and_vmap_of_a_training_run(implementation):
  """Batched over starts and learning rates at once, each run inside ``scan``: the runs one by one."""
  loss = lambda p: jnp.sum(jnp.square(p["w"] - 0.1)) + jnp.sum(jnp.square(p["b"]))

  def train(params, rate):
    tx = olp.adamw(rate, min_quantized_size=0, implementation=implementation)
    step = lambda carry, _: (olp.apply_gradients(tx, jax.grad(loss)(carry[0]), carry[1], carry[0]), None)
    return jax.lax.scan(step, (params, tx.init(params)), length=4)[0]

  params = table.tree({"w": (2, 4, 160), "b": (2, 7)})
  rates = jnp.asarray([3e-3, 1e-2])
  batched = jax.jit(jax.vmap(train))(params, rates)
  for i in range(2):
    pick = functools.partial(jax.tree.map, lambda x: x[i])
    table.assert_same_bits(pick(batched), jax.jit(train)(pick(params), rates[i]))


def test_eval_shape_of_a_step(implementation):
  """The shapes of a step without taking it, from shapes alone."""
  params = jax.eval_shape(lambda: table.tree({"w": (4, 160), "b": (7,)}, jnp.bfloat16))
  tx = _adamw(implementation)
  state = jax.eval_shape(tx.init, params)
  new = jax.eval_shape(functools.partial(olp.apply_gradients, tx), params, state, params)
  assert table.shapes_and_dtypes(new) == table.shapes_and_dtypes((params, state))


# --- whole scripts --------------------------------------------------------------------------------------------------
#
# Each is written for ``optax.adamw``; what takes its place is an argument, and the only change. A byte of Python
# source is predicted from the eight before it; a run for each seed.


STEPS, BATCH, CONTEXT, WIDTH, SEEDS = 100, 32, 8, 32, range(3)


@functools.cache
def _text():
  """Sources of the standard library: for training, and for evaluation."""
  read = lambda module: np.frombuffer(pathlib.Path(module.__file__).read_bytes(), np.uint8).astype(np.int32)
  return read(argparse), read(inspect)


def _windows(text, starts):
  rows = text[starts[:, None] + np.arange(CONTEXT + 1)]
  return rows[:, :-1], rows[:, -1]


def _batches(seed):
  rng = np.random.default_rng(seed)
  text = _text()[0]
  for _ in range(STEPS):
    yield _windows(text, rng.integers(len(text) - CONTEXT, size=BATCH))


def _held_out():
  return _windows(_text()[1], np.arange(0, 40_000, 20))


cross_entropy = lambda logits, y: optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def linen_script(adamw):
  class Net(nn.Module):

    @nn.compact
    def __call__(self, x):
      x = nn.Embed(256, 32)(x).reshape(len(x), -1)
      return nn.Dense(256)(nn.relu(nn.Dense(WIDTH)(x)))

  model = Net()
  init = jax.jit(model.init)
  tx = adamw(optax.cosine_decay_schedule(1e-2, STEPS), weight_decay=1e-2)

  @jax.jit
  def train_step(state, x, y):
    grads = jax.grad(lambda p: cross_entropy(state.apply_fn({"params": p}, x), y))(state.params)
    return state.apply_gradients(grads=grads)

  for seed in SEEDS:
    params = init(jax.random.key(seed), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for x, y in _batches(seed):
      state = train_step(state, x, y)
    x, y = _held_out()
    yield cross_entropy(state.apply_fn({"params": state.params}, x), y), state.opt_state


def nnx_script(adamw):
  class Net(nnx.Module):

    def __init__(self, rngs):
      self.embed = nnx.Embed(256, 32, rngs=rngs)
      self.hidden = nnx.Linear(32 * CONTEXT, WIDTH, rngs=rngs)
      self.out = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, x):
      return self.out(nnx.relu(self.hidden(self.embed(x).reshape(len(x), -1))))

  tx = adamw(optax.cosine_decay_schedule(1e-2, STEPS), weight_decay=1e-2)

  @nnx.jit
  def train_step(model, optimizer, x, y):
    grads = nnx.grad(lambda m: cross_entropy(m(x), y))(model)
    optimizer.update(model, grads)

  for seed in SEEDS:
    model = Net(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for x, y in _batches(seed):
      train_step(model, optimizer, x, y)
    x, y = _held_out()
    yield cross_entropy(model(x), y), nnx.state(optimizer.opt_state)


def plain_script(adamw):
  normal = lambda key, n, m: jax.random.normal(key, (n, m)) / n**0.5

  def init(key):
    keys = jax.random.split(key, 3)
    hidden = dict(w1=normal(keys[1], 32 * CONTEXT, WIDTH), b1=jnp.zeros(WIDTH))
    return dict(embedding=normal(keys[0], 256, 32), **hidden, w2=normal(keys[2], WIDTH, 256))

  def loss_fn(p, x, y):
    hidden = jax.nn.relu(p["embedding"][x].reshape(len(x), -1) @ p["w1"] + p["b1"])
    return cross_entropy(hidden @ p["w2"], y)

  optimizer = adamw(optax.cosine_decay_schedule(1e-2, STEPS), weight_decay=1e-2)

  @jax.jit
  def train_step(params, opt_state, x, y):
    grads = jax.grad(loss_fn)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  for seed in SEEDS:
    params = init(jax.random.key(seed))
    opt_state = optimizer.init(params)
    for x, y in _batches(seed):
      params, opt_state = train_step(params, opt_state, x, y)
    yield loss_fn(params, *_held_out()), opt_state


SCRIPTS = {"linen": linen_script, "nnx": nnx_script, "plain": plain_script}
SCRIPTS_OF = [
    (i, name) for n, i in enumerate(runnable_implementations()) for name in SCRIPTS if n == 0 or name == "plain"
]


@pytest.mark.parametrize("implementation, script", SCRIPTS_OF)
def test_script_trains_to_the_same_loss(implementation, script):
  """Over three seeds, the mean difference to ``optax.adamw`` is less than the losses' deviation from seed to seed."""
  run = SCRIPTS[script]
  theirs = np.asarray([float(loss) for loss, _ in run(optax.adamw)])
  losses, states = zip(*run(functools.partial(olp.adamw, implementation=implementation)), strict=True)
  ours = np.asarray(losses)
  assert any(x.dtype == jnp.float8_e4m3fn for x in jax.tree.leaves(states[0])), "nothing is compressed here"
  assert theirs.max() < 3.5, "it learns nothing"  # a uniform guess is 5.5
  noise = max(theirs.std(ddof=1), ours.std(ddof=1))
  assert abs(np.mean(ours - theirs)) <= noise, f"{ours} beside {theirs}"
