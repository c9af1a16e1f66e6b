"""What Optax asks of its own optimizers (its alias, contrib and sharding suites), asked of ours.

One table: optimizer x format. The first implementation runs all of it; the others store the same bits, so a row of
each kind is enough of theirs.
"""

import functools

import chex
from conftest import runnable_implementations
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import table

import optax_lowprec as olp

LEARNING_RATE = 0.1

# name -> (factory, what follows it to make its updates steps)
OPTIMIZERS = {
    "adamw": (functools.partial(olp.adamw, LEARNING_RATE), ()),
    "adam": (functools.partial(olp.adam, LEARNING_RATE), ()),
    "scale_by_adam": (olp.scale_by_adam, (optax.scale(-LEARNING_RATE),)),
}
ROWS = [(name, formats) for name in OPTIMIZERS for formats in table.FEW]
THIN = [("adamw", "default"), ("scale_by_adam", "stochastic")]
ROWS_OF = [(i, *row) for n, i in enumerate(runnable_implementations()) for row in (THIN if n else ROWS)]
EVERY_ROW = pytest.mark.parametrize("implementation, name, formats", ROWS_OF, ids=["-".join(row) for row in ROWS_OF])
DTYPES = ("float16", "bfloat16", "float32")


def _keywords(implementation, name, formats):
  formats = table.optimizer_keywords(name, table.FEW[formats])
  return dict(min_quantized_size=0, implementation=implementation, **formats)


def _optimizer(*row):
  factory, after = OPTIMIZERS[row[1]]
  tx = factory(**_keywords(*row))
  return optax.chain(tx, *after) if after else tx


# --- optimization ---------------------------------------------------------------------------------------------------

START = {"parabola": jnp.asarray([-1.0, 10.0, 1.0]), "rosenbrock": jnp.zeros(2)}
END = {"parabola": jnp.asarray([1.0, -1.0, 1.0]), "rosenbrock": jnp.ones(2)}


def _objective(params):
  x, y = params["rosenbrock"]
  return jnp.sum(jnp.square(params["parabola"] - END["parabola"])) + (1 - x) ** 2 + 100 * (y - x**2) ** 2


@EVERY_ROW
def test_converges(implementation, name, formats):
  """10,000 steps on Optax's two targets, each a leaf of its own, to within its 3e-2."""
  tx = _optimizer(implementation, name, formats)
  state = optax.tree.map_params(tx, lambda x: x, tx.init(START))

  def step(carry, _):
    params, state = carry
    updates, state = tx.update(jax.grad(_objective)(params), state, params)
    return (optax.apply_updates(params, updates), state), None

  (params, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=10_000))((START, state))
  chex.assert_trees_all_close(params, END, rtol=3e-2, atol=3e-2)


# --- what an optimizer promises -------------------------------------------------------------------------------------

SHAPES = {"w": (2, 160), "b": (3,)}


def _params(dtype="float32"):
  return table.tree(SHAPES, jnp.dtype(dtype))


@EVERY_ROW
def test_one_trace_extra_arguments_and_donation(implementation, name, formats):
  """A fresh state can be donated, later steps compile nothing, and arguments that no one knows are ignored."""
  tx = _optimizer(implementation, name, formats)
  make = lambda: table.tree(SHAPES, lambda i: (jnp.float32, jnp.bfloat16)[i])
  grads = make()
  traces = []

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, unknown):
    traces.append(unknown)
    updates, state = tx.update(grads, state, params, unexpected=unknown, other=None)
    return optax.apply_updates(params, updates), state

  start = make()
  start = start, tx.init(start)
  # Shapes, dtypes and where they lie are what init made them.
  kinds = lambda t: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type, x.sharding), t)
  right = kinds(start)
  once = step(*start, 1.0)
  assert kinds(once) == right
  twice = step(*once, 2.0)
  assert kinds(twice) == right
  assert len(traces) == step._cache_size() == 1
  table.assert_same_bits(twice, table.run_steps(tx, make(), lambda t, p: grads, 2, "jit"))


@pytest.mark.parametrize("master", ["auto", "float32", "float16"])
def test_donation_leaves_the_weights_that_became_masters(master):
  """The README's first lines: float32 weights into the masters of a bfloat16 model, then donated steps."""
  weights = _params()
  params = _params("bfloat16")
  tx = olp.adamw(1e-2, master=master)
  params, state = olp.with_master_params(tx.init(params), params, weights)
  jax.jit(functools.partial(olp.apply_gradients, tx, weights), donate_argnums=(0, 1))(state, params)
  assert not any(x.is_deleted() for x in jax.tree.leaves(weights))


@EVERY_ROW
def test_dtypes_and_shapes_are_stable_inside_cond(implementation, name, formats):
  """float16, bfloat16 and float32 parameters; gradients of the same dtype give updates of that dtype."""
  tx = _optimizer(implementation, name, formats)
  for dtype in DTYPES:
    params = jax.eval_shape(functools.partial(_params, dtype))
    state = jax.eval_shape(tx.init, params)

    def step(go, grads, state, params):
      # Both branches of a cond must give the same types, or tracing fails.
      updates, new_state = jax.lax.cond(go, lambda: tx.update(grads, state, params), lambda: (params, state))
      return optax.apply_updates(params, updates), updates, new_state

    new_params, updates, new_state = jax.eval_shape(step, True, params, state, params)
    assert table.shapes_and_dtypes((new_params, updates)) == table.shapes_and_dtypes((params, params))
    assert table.shapes_and_dtypes(new_state) == table.shapes_and_dtypes(state)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)


@pytest.mark.parametrize(
    "implementation, formats",
    [(i, f) for n, i in enumerate(runnable_implementations()) for f in ("default", "bfloat16_and_tensor")[: 2 - n]],
)
def test_sharding_types_are_stable(implementation, formats):
  """On an Explicit mesh the state's types stay what ``init`` made them, eager and jitted, initialized either way."""
  tx = _optimizer(implementation, "adamw", formats)
  mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
  types = functools.partial(jax.tree.map, jax.typeof)
  with jax.set_mesh(mesh):
    params = jnp.zeros((2, 8, 64), jnp.float16, out_sharding=jax.sharding.NamedSharding(mesh, P(None, "x")))
    state = tx.init(params)
    updates, new_state = tx.update(params, state, params)
    assert types(new_state) == types(state) == types(jax.jit(tx.init)(params))
    assert types(jax.jit(tx.update)(params, state, params)) == types((updates, new_state))


@EVERY_ROW
def test_inject_hyperparams_is_the_same_optimizer(implementation, name, formats):
  """Updates and inner states of injected and plain are equal to a rounding of 1 - b in float32."""
  factory, _ = OPTIMIZERS[name]
  function, arguments = getattr(factory, "func", factory), getattr(factory, "args", ())
  keywords = _keywords(implementation, name, formats)
  plain = function(*arguments, **keywords)
  injected = optax.inject_hyperparams(function, static_args="min_quantized_size")(*arguments, **keywords)
  params = _params()
  grads = jax.tree.map(jnp.negative, params)
  updates, state = jax.jit(plain.update)(grads, jax.jit(plain.init)(params), params)
  other_updates, other_state = jax.jit(injected.update)(grads, jax.jit(injected.init)(params), params)
  chex.assert_trees_all_close(other_updates, updates, rtol=1e-3)
  # By value: next to a tie a code may be its neighbour.
  mine, theirs = (olp.moments(s, params) for s in (state, other_state.inner_state))
  chex.assert_trees_all_close(theirs, mine, rtol=0.26 if formats == "bfloat16_and_tensor" else 0.13)
  assert all(np.median(np.abs(a - b)) <= 1e-4 * np.abs(a).max()
             for a, b in zip(*map(jax.tree.leaves, (mine, theirs)), strict=True))  # fmt: skip
  assert jax.tree.structure(other_state.inner_state) == jax.tree.structure(state)


@EVERY_ROW
def test_multi_steps_of_four(implementation, name, formats):
  """Three steps of zeros, then the step of the mean gradient."""
  tx = _optimizer(implementation, name, formats)
  params = _params("bfloat16" if formats in ("default", "stochastic") else "float32")
  multi = optax.MultiSteps(tx, every_k_schedule=4)
  update = jax.jit(multi.update)
  state = multi.init(params)
  for k in range(4):
    updates, state = update(jax.tree.map(lambda p: p * (2 * k), params), state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    if k < 3:
      chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
  right, _ = jax.jit(tx.update)(jax.tree.map(lambda p: p * 3, params), tx.init(params), params)
  chex.assert_trees_all_close(updates, right, rtol=2e-2, atol=1e-3)
  assert max(float(jnp.abs(u).max()) for u in jax.tree.leaves(updates)) > 0.05


@pytest.mark.parametrize("name, formats", ROWS, ids=["-".join(row) for row in ROWS])
def test_map_params_with_partition_specs(name, formats):
  """``optax.tree.map_params`` with a tree of PartitionSpecs makes a tree of shardings for the whole state.

  What has not the parameter's shape (scales that are a scalar, a part that a leaf lacks) must still take its spec.
  """
  tx = _optimizer("jnp", name, formats)
  params = _params("bfloat16")
  mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  specs = {"w": P("x", "y"), "b": P("x")}
  state = tx.init(params)
  shard = lambda _, spec: jax.sharding.NamedSharding(mesh, spec)
  replicated = lambda _: jax.sharding.NamedSharding(mesh, P())
  shardings = optax.tree.map_params(tx, shard, state, specs, transform_non_params=replicated)
  ours = next(s for s in jax.tree.leaves(shardings, is_leaf=olp.state.is_state) if olp.state.is_state(s))
  for part in ("mu", "nu"):
    assert jax.tree.map(lambda s: s.spec, getattr(ours, part)) == specs
  assert ours.count.spec == P()
  doubled = optax.tree.map_params(tx, lambda x: x + x, state)
  assert jax.tree.structure(doubled) == jax.tree.structure(state)
