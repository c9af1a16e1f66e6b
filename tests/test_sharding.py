"""The step on a mesh: the same bits on any, and no communication but what the mathematics needs."""

import collections
import contextlib
import functools
import re
import warnings

from conftest import runnable_implementations
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import table
from table import StateFormat
from test_kernels import NEAREST
from test_kernels import SPECIALISED

import optax_lowprec as olp
from optax_lowprec import checkpoint
from optax_lowprec import state as state_lib

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices, on the CPU simulated ones")

SHAPES = {"matrix": (16, 1024), "stack": (4, 8, 1024), "bias": (1024,), "scalar": ()}
# mesh shape -> specs for SHAPES
MESHES = {
    (2,): {"matrix": P("x"), "stack": P("x"), "bias": P("x"), "scalar": P()},
    (4,): {"matrix": P(None, "x"), "stack": P(None, "x"), "bias": P("x"), "scalar": P()},
    (8,): {"matrix": P("x"), "stack": P(None, "x"), "bias": P(), "scalar": P()},
    (4, 2): {"matrix": P("x", "y"), "stack": P("x", None, "y"), "bias": P(("x", "y")), "scalar": P()},
    (2, 4): {"matrix": P(None, ("x", "y")), "stack": P("x", "y"), "bias": P("y"), "scalar": P()},
}
COLLECTIVE = re.compile(r" (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")
REDUCED = re.compile(r"= \(?([a-z0-9]+\[[0-9,]*\])[^=]* all-reduce")
FORMATS = {
    **{k: SPECIALISED[k] for k in SPECIALISED},
    "stochastic_tensor": (
        jnp.bfloat16,
        dict(
            mu=StateFormat("float8_e5m2", "tensor", rounding="stochastic"),
            nu=StateFormat("bfloat16", None, rounding="stochastic"),
            master=StateFormat("remainder8", rounding="stochastic"),
        ),
    ),
}
STEPS = 20


def make_mesh(shape, axis_type=AxisType.Auto):
  return jax.make_mesh(
      shape, ("x", "y")[: len(shape)], (axis_type,) * len(shape), devices=jax.devices()[: int(np.prod(shape))]
  )


def shardings_of(mesh, specs):
  return {k: NamedSharding(mesh, s) for k, s in specs.items()}


def optimizer(implementation, formats, **keywords):
  return olp.adamw(1e-2, implementation=implementation, **{"min_quantized_size": 64, **formats, **keywords})


def place(tx, params, param_shardings, state=None):
  """Parameters and state on a mesh, sharded alike."""
  shardings = olp.state_shardings(tx, params, param_shardings)
  return jax.device_put((params, tx.init(params) if state is None else state), (param_shardings, shardings))


def fused(tx):
  return jax.jit(lambda p, s, g: olp.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))


def chained(tx):
  def step(p, s, g):
    updates, s = tx.update(g, s, p)
    return optax.apply_updates(p, updates), s

  return jax.jit(step, donate_argnums=(0, 1))


def collectives(text):
  return collections.Counter(COLLECTIVE.findall(text))


def assert_only_small_reductions(text, at_most=1):
  found = collectives(text)
  assert set(found) <= {"all-reduce"} and found["all-reduce"] <= at_most, found
  for shape in REDUCED.findall(text):
    dims = shape[shape.index("[") + 1 : -1]
    assert np.prod([int(x) for x in dims.split(",") if x], initial=1) <= 64, shape


def run_on(mesh_shape, implementation, dtype, keywords, steps=STEPS):
  """Parameters and state after some steps on a mesh, on the host."""
  tx = optimizer(implementation, keywords)
  params = table.tree(SHAPES, dtype)
  gradients = table.Gradients(SHAPES)
  step = lambda p, s, g: olp.apply_gradients(tx, g, s, p)
  if mesh_shape is None:
    state, shardings = tx.init(params), None
    step = jax.jit(step, donate_argnums=(0, 1))
  else:
    shardings = shardings_of(make_mesh(mesh_shape), MESHES[mesh_shape])
    out = (shardings, olp.state_shardings(tx, params, shardings))
    params, state = place(tx, params, shardings)
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*it is gathered for every step")  # blocks of 48 do not divide these
    step = step.lower(params, state, params).compile()
  for t in range(steps):
    grads = {k: jnp.asarray(gradients.numpy(t, k), dtype) for k in SHAPES}
    params, state = step(params, state, grads if shardings is None else jax.device_put(grads, shardings))
  return jax.device_get((params, state))


@functools.cache
def on_one_device(name, implementation):
  dtype, keywords = FORMATS[name]
  return run_on(None, implementation, dtype, keywords)


def _bit_rows():
  """Every format on 8 devices in two directions, and other meshes for two formats."""
  for i in runnable_implementations():
    for name in FORMATS:
      for mesh in MESHES:
        if mesh == (4, 2) or name in ("bf16_remainder16_fp8_fp8", "stochastic_tensor"):
          yield i, name, mesh


BIT_ROWS = list(_bit_rows())


@pytest.mark.parametrize(
    "implementation, name, mesh", BIT_ROWS, ids=[f"{i}-{n}-{'x'.join(map(str, m))}" for i, n, m in BIT_ROWS]
)
def test_same_bits_on_any_mesh(implementation, name, mesh):
  dtype, keywords = FORMATS[name]
  table.assert_same_bits(run_on(mesh, implementation, dtype, keywords), on_one_device(name, implementation))


@pytest.mark.parametrize(
    "mesh_shape, path", [*((m, fused) for m in MESHES), ((4, 2), chained)],
    ids=[*("x".join(map(str, m)) for m in MESHES), "4x2-chain"],
)  # fmt: skip
def test_case_20_no_communication(mesh_shape, path, implementation):
  """jax #38551, #32098: no gathers; one small all-reduce for norm and flag; shardings and donation stay."""
  for name, keywords, reductions in (
      ("bf16_remainder16_fp8_fp8", {}, 0),
      ("f32_fp8_fp8", dict(max_grad_norm=1.0, skip_nonfinite=True), 1),
  ):
    dtype, formats = FORMATS[name]
    tx = optimizer(implementation, {**formats, **keywords})
    shardings = shardings_of(make_mesh(mesh_shape), MESHES[mesh_shape])
    params, state = place(tx, table.tree(SHAPES, dtype), shardings)
    grads = jax.device_put(table.tree(SHAPES, dtype), shardings)
    before = jax.tree.map(lambda x: x.sharding, (params, state))
    compiled = path(tx).lower(params, state, grads).compile()
    assert_only_small_reductions(compiled.as_text(), reductions)
    after = compiled(params, state, grads)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
      assert y.sharding.is_equivalent_to(x, y.ndim), (x, y.sharding)
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)) if x.size > 1)


def test_tensor_scales_take_one_reduction(implementation):
  dtype, formats = FORMATS["tensor"]
  tx = optimizer(implementation, formats)
  shardings = shardings_of(make_mesh((4, 2)), MESHES[4, 2])
  params, state = place(tx, table.tree(SHAPES, dtype), shardings)
  text = fused(tx).lower(params, state, jax.device_put(table.tree(SHAPES, dtype), shardings)).compile().as_text()
  # A kernel takes all maxima at once; XLA reduces one scale after the other in jnp.
  assert_only_small_reductions(text, 1 if implementation != "jnp" else 3 * len(SHAPES))


def test_with_clipping_the_mesh_changes_only_a_rounding(implementation):
  results = []
  for mesh_shape in (None, (4, 2)):
    tx = optimizer(implementation, dict(mu="float32", nu="float32"), max_grad_norm=0.5)
    params, shardings = table.tree(SHAPES), None
    state = tx.init(params)
    if mesh_shape:
      shardings = shardings_of(make_mesh(mesh_shape), MESHES[mesh_shape])
      params, state = place(tx, params, shardings)
    step = fused(tx)
    for _ in range(5):
      grads = table.tree(SHAPES, seed=3)
      params, state = step(params, state, grads if shardings is None else jax.device_put(grads, shardings))
    results.append(jax.device_get(params))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), *results)


@pytest.mark.parametrize("name", ["bf16_remainder16_fp8_fp8", "stochastic_tensor"])
def test_explicit_meshes(name, implementation):
  """Axes whose shardings are part of the types: the same bits, and every result has the type of what it replaces."""
  dtype, formats = FORMATS[name]
  tx = optimizer(implementation, formats, skip_nonfinite=True)
  mesh = make_mesh((4, 2), AxisType.Explicit)
  gradients = table.Gradients(SHAPES)
  step = jax.jit(lambda p, s, g: olp.apply_gradients(tx, g, s, p))
  results = []
  for shardings in (None, shardings_of(mesh, MESHES[4, 2])):
    with contextlib.nullcontext() if shardings is None else jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else (
        jax.sharding.use_mesh(mesh)
    ):  # fmt: skip
      put = lambda x, shardings=shardings: x if shardings is None else jax.device_put(x, shardings)
      params = put(table.tree(SHAPES, dtype))
      state = jax.jit(tx.init)(params)
      types = jax.tree.map(jax.typeof, (params, state))
      for t in range(3):
        params, state = step(params, state, put({k: jnp.asarray(gradients.numpy(t, k), dtype) for k in SHAPES}))
      assert jax.tree.map(jax.typeof, (params, state)) == types
      if shardings is not None:
        assert types[1].mu["matrix"].sharding.spec == P("x", "y")
    results.append(jax.device_get((params, state)))
  table.assert_same_bits(*results)


def test_inside_shard_map(implementation):
  """The bits of the step outside, but for stochastic rounding, whose positions are those in the shard."""
  tx = optimizer(implementation, NEAREST)
  params, grads = table.tree(SHAPES, jnp.bfloat16), table.tree(SHAPES, jnp.bfloat16, seed=5)
  state = tx.init(params)
  spec = lambda tree: jax.tree.map(lambda x: P("x") if x.ndim and x.shape[0] % 4 == 0 else P(), tree)
  specs = (spec(params), spec(state))
  step = lambda p, s, g: olp.apply_gradients(tx, g, s, p)
  mapped = jax.shard_map(step, mesh=make_mesh((4,)), in_specs=(*specs, specs[0]), out_specs=specs)
  table.assert_same_bits(
      jax.device_get(jax.jit(mapped)(params, state, grads)), jax.device_get(jax.jit(step)(params, state, grads))
  )


def test_inside_cond_and_scan(implementation):
  """Two of three steps in a scan, on a mesh: the bits of one device, and no gathers."""
  tx = optimizer(implementation, {})
  grads = table.tree(SHAPES, jnp.bfloat16, seed=5)

  def body(grads, carry, t):
    step = lambda c: olp.apply_gradients(tx, grads, c[1], c[0])
    return jax.lax.cond(t != 1, step, lambda c: c, carry), None

  run = jax.jit(lambda p, s, g: jax.lax.scan(functools.partial(body, g), (p, s), jnp.arange(3))[0])
  params = table.tree(SHAPES, jnp.bfloat16)
  want = jax.device_get(run(params, tx.init(params), grads))
  shardings = shardings_of(make_mesh((4, 2)), MESHES[4, 2])
  placed = (*place(tx, params, shardings), jax.device_put(grads, shardings))
  compiled = run.lower(*placed).compile()
  assert_only_small_reductions(compiled.as_text(), 0)
  table.assert_same_bits(jax.device_get(compiled(*placed)), want)


LAYOUTS = {
    # parameters, state, gradients
    "zero1": (P(), P("x"), P()),
    "fsdp": (P("x"), P("x"), P("x")),
    "tensor_parallel": (P(None, "x"), P(None, "x"), P(None, "x")),
    "gradients_replicated": (P("x"), P("x"), P()),
    "gradients_the_other_way": (P("x"), P("x"), P(None, "x")),
    "partially_replicated": (P("x"), P("x", "y"), P("y")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, implementation):
  """Parameters, state and gradients sharded differently: case 25 (flax #5172), parameters keep their sharding."""
  tx = optimizer(implementation, {})
  shapes = {"a": (16, 1024), "b": (8, 512)}
  params, grads = table.tree(shapes, jnp.bfloat16), table.tree(shapes, jnp.bfloat16, seed=5)
  mesh = make_mesh((4, 2) if layout == "partially_replicated" else (4,))
  p, s, g = (dict.fromkeys(shapes, NamedSharding(mesh, spec)) for spec in LAYOUTS[layout])
  step = lambda p, s, g: olp.apply_gradients(tx, g, s, p)
  want = jax.device_get(jax.jit(step)(params, tx.init(params), grads))
  state_shardings = olp.state_shardings(tx, params, s)
  on_mesh = jax.jit(step, out_shardings=(p, state_shardings))
  got = on_mesh(*jax.device_put((params, tx.init(params), grads), (p, state_shardings, g)))
  for x, sharding in zip(jax.tree.leaves(got), jax.tree.leaves((p, state_shardings)), strict=True):
    assert x.sharding.is_equivalent_to(sharding, x.ndim)
  table.assert_same_bits(jax.device_get(got), want)


CUT = {
    # shape, axis, pieces -> is it gathered by a kernel
    "768_last_4": ((768, 768), 1, 4, True),
    "768_first_4": ((768, 768), 0, 4, False),
    "1601_first_4": ((1601, 1280), 0, 4, True),
    "1601_last_4": ((1601, 1280), 1, 4, True),
    "1601_first_8": ((1601, 1280), 0, 8, True),
    "1601_last_8": ((1601, 1280), 1, 8, True),
    "50257_first_8": ((50257, 64), 0, 8, True),
    "50257_last_4": ((50257, 64), 1, 4, True),
}


# XLA cuts jnp: of the others three rows.
CUT_ROWS = [(i, cut) for n, i in enumerate(runnable_implementations()) for cut in CUT
            if n == 0 or table.ALL_ROWS or cut in ("768_last_4", "1601_first_8", "50257_last_4")]  # fmt: skip


@pytest.mark.parametrize("implementation, cut", CUT_ROWS, ids=["-".join(r) for r in CUT_ROWS])
def test_case_16_shards_that_are_not_whole_blocks(implementation, cut):
  """torchtune #1978: right results; where a kernel needs the leaf gathered, a warning names it."""
  shape, axis, pieces, gathered = CUT[cut]
  tx = optimizer(implementation, {})
  mesh = make_mesh((pieces,))
  spec = P(*[None] * axis, "x")
  params, grads = {"odd": table.tree({"odd": shape}, jnp.bfloat16)["odd"]}, table.tree({"odd": shape}, jnp.bfloat16, 4)
  state = tx.init(params)
  step = lambda p, s, g: olp.apply_gradients(tx, g, s, p)
  want = jax.device_get(jax.jit(step)(params, state, grads))

  def on_mesh(p, s, g):
    # Inside a program shards may be uneven; XLA pads them.
    constrain = lambda tree: jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if x.shape == shape else x, tree
    )
    return step(*constrain((p, s, g)))

  replicated = jax.device_put((params, state, grads), NamedSharding(mesh, P()))
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compiled = jax.jit(on_mesh).lower(*replicated).compile()
  messages = [str(w.message) for w in caught if "gathered" in str(w.message)]
  if implementation != "jnp":
    assert len(messages) == gathered and all("odd" in m for m in messages), messages
  table.assert_same_bits(jax.device_get(compiled(*replicated)), want)


@pytest.mark.parametrize("pieces", [2, 4])
def test_case_15_formats_depend_on_the_global_shape(pieces, implementation):
  """bitsandbytes #2080, torchao #4912: a leaf of 4096 elements stays compressed however small its shards are."""
  tx = olp.adamw(1e-2, implementation=implementation)
  mesh = make_mesh((pieces,))
  shapes = {"at": (32, 128), "below": (31, 128)}
  shardings = {"at": NamedSharding(mesh, P("x")), "below": NamedSharding(mesh, P())}
  params = jax.device_put(table.tree(shapes, jnp.bfloat16), shardings)
  for state in (tx.init(params), jax.jit(tx.init)(params)):
    _, state = jax.jit(lambda p, s: olp.apply_gradients(tx, p, s, p))(params, state)
    assert state.mu["at"].dtype == jnp.float8_e4m3fn and state.mu["below"].dtype == jnp.float32


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_case_17_init_is_sharded_like_the_parameters(wrap):
  """bitsandbytes #89: every leaf of the state, scales too, has a sharding derived from its parameter."""
  tx = optimizer(None, dict(master="float16"))
  shardings = shardings_of(make_mesh((4, 2)), MESHES[4, 2])
  params = jax.device_put(table.tree(SHAPES, jnp.bfloat16), shardings)
  state = wrap(tx.init)(params)
  want = olp.state_shardings(tx, params, shardings)
  for field in ("mu", "nu", "master", "mu_scale", "nu_scale", "master_scale"):
    for k in SHAPES:
      got, right = getattr(state, field)[k], getattr(want, field)[k]
      assert got.sharding.is_equivalent_to(right, got.ndim), (field, k, got.sharding, right)


def test_case_19_one_device_sees_inf(implementation):
  """MS-AMP #56, #141: all devices skip the step; state and count are unchanged."""
  tx = optimizer(implementation, {}, skip_nonfinite=True)
  shardings = shardings_of(make_mesh((8,)), MESHES[8,])
  params, state = place(tx, table.tree(SHAPES, jnp.bfloat16), shardings)
  grads = table.tree(SHAPES, jnp.bfloat16, seed=5)
  step = jax.jit(lambda p, s, g: olp.apply_gradients(tx, g, s, p))
  params, state = step(params, state, jax.device_put(grads, shardings))
  grads["matrix"] = grads["matrix"].at[11, 5].set(jnp.inf)  # on the sixth device
  new = step(params, state, jax.device_put(grads, shardings))
  table.assert_same_bits(jax.device_get(new), jax.device_get((params, state)))
  assert int(state.count) == 1


def test_shardings_derived_as_frameworks_do():
  """MaxText, Levanter: specs of the parameters mapped onto ``eval_shape(init)``; the step keeps them."""
  tx = optax.chain(optax.clip_by_global_norm(1.0), optimizer(None, {}), optax.add_decayed_weights(0.0))
  mesh = make_mesh((4, 2))
  params = table.tree(SHAPES, jnp.bfloat16)
  abstract = jax.eval_shape(tx.init, params)
  specs = optax.tree_utils.tree_map_params(
      tx, lambda _, spec: spec, abstract, MESHES[4, 2], transform_non_params=lambda _: P()
  )
  shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))
  state = jax.jit(tx.init, out_shardings=shardings)(params)
  param_shardings = shardings_of(mesh, MESHES[4, 2])
  step = jax.jit(lambda p, s: olp.apply_gradients(tx, p, s, p), in_shardings=(param_shardings, shardings),
                 out_shardings=(param_shardings, shardings))  # fmt: skip
  new, state = step(jax.device_put(params, param_shardings), state)
  kept = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), (new, state), (param_shardings, shardings))
  assert all(jax.tree.leaves(kept))
  one, _ = jax.jit(lambda p, s: olp.apply_gradients(tx, p, s, p))(params, tx.init(params))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=1e-2), new, one)


@pytest.mark.parametrize("name", ["bf16_remainder16_fp8_fp8", "stochastic_tensor"])
def test_checkpoints_move_between_meshes(name, tmp_path):
  """One device, then eight, then two: the bits of a run that was never interrupted."""
  dtype, formats = FORMATS[name]
  tx = optimizer(None, formats)
  params = table.tree(SHAPES, dtype)
  state = tx.init(params)
  step = jax.jit(lambda p, s, g: olp.apply_gradients(tx, g, s, p))
  gradients = table.Gradients(SHAPES)
  grads = [{k: jnp.asarray(gradients.numpy(t, k), dtype) for k in SHAPES} for t in range(3)]
  want = (params, state)
  for g in grads:
    want = step(*want, g)
  for t, mesh_shape in enumerate((None, (4, 2), (2,))):
    if mesh_shape:
      checkpoint.save(tmp_path / str(t), params, state)
      shardings = shardings_of(make_mesh(mesh_shape), MESHES[mesh_shape])
      like = {k: jax.ShapeDtypeStruct(s, dtype, sharding=shardings[k]) for k, s in SHAPES.items()}
      params, state = checkpoint.restore(tmp_path / str(t), tx, like)
      assert params["matrix"].sharding == shardings["matrix"] and len(state.mu["matrix"].sharding.device_set) > 1
      grads[t] = jax.device_put(grads[t], shardings)
    params, state = step(params, state, grads[t])
  table.assert_same_bits(jax.device_get((params, state)), jax.device_get(want))


def test_the_gradient_has_no_say_in_how_the_state_is_cut(implementation):
  """Nothing is pinned, the gradient is cut another way: it alone is moved, and the state stays where it is."""
  tx = optimizer(implementation, {})
  mesh = make_mesh((8,))
  shardings = {"w": NamedSharding(mesh, P("x"))}
  params, state = place(tx, table.tree({"w": (64, 1024)}, jnp.bfloat16), shardings)
  grads = jax.device_put(params, NamedSharding(mesh, P(None, "x")))
  compiled = fused(tx).lower(params, state, grads).compile()
  assert sum(collectives(compiled.as_text()).values()) <= (1 if implementation != "jnp" else 2)
  before = jax.tree.map(lambda x: x.sharding, (params, state))
  for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(compiled(params, state, grads)), strict=True):
    assert y.sharding.is_equivalent_to(x, y.ndim)


def _not_bias(params):
  return jax.tree_util.tree_map_with_path(lambda path, _: "bias" not in jax.tree_util.keystr(path), params)


WRAPPED = {
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "masked": lambda tx: optax.masked(tx, _not_bias),
    "partition": lambda tx: optax.partition({True: tx, False: optax.sgd(1e-2)}, _not_bias),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_state_shardings_inside_wrappers(wrapper):
  tx = WRAPPED[wrapper](optimizer(None, {}))
  params = table.tree(SHAPES, jnp.bfloat16)
  shardings = olp.state_shardings(tx, params, shardings_of(make_mesh((4, 2)), MESHES[4, 2]))
  state = jax.device_put(tx.init(params), shardings)
  found = state_lib.find_states(state)[0]
  assert found.mu["matrix"].sharding.spec == found.mu_scale["matrix"].sharding.spec == P("x", "y")
  assert found.count.sharding.is_fully_replicated


def test_state_shardings_of_nothing_says_so():
  with pytest.raises(ValueError, match="param_shardings is empty"):
    olp.state_shardings(optimizer(None, {}), {}, {})
