"""Taking a step: in Flax, fused against updates, and inside everything that wraps an Optax optimizer."""

import functools
from typing import Any, NamedTuple

import chex
from flax import nnx
import flax.linen as nn
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import table

import optax_lowprec as olp

SHAPES = {"a": (8, 256), "b": (5, 3), "c": ()}

# --- Flax -----------------------------------------------------------------------------------------------------------

_X = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
_Y = np.sin(_X @ np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32) * 0.3)


def _optimizer(implementation, **keywords):
  tx = olp.adamw(1e-2, **{"min_quantized_size": 0, **keywords}, implementation=implementation)
  return optax.chain(optax.clip_by_global_norm(1.0), tx)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fused", [False, True], ids=["chain", "fused"])
def test_linen_train_state_trains(param_dtype, fused, implementation):
  model = nn.Sequential([nn.Dense(128, param_dtype=param_dtype), nn.tanh, nn.Dense(4, param_dtype=param_dtype)])
  params = model.init(jax.random.key(0), _X)["params"]
  state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=_optimizer(implementation))
  loss = lambda p: jnp.mean((model.apply({"params": p}, _X) - _Y).astype(jnp.float32) ** 2)

  def step(state, _):
    value, grads = jax.value_and_grad(loss)(state.params)
    if fused:
      new, opt_state = olp.apply_gradients(state.tx, grads, state.opt_state, state.params)
      return state.replace(step=state.step + 1, params=new, opt_state=opt_state), value
    return state.apply_gradients(grads=grads), value

  end, losses = jax.jit(lambda s: jax.lax.scan(step, s, length=100))(state)
  chex.assert_trees_all_equal_shapes_and_dtypes(end.params, params)
  assert losses[-1] < losses[0] / 4
  assert int(optax.tree.get(end.opt_state, "count")) == 100


def test_nnx_optimizer_trains(implementation):
  model = nnx.Sequential(nnx.Linear(16, 128, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(128, 4, rngs=nnx.Rngs(1)))
  optimizer = nnx.Optimizer(model, _optimizer(implementation), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(_X) - _Y) ** 2))(model)
    optimizer.update(model, grads)
    return value

  losses = [float(step(model, optimizer)) for _ in range(60)]
  assert losses[-1] < losses[0] / 4


# --- fused against the chain path -----------------------------------------------------------------------------------

MASTERS = {
    "float32_params": (jnp.float32, None),
    "float32_params_float16_master": (jnp.float32, "float16"),
    "bfloat16_params_float32_master": (jnp.bfloat16, "float32"),
    "bfloat16_params_float16_master": (jnp.bfloat16, "float16"),
    "bfloat16_params_no_master": (jnp.bfloat16, None),
    "float16_params_float32_master": (jnp.float16, "float32"),
}
REMAINDERS = {
    f"{jnp.dtype(dtype).name}_params_{name}": (dtype, name)
    for dtype in (jnp.bfloat16, jnp.float16)
    for name in ("remainder16", "remainder8")
}


def _ulp(x: np.ndarray, dtype: Any) -> np.ndarray:
  bits = {"float32": 23, "bfloat16": 7, "float16": 10}[jnp.dtype(dtype).name]
  return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**-14))) - bits)


@pytest.mark.parametrize("case", MASTERS)
def test_fused_has_the_state_of_the_chain_path(case, implementation):
  """With the parameter as master, or a master of its own, the state is bit-equal over any number of steps.

  The parameters of the chain path are p + u, rounded twice: equal in float32 where the parameter is the master, else
  off by one place (of the update, where that is larger) at most, which never accumulates.
  """
  dtype, master = MASTERS[case]
  params = table.tree(SHAPES, dtype)
  tx = olp.adamw(3e-2, master=master, min_quantized_size=0, implementation=implementation)
  gradients = table.Gradients(SHAPES)
  steps = 1 if master is None and dtype != jnp.float32 else 10  # without a master a place off is a place off
  fused, fused_state = table.run_steps(tx, params, gradients.at, steps, fused=True)
  chain, chain_state = table.run_steps(tx, params, gradients.at, steps)
  before = table.run_steps(tx, params, gradients.at, steps - 1)[0] if steps > 1 else params
  table.assert_same_bits(fused_state, chain_state)
  for k in params:
    f, c, p, b = (np.asarray(x[k], np.float64) for x in (fused, chain, params, before))
    if case == "float32_params":
      np.testing.assert_array_equal(f, c)
    places = np.maximum(np.maximum(_ulp(f, dtype), _ulp(c, dtype)), _ulp(c - b, dtype)) + np.abs(f - p) * 2.0**-8 * (
        dtype != jnp.float32
    )
    assert (np.abs(f - c) <= places).all()
  if master is not None:
    exact = olp.master_params(fused_state, fused)
    if master == "float32":
      chex.assert_trees_all_equal(fused, jax.tree.map(lambda m: m.astype(dtype), exact))


@pytest.mark.parametrize("case", REMAINDERS)
def test_fused_and_chain_path_with_remainders(case, implementation):
  """One step from the same point: the same state, bit for bit.

  Where p + u misses the parameter, the master on the chain path is off by what it misses: u is rounded by at most 2^-8
  (2^-11 for float16) of the step, and p + u once more.
  """
  dtype, master = REMAINDERS[case]
  params = table.tree(SHAPES, dtype)
  tx = olp.adamw(3e-2, master=master, min_quantized_size=0, implementation=implementation)
  gradients = table.Gradients(SHAPES)
  params, state = table.run_steps(tx, params, gradients.at, 5, fused=True)
  one = lambda fused: table.run_steps(tx, params, gradients.at, 1, fused=fused, state=state)
  (fused, fused_state), (chain, chain_state) = one(True), one(False)
  table.assert_same_bits(fused_state, chain_state)
  masters = olp.master_params(fused_state, fused), olp.master_params(chain_state, chain)
  missed = 0
  for k in params:
    f, c, p, m, n = (np.asarray(x[k], np.float64) for x in (fused, chain, params, *masters))
    bound = np.abs(f - p) * (2.0**-7 if dtype == jnp.bfloat16 else 2.0**-10)
    assert (np.abs(f - c) <= bound + 1e-30).all()
    hit = f == c
    np.testing.assert_array_equal(m[hit], n[hit])
    assert (np.abs(m - n)[~hit] <= 1.01 * bound[~hit]).all()
    missed += int((~hit).sum())
  assert missed < 0.1 * sum(p.size for p in params.values())


@pytest.mark.parametrize("master", ["remainder16", "remainder8"])
def test_chain_path_with_remainders_follows_float64(master, implementation):
  """The misses do not pile up: 100 steps of updates stay near AdamW."""
  shapes = {"a": (8, 256)}
  params = table.tree(shapes, jnp.bfloat16)
  gradients = table.Gradients(shapes)
  tx = olp.adamw(
      **table.HYPER, mu="float32", nu="float32", master=master, min_quantized_size=0, implementation=implementation
  )
  new, state = table.run_steps(tx, params, gradients.at, 100)
  rounded = lambda t: gradients.numpy(t, "a").astype(jnp.bfloat16).astype(np.float32)
  right = table.adamw64(np.asarray(params["a"], np.float32), rounded, 100)[0]
  error = table.group_errors(olp.master_params(state, new), {"a": right}, params)
  assert error["a"] < 1e-2, error


# --- wrapped --------------------------------------------------------------------------------------------------------


class Wrapper(NamedTuple):
  """``fused``: the parameter is written by our step. Otherwise ``apply_gradients`` must fall back."""

  make: Any
  fused: bool = False


_LABELS = {"a": "ours", "b": "sgd", "c": "ours"}
WRAPPERS = {
    "alone": Wrapper(lambda tx: tx, True),
    "chain": Wrapper(lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx), True),
    "masked": Wrapper(lambda tx: optax.masked(tx, {"a": True, "b": False, "c": True}), True),
    "partition": Wrapper(lambda tx: optax.partition({"ours": tx, "sgd": optax.sgd(0.1)}, _LABELS), True),
    "two_of_ours": Wrapper(lambda tx: optax.partition({"ours": tx, "sgd": olp.adamw(0.1)}, _LABELS), True),
    "frozen_part": Wrapper(lambda tx: optax.partition({"ours": tx, "sgd": optax.set_to_zero()}, _LABELS), True),
    "scaled_after": Wrapper(lambda tx: optax.chain(tx, optax.scale(0.5))),
    "partly_scaled_after": Wrapper(
        lambda tx: optax.chain(tx, optax.masked(optax.scale(0.5), {"a": True, "b": False, "c": False}))
    ),
    "twice": Wrapper(lambda tx: optax.chain(tx, tx)),
    "multi_steps": Wrapper(lambda tx: optax.MultiSteps(tx, 2).gradient_transformation()),
    "apply_if_finite": Wrapper(lambda tx: optax.apply_if_finite(tx, 3)),
    "conditionally_transform": Wrapper(lambda tx: optax.conditionally_transform(tx, lambda step, **_: step % 2 == 0)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_apply_gradients_equals_update_inside_wrappers(name, implementation):
  """The same parameters and state, bit for bit, whether the fused path is possible or not."""
  params = {k: jnp.abs(v) + 0.1 for k, v in table.tree(SHAPES).items()}
  gradients = table.Gradients(SHAPES).at
  tx = WRAPPERS[name].make(olp.adamw(1e-2, weight_decay=0.1, min_quantized_size=0, implementation=implementation))
  fused = table.run_steps(tx, params, gradients, 5, fused=True)
  table.assert_same_bits(fused, table.run_steps(tx, params, gradients, 5))
  assert max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (fused[0], params)), strict=True)) > 1e-3


@pytest.mark.parametrize("name", WRAPPERS)
def test_fused_path_is_taken_where_it_can_be(name, implementation):
  """Seen from its exactness: p + u misses the rounded master somewhere.

  A bfloat16 parameter that the step writes is its float32 master rounded, always.
  """
  params = {k: jnp.abs(v) + 0.1 for k, v in table.tree(SHAPES, jnp.bfloat16).items()}
  tx = WRAPPERS[name].make(olp.adamw(0.3, master="float32", min_quantized_size=0, implementation=implementation))
  new, state = table.run_steps(tx, params, table.Gradients(SHAPES).at, 4, fused=True)
  if name == "twice":
    with pytest.raises(ValueError, match="two optax_lowprec states"):
      olp.master_params(state, new)
    return
  exact = olp.master_params(state, new)["a"].astype(jnp.bfloat16)
  assert bool((exact == new["a"]).all()) == WRAPPERS[name].fused


def test_apply_gradients_of_any_optimizer():
  """Transforms that are not ours, and plain ones without extra arguments."""
  params = table.tree(SHAPES)
  g = table.Gradients(SHAPES).at(0, params)
  for tx in (
      optax.adam(1e-2),
      optax.sgd(1e-2),
      optax.GradientTransformation(lambda p: (), lambda u, s, p=None: (u, s)),
  ):
    state = tx.init(params)
    updates, right_state = tx.update(g, state, params)
    table.assert_same_bits(
        olp.apply_gradients(tx, g, state, params), (optax.apply_updates(params, updates), right_state)
    )


def test_scale_by_adam_in_a_chain_falls_back(implementation):
  """It gives a direction: what follows makes the step."""
  params = table.tree(SHAPES)
  tx = optax.chain(olp.scale_by_adam(min_quantized_size=0, implementation=implementation), optax.scale(-1e-2))
  gradients = table.Gradients(SHAPES)
  table.assert_same_bits(*(table.run_steps(tx, params, gradients.at, 3, fused=f) for f in (True, False)))


def test_apply_gradients_with_one_array_twice(implementation):
  """Tied parameters: one array in two places of the tree, eager."""
  w = jnp.ones((4, 64))
  params, g = {"a": w, "b": w}, {"a": jnp.ones((4, 64)), "b": -jnp.ones((4, 64))}
  tx = olp.adamw(1e-2, implementation=implementation)
  new, _ = olp.apply_gradients(tx, g, tx.init(params), params)
  assert float(new["a"].max()) < 1 < float(new["b"].min())


def test_apply_gradients_leaves_its_inputs(implementation):
  params = table.tree(SHAPES)
  copy = jax.tree.map(np.array, params)
  tx = olp.adamw(1e-2, min_quantized_size=0, implementation=implementation)
  state = tx.init(params)
  functools.reduce(lambda c, _: olp.apply_gradients(tx, params, *reversed(c)), range(2), (params, state))
  chex.assert_trees_all_equal(params, copy)
  assert int(state.count) == 0
