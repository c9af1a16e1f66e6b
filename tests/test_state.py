"""The state: its structure, what walks it, what it costs, and reading it."""

import copy
import pickle

import chex
from flax import nnx
from flax import serialization
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import table

import optax_lowprec as olp

SHAPES = {"a": (8, 256), "b": (5, 3), "c": (), "e": (0,)}
FIELDS = ("count", "mu", "nu", "master", "mu_scale", "nu_scale", "master_scale", "formats")
PARTS = ("mu", "nu", "master")


def _make(formats="default", **keywords):
  return olp.adamw(1e-2, **{"min_quantized_size": 0, **table.FEW[formats], **keywords})


def _mixed(i):
  return jnp.bfloat16 if i % 2 == 0 else jnp.float32


def _trained(tx, steps=3):
  params = table.tree(SHAPES, _mixed)
  return table.run_steps(tx, params, table.Gradients(SHAPES).at, steps)


@pytest.mark.parametrize("formats", table.FEW)
def test_structure(formats):
  """A NamedTuple of mirrors of the parameters; absent fields are ()."""
  params = table.tree(SHAPES, _mixed)
  state = _make(formats).init(params)
  assert state._fields == FIELDS and isinstance(state, olp.LowPrecisionAdamState)
  assert state.count.dtype == jnp.int32 and int(state.count) == 0
  for field in FIELDS[1:-1]:
    tree = getattr(state, field)
    assert tree == () or jax.tree.structure(tree) == jax.tree.structure(params)
  for k, p in params.items():
    for part in PARTS:
      tree = getattr(state, part)
      assert tree[k].shape == p.shape or tree[k].dtype == jnp.int8
    assert state.mu[k].shape == state.nu[k].shape == p.shape
  chex.assert_trees_all_close(olp.moments(state, params)[0], jax.tree.map(lambda p: jnp.zeros(p.shape), params))


@pytest.mark.parametrize("formats", table.FEW)
def test_init_of_shapes(formats):
  """``eval_shape``, ``ShapeDtypeStruct`` parameters and ``jit`` agree with the real thing."""
  params = table.tree(SHAPES, _mixed)
  tx = _make(formats)
  state = tx.init(params)
  right = table.shapes_and_dtypes(state)
  assert table.shapes_and_dtypes(jax.eval_shape(tx.init, params)) == right
  structs = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
  assert table.shapes_and_dtypes(tx.init(structs)) == right
  table.assert_same_bits(jax.jit(tx.init)(params), state)


@pytest.mark.parametrize("formats", table.FEW)
def test_state_is_stable_inside_cond_and_scan(formats):
  params, state = _trained(_make(formats))
  tx = _make(formats)
  new = jax.lax.cond(True, lambda s: tx.update(params, s, params)[1], lambda s: s, state)
  chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
  assert jax.tree.structure(new) == jax.tree.structure(state)


def test_map_params_with_specs():
  """``optax.tree.map_params`` pairs each mirrored leaf with its parameter's spec."""
  params = table.tree(SHAPES, _mixed)
  specs = {k: f"spec of {k}" for k in params}
  for formats in table.FEW:
    tx = _make(formats)
    state = tx.init(params)
    named = optax.tree.map_params(tx, lambda _, s: s, state, specs, transform_non_params=lambda _: None)
    assert named.mu == specs and named.nu == specs and named.count is None


def test_optax_tree_utilities_find_fields():
  """``optax.tree.get`` and ``set`` by name, as for optax's own."""
  params = table.tree(SHAPES)
  tx = optax.chain(optax.clip(1.0), _make())
  state = tx.init(params)
  assert int(optax.tree.get(state, "count")) == 0
  assert optax.tree.get(state, "mu")["a"].dtype == jnp.float8_e4m3fn
  assert int(optax.tree.get(optax.tree.set(state, count=jnp.int32(7)), "count")) == 7


def test_boxed_linen_parameters():
  """Moments keep their parameter's box, scales are bare; a step keeps both."""
  params = {"w": nn.Partitioned(jnp.ones((8, 256), jnp.bfloat16), names=("x", "y")), "b": jnp.ones((7,))}
  tx = _make()
  state = tx.init(params)
  assert isinstance(state.mu["w"], nn.Partitioned) and state.mu["w"].names == ("x", "y")
  assert isinstance(state.master["w"], nn.Partitioned)
  assert not isinstance(state.mu_scale["w"], nn.Partitioned) and state.mu_scale["w"].shape == (8, 2)
  for fused in (False, True):
    new, new_state = table.run_steps(tx, params, lambda t, p: p, 2, fused=fused)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    assert new["w"].names == ("x", "y")
    assert float(jnp.abs(olp.master_params(new_state, new)["w"].value - 1).min()) > 1e-3
  bare = {"w": params["w"].value, "b": params["b"]}
  plain, plain_state = table.run_steps(tx, bare, lambda t, p: p, 2)
  boxed, boxed_state = table.run_steps(tx, params, lambda t, p: p, 2)
  table.assert_same_bits(jax.tree.leaves((boxed, boxed_state)), jax.tree.leaves((plain, plain_state)))


def test_nnx_parameters():
  """``nnx.state`` of a model, whose leaves are in ``nnx.Variable``s, gives the bits of the bare arrays."""
  params = nnx.state(nnx.Linear(64, 96, rngs=nnx.Rngs(0)), nnx.Param)
  tx = _make()
  g = jax.tree.map(jnp.ones_like, params)
  updates, state = tx.update(g, tx.init(params), params)
  assert jax.tree.structure(updates) == jax.tree.structure(params)
  bare = jax.tree.leaves(params)
  bare_updates, bare_state = tx.update(jax.tree.leaves(g), tx.init(bare), bare)
  table.assert_same_bits(jax.tree.leaves((updates, state)), jax.tree.leaves((bare_updates, bare_state)))
  assert jax.tree.structure(olp.master_params(state, params)) == jax.tree.structure(params)


# --- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", table.FEW)
def test_flax_serialization_round_trip(formats):
  tx = optax.chain(optax.clip(1.0), _make(formats))
  params, state = _trained(tx)
  data = serialization.to_bytes({"params": params, "opt": state})
  target = {"params": jax.tree.map(jnp.zeros_like, params), "opt": tx.init(params)}
  restored = serialization.from_bytes(target, data)
  table.assert_same_bits(restored, {"params": params, "opt": state})
  table.assert_same_bits(tx.update(params, restored["opt"], restored["params"]), tx.update(params, state, params))


@pytest.mark.parametrize("formats", table.FEW)
def test_orbax_round_trip(formats, tmp_path):
  """Bit for bit; an empty parameter left out, which Orbax itself refuses to write."""
  tx = optax.chain(optax.clip(1.0), _make(formats))
  shapes = {k: s for k, s in SHAPES.items() if k != "e"}
  params, state = table.run_steps(tx, table.tree(shapes, _mixed), table.Gradients(shapes).at, 3)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", {"params": params, "opt": state})
    checkpointer.wait_until_finished()
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"params": params, "opt": state})
    restored = checkpointer.restore(tmp_path / "state", abstract)
  table.assert_same_bits(restored, {"params": params, "opt": state})


@pytest.mark.parametrize("formats", table.FEW)
def test_pickle_and_copy(formats):
  """The record of formats survives: such a state still belongs to its optimizer."""
  tx = _make(formats)
  params, state = _trained(tx)
  for twin in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), copy.copy(state)):
    table.assert_same_bits(twin, state)
    table.assert_same_bits(tx.update(params, twin, params), tx.update(params, state, params))


# --- reading and writing masters ------------------------------------------------------------------------------------

PLACES = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(10.0), tx),
    "multi_transform": lambda tx: optax.multi_transform(
        {"x": tx, "y": optax.sgd(0.1)}, {"a": "x", "b": "y", "c": "x", "e": "x"}
    ),
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": False, "c": True, "e": True}),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
}


def _places():
  for name, place in PLACES.items():
    yield name, place(_make(master="remainder16"))
  yield "inject", optax.inject_hyperparams(olp.adamw, static_args=("min_quantized_size",))(
      learning_rate=1e-2, min_quantized_size=0
  )


@pytest.mark.parametrize(("name", "tx"), list(_places()), ids=lambda x: x if isinstance(x, str) else "")
def test_masters_and_moments_are_found_inside(name, tx):
  """Chained, masked, injected and partitioned states; leaves of others are their own master."""
  weights = table.tree(SHAPES)
  params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
  params, state = olp.with_master_params(tx.init(params), params, weights)
  masters = olp.master_params(state, params)
  others = ("b",) if name in ("multi_transform", "masked") else ()
  for k, w in weights.items():
    right = w.astype(jnp.bfloat16).astype(jnp.float32) if k in others else w
    np.testing.assert_array_equal(masters[k], right)
  mu, nu = olp.moments(state, params)
  assert all((isinstance(mu[k], optax.MaskedNode)) == (k in others) for k in SHAPES)
  new, state = table.run_steps(tx, params, table.Gradients(SHAPES).at, 1, state=state)
  mu, nu = olp.moments(state, new)
  assert (np.asarray(nu["a"]) > 0).all() and mu["a"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("param_dtype", "master", "bits"),
    [
        (jnp.float32, None, 24),
        (jnp.bfloat16, "remainder16", 24),
        (jnp.bfloat16, "remainder8", 16),
        (jnp.bfloat16, "float32", 24),
        (jnp.bfloat16, None, 8),
        (jnp.bfloat16, "float16", 10),
        (jnp.float16, "remainder16", 24),
    ],
)
def test_masters_from_float32_weights(param_dtype, master, bits):
  """A narrow model made from float32 weights loses nothing but what its format cannot hold."""
  weights = table.tree(SHAPES)
  params = jax.tree.map(lambda w: w.astype(param_dtype), weights)
  tx = olp.adamw(1e-2, master=master, min_quantized_size=0)
  new, state = olp.with_master_params(tx.init(params), params, weights)
  got = olp.master_params(state, new)
  chex.assert_trees_all_equal_shapes_and_dtypes(new, params)
  for k, w in weights.items():
    w, m, p = (np.asarray(x, np.float64) for x in (w, got[k], new[k]))
    # A block-scaled float16 loses its smallest values to the block's largest.
    assert (
        np.abs(m - w)
        <= np.abs(w) * 2.0**-bits * (bits < 24) + (1e-7 if master == "float16" or param_dtype == jnp.float16 else 0)
    ).all()
    assert (np.abs(p - w) <= np.abs(w) * 2.0**-7 + 1e-7).all()


def test_reading_under_jit():
  tx = _make()
  params, state = _trained(tx)
  table.assert_same_bits(jax.jit(olp.master_params)(state, params), olp.master_params(state, params))
  table.assert_same_bits(jax.jit(olp.moments)(state, params), olp.moments(state, params))


# --- memory ---------------------------------------------------------------------------------------------------------

_LARGE = {"embedding": (1024, 512), "kernel": (512, 2048), "bias": (2048,), "conv": (3, 3, 64, 64)}


@pytest.mark.parametrize(
    ("param_dtype", "tx", "most"),
    [
        (jnp.float32, optax.adamw(1e-3), 12.001),
        (jnp.float32, olp.adamw(1e-3), 6.3),
        (jnp.bfloat16, olp.adamw(1e-3, master="remainder16"), 6.3),
        (jnp.bfloat16, olp.adamw(1e-3, master="remainder8"), 5.3),
        (jnp.bfloat16, olp.adamw(1e-3, master=None), 4.3),
    ],
    ids=["optax", "float32", "remainder16", "remainder8", "no_master"],
)
def test_memory_report(param_dtype, tx, most):
  """The numbers that the README promises, counted from real arrays too; nothing is allocated for the report."""
  structs = {k: jax.ShapeDtypeStruct(s, param_dtype) for k, s in _LARGE.items()}
  report = olp.memory_report(tx, structs)
  assert most - 0.3 < report.bytes_per_parameter <= most
  np.testing.assert_allclose(report.baseline_bytes_per_parameter, 12.0, atol=1e-3)
  params = table.tree(_LARGE, param_dtype)
  assert report.total_bytes == sum(x.nbytes for x in jax.tree.leaves((params, tx.init(params))))
  assert report.parameters == sum(p.size for p in params.values())
  text = str(report)
  assert f"{report.bytes_per_parameter:.3f}" in text and "12.000" in text and "parameters" in text


def test_memory_report_of_a_chain_with_integers():
  params = {"w": jnp.ones((64, 128)), "n": jnp.arange(4)}
  report = olp.memory_report(optax.chain(optax.clip(1.0), _make()), params)
  assert report.parameters == 64 * 128
  assert report.total_bytes == sum(
      x.nbytes for x in jax.tree.leaves((params, optax.chain(optax.clip(1.0), _make()).init(params)))
  )
