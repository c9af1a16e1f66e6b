"""What went wrong for others (shared/cases.md), one test a case, named after its number."""

import functools
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import table
from table import StateFormat

import optax_lowprec as olp
from optax_lowprec import formats as fmts


@pytest.mark.parametrize("row", table.ROWS[::7], ids=table.ROW_IDS[::7])
def test_case_01_empty_leaf_beside_a_full_one(row, implementation):
  """TransformerEngine #3207: ones(4) and zeros((0,))."""
  params = {"full": jnp.ones(4), "empty": jnp.zeros((0,))}
  # Equal values are kept by every scaled format but for a rounding; 0.5 by the unscaled.
  g = lambda t, p: jax.tree.map(lambda x: jnp.full_like(x, 0.5), p)
  tx = olp.adamw(1e-2, **row.keywords(), implementation=implementation)
  new, state = table.run_steps(tx, params, g, 5)
  right, _ = table.run_steps(optax.adamw(1e-2), params, g, 5)
  assert new["empty"].shape == (0,) and int(state.count) == 5
  coarse = any(f.dtype.startswith("float8") for f in (row.mu, row.nu, row.master))
  np.testing.assert_allclose(olp.master_params(state, new)["full"], right["full"], atol=0.05 if coarse else 1e-2)


@pytest.mark.parametrize("fused", [False, True], ids=["chain", "fused"])
def test_case_02_nothing_to_optimize(fused, implementation):
  """TransformerEngine #1986: an empty tree and all leaves masked; the count advances, bias correction follows it."""
  tx = olp.adamw(1e-2, implementation=implementation)
  new, state = table.run_steps(tx, {}, lambda t, p: {}, 3, fused=fused)
  assert new == {} and int(state.count) == 3
  params = {"w": jnp.ones((4, 64))}
  masked = optax.masked(tx, {"w": False})
  new, state = table.run_steps(masked, params, lambda t, p: jax.tree.map(jnp.zeros_like, p), 3, fused=fused)
  chex.assert_trees_all_equal(new, params)
  assert int(state.inner_state.count) == 3
  # A late start counts as optax's does.
  late = lambda module: module(1e-2).init(params)
  ours = late(olp.adamw)._replace(count=jnp.int32(3))
  theirs = late(optax.adamw)
  theirs = (theirs[0]._replace(count=jnp.int32(3)), *theirs[1:])
  a, _ = olp.adamw(1e-2, implementation=implementation).update(params, ours, params)
  b, _ = optax.adamw(1e-2).update(params, theirs, params)
  chex.assert_trees_all_close(a, b, rtol=1e-5)


def test_case_04_many_scalars(implementation):
  """TransformerEngine #2189: thousands of leaves. 8,193 of them with OPTAX_LOWPREC_MANY=8193.

  The calls are chunked and tracing is linear, but XLA's own compile time and memory are superlinear in the leaves, for
  us as for optax.adamw: 1,000 leaves take 4 to 7 s of CPU time and 0.9 GB, 8,193 more than 20 GB.
  """
  n = int(os.environ.get("OPTAX_LOWPREC_MANY", 250 if implementation == "jnp" else 1000))
  params = [jnp.float32(1.0)] * n
  tx = olp.adamw(1e-2, implementation=implementation)
  step = jax.jit(functools.partial(olp.apply_gradients, tx))
  new, _ = step(params, tx.init(params), params)
  np.testing.assert_allclose(np.asarray(jax.device_get(new)), 0.99 - 1e-6, rtol=1e-5)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16", "float16"])
def test_case_05_gradients_of_another_dtype(param_dtype, grad_dtype, implementation):
  """TransformerEngine #3358, optax #1098: every pair, eager and jit; the updates have the parameters' dtype."""
  params = {"w": jnp.ones((4, 64), param_dtype)}
  g = lambda t, p: {"w": jnp.full((4, 64), 0.5, grad_dtype)}
  tx = olp.adamw(1e-2, implementation=implementation)
  updates, _ = tx.update(g(0, params), tx.init(params), params)
  assert updates["w"].dtype == params["w"].dtype
  for fused, mode in ((False, "jit"), (True, "eager")):
    new, state = table.run_steps(tx, params, g, 2, mode, fused)
    assert new["w"].dtype == params["w"].dtype
    np.testing.assert_allclose(np.asarray(olp.master_params(state, new)["w"]), 0.98, atol=1e-4)


def test_case_06_ties_in_remainder16(implementation):
  """apex #1842: masters exactly between two bfloat16."""
  bits = np.asarray([0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000], np.uint32)
  w = {"w": jnp.asarray(bits.view(np.float32))}
  params = {"w": w["w"].astype(jnp.bfloat16)}
  tx = olp.adamw(0.0, master="remainder16", min_quantized_size=0, implementation=implementation)
  params, state = olp.with_master_params(tx.init(params), params, w)
  np.testing.assert_array_equal(table.bits(olp.master_params(state, params)["w"]), bits)
  for fused in (True, False):
    new, new_state = table.run_steps(tx, params, lambda t, p: p, 3, fused=fused, state=state)
    np.testing.assert_array_equal(table.bits(olp.master_params(new_state, new)["w"]), bits)


def test_case_07_moments_stay_float32_with_bfloat16_parameters(implementation):
  """flashoptim #2."""
  shapes = {"w": (8, 256)}
  params = table.tree(shapes, jnp.bfloat16)
  gradients = table.Gradients(shapes)
  tx = olp.adamw(**table.HYPER, mu="float32", nu="float32", implementation=implementation)
  new, state = table.run_steps(tx, params, gradients.at, 50)
  rounded = lambda t: gradients.numpy(t, "w").astype(jnp.bfloat16).astype(np.float32)
  _, mu, nu = table.adamw64(np.asarray(params["w"], np.float32), rounded, 50)
  assert state.mu["w"].dtype == state.nu["w"].dtype == jnp.float32
  np.testing.assert_allclose(state.nu["w"], nu, rtol=1e-5)
  np.testing.assert_allclose(state.mu["w"], mu, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("formats", table.FEW)
def test_case_08_save_and_restore(formats, tmp_path, implementation):
  """flashoptim #3: one more step after restoring is bitwise that of never having stopped."""
  import orbax.checkpoint as ocp

  shapes = {"w": (8, 256), "b": (7,)}
  params = table.tree(shapes, jnp.bfloat16)
  gradients = table.Gradients(shapes)
  tx = olp.adamw(1e-2, **{"min_quantized_size": 0, **table.FEW[formats]}, implementation=implementation)
  params, state = table.run_steps(tx, params, gradients.at, 3, fused=True)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", (params, state))
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, state)))
  more = lambda p, s: table.run_steps(tx, p, gradients.at, 1, fused=True, state=s)
  table.assert_same_bits(more(*restored), more(params, state))


def test_case_09_no_temporaries(implementation):
  """Megatron-LM #1477: donated, the step needs no memory that grows with the parameters.

  A kernel keeps none. jnp is left to XLA, which on a CPU keeps some for every leaf (measured: 20 bytes a parameter).
  """

  def temporary(leaves):
    params = {f"w{i}": jax.ShapeDtypeStruct((512, 512), jnp.bfloat16) for i in range(leaves)}
    tx = olp.adamw(1e-2, mu="float16", nu="float16", implementation=implementation)
    state = jax.eval_shape(tx.init, params)
    step = jax.jit(functools.partial(olp.apply_gradients, tx), donate_argnums=(1, 2))
    return step.lower(params, state, params).compile().memory_analysis().temp_size_in_bytes

  one, four = temporary(1), temporary(4)
  if implementation == "jnp":
    assert four <= 4 * 24 * 512 * 512
  else:
    assert one <= 65536 and four <= one + 4096


@pytest.mark.parametrize("formats", table.FEW)
@pytest.mark.parametrize("fused", [False, True], ids=["chain", "fused"])
def test_case_10_zero_gradients_from_the_start(formats, fused, implementation):
  """optax #1754, #1789: fp16 parameters, three steps without gradients: finite, nothing moves without decay."""
  params = table.tree({"w": (8, 256), "b": (7,)}, jnp.float16)
  keywords = {"min_quantized_size": 0, **table.FEW[formats], "implementation": implementation}
  zero = lambda t, p: jax.tree.map(jnp.zeros_like, p)
  new, state = table.run_steps(olp.adamw(1e-2, weight_decay=0.0, **keywords), params, zero, 3, fused=fused)
  masterless = formats != "stochastic"  # a stochastically rounded master still moves by its own rounding
  if masterless:
    chex.assert_trees_all_close(new, params, rtol=1e-3, atol=1e-6)
  chex.assert_tree_all_finite(jax.tree.map(lambda x: x.astype(jnp.float32), (new, state)))
  if formats in ("default", "all_float32"):
    table.assert_same_bits(new, params)


@pytest.mark.parametrize("kind", ["python", "numpy", "jax"])
def test_case_11_inject_hyperparams_with_bfloat16_parameters(kind, implementation):
  """optax #1414, #1405: b2 stays 0.999 and no dtype changes."""
  params = table.tree({"w": (8, 256)}, jnp.bfloat16)
  lr = {"python": 0.0625, "numpy": np.float32(0.0625), "jax": jnp.float32(0.0625)}[kind]
  injected = optax.inject_hyperparams(olp.adamw)(learning_rate=lr, nu="float32", implementation=implementation)
  plain = olp.adamw(0.0625, nu="float32", implementation=implementation)
  gradients = table.Gradients({"w": (8, 256)})
  state = injected.init(params)
  new, new_state = table.run_steps(injected, params, gradients.at, 5, "jit", state=state)
  right, right_state = table.run_steps(plain, params, gradients.at, 5, "jit")
  chex.assert_trees_all_equal_shapes_and_dtypes((new, new_state), (params, state))
  np.testing.assert_allclose(olp.moments(new_state, new)[1]["w"], olp.moments(right_state, right)[1]["w"], rtol=1e-4)
  np.testing.assert_allclose(np.asarray(new["w"], np.float32), np.asarray(right["w"], np.float32), rtol=1e-2, atol=1e-3)


def test_case_12_multi_steps_with_bfloat16_parameters(implementation):
  """optax #377, #1038: inside jit, dtypes stable, one inner step for four outer ones."""
  shapes = {"w": (8, 256), "b": (7,)}
  params = table.tree(shapes, jnp.bfloat16)
  tx = optax.MultiSteps(
      olp.adamw(1e-2, min_quantized_size=0, implementation=implementation), 4
  ).gradient_transformation()
  state = tx.init(params)
  gradients = table.Gradients(shapes)
  new, new_state = table.run_steps(tx, params, gradients.at, 8, "scan", state=state)
  chex.assert_trees_all_equal_shapes_and_dtypes((new, new_state), (params, state))
  assert int(new_state.inner_opt_state.count) == 2
  three, _ = table.run_steps(tx, params, gradients.at, 3, "jit")
  chex.assert_trees_all_equal(three, params)
  assert float(jnp.abs((new["w"] - params["w"]).astype(jnp.float32)).max()) > 1e-3


def test_case_13_multi_steps_memory(implementation):
  """optax #472: the accumulator is all that MultiSteps adds to the state, and temporaries stay a few of a leaf's."""
  params = {f"w{i}": jax.ShapeDtypeStruct((256, 512), jnp.bfloat16) for i in range(4)}
  inner = olp.adamw(1e-2, implementation=implementation)
  tx = optax.MultiSteps(inner, 4).gradient_transformation()
  size = lambda t: sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(t))
  state, inner_state = jax.eval_shape(tx.init, params), jax.eval_shape(inner.init, params)
  n = 4 * 256 * 512
  assert size(state) - size(inner_state) <= 4 * n + 64
  step = jax.jit(functools.partial(olp.apply_gradients, tx), donate_argnums=(1, 2))
  memory = step.lower(params, state, params).compile().memory_analysis()
  assert memory.temp_size_in_bytes <= 28 * n  # measured: 23


@pytest.mark.parametrize("formats", table.FEW)
def test_case_14_weight_decay(formats, implementation):
  """bitsandbytes #1992, #2010: decay alone, 0.1, is optax.adamw's, in every format."""
  params = table.tree({"w": (8, 256), "b": (7,)})
  zero = lambda t, p: jax.tree.map(jnp.zeros_like, p)
  keywords = {"min_quantized_size": 0, **table.FEW[formats], "implementation": implementation}
  new, state = table.run_steps(olp.adamw(0.1, weight_decay=0.1, **keywords), params, zero, 20)
  right, _ = table.run_steps(optax.adamw(0.1, weight_decay=0.1), params, zero, 20)
  tolerance = 3e-3 if formats == "stochastic" else 1e-6
  chex.assert_trees_all_close(olp.master_params(state, new), right, rtol=1e-5, atol=tolerance)
  assert 0.7 < float(jnp.abs(new["w"]).sum() / jnp.abs(params["w"]).sum()) < 0.9


def test_case_18_a_schedule_is_one_trace(implementation):
  """torchao #463, #746: 1000 steps of a schedule, one trace; 300 leaves of few shapes trace a step a shape."""
  chex.clear_trace_counter()  # chex tells functions apart by what they are, and this one is there twice
  params = {"w": jnp.ones((4, 64))}
  tx = olp.adamw(optax.cosine_decay_schedule(1e-3, 1000), implementation=implementation)
  step = jax.jit(chex.assert_max_traces(lambda p, s: olp.apply_gradients(tx, params, s, p), n=1), donate_argnums=(1,))
  state, new = tx.init(params), params
  for _ in range(1000):
    new, state = step(new, state)
  assert int(state.count) == 1000 and step._cache_size() == 1
  many = {f"w{i}": jnp.ones((4, 64 + i % 3)) for i in range(100 if implementation == "jnp" else 300)}
  tx = olp.adamw(1e-2, min_quantized_size=0, implementation=implementation)
  new, _ = jax.jit(functools.partial(olp.apply_gradients, tx))(many, tx.init(many), many)
  np.testing.assert_allclose(new["w99"], 0.99, atol=1e-5)


@pytest.mark.parametrize(
    ("formats", "dtype"), [*((f, "bfloat16") for f in table.FEW), ("default", "float32"), ("default", "float16")]
)
def test_case_22_eager_equals_jit_bitwise(formats, dtype, implementation):
  """xla #41605, jax #23007: fused multiply-adds and elided roundings must not make a difference.

  Nor does LLVM's optimizer, which only the jitted step has. (It does to the order of a norm's sum: no clipping here.)
  """
  shapes = {"b": (7,), "ragged": (4, 257)}
  params = table.tree(shapes, jnp.dtype(dtype))
  keywords = {"min_quantized_size": 0, **table.FEW[formats], "implementation": implementation}
  tx = olp.adamw(1e-2, weight_decay=0.1, nesterov=True, eps_root=1e-10, **keywords)
  g = table.Gradients(shapes).at(0, params)
  state = tx.init(params)
  for step in (tx.update, functools.partial(olp.apply_gradients, tx)):
    optimized = jax.jit(step, compiler_options=table.OPTIMIZED)
    table.assert_same_bits(step(g, state, params), optimized(g, state, params))


def test_case_23_saturation():
  """ml_dtypes #260, #400: above 448 e4m3fn saturates and is never NaN."""
  x = jnp.asarray([448.0, 449.0, 464.0, 464.1, 465.0, 480.0, 1e9, jnp.inf], jnp.float32)
  for rounding in table.ROUNDINGS:
    fmt = StateFormat("float8_e4m3fn", None, rounding=rounding)
    for run in (lambda v: fmts.encode(v, fmt, noise32=jnp.full(v.shape, 0xFFFFFFFF, jnp.uint32))[0],):
      for sign in (1, -1):
        for f in (run, jax.jit(run)):
          np.testing.assert_array_equal(f(sign * x).astype(jnp.float32), np.full(x.shape, sign * 448.0))


@pytest.mark.parametrize("fused", [False, True], ids=["chain", "fused"])
def test_case_26_small_steps_are_not_lost(fused, implementation):
  """apex #1728, OneTrainer #996: lr 1e-6 in bfloat16; 1000 equal steps move the master by 1e-3."""
  params = {"w": jnp.full((4, 64), 1.0, jnp.bfloat16)}
  one = lambda t, p: jax.tree.map(jnp.ones_like, p)
  tx = olp.adamw(1e-6, weight_decay=0.0, nu="float32", min_quantized_size=0, implementation=implementation)
  new, state = table.run_steps(tx, params, one, 1000, fused=fused)
  # 1e-6 is 16.8 places of a float32 below 1, so float32 itself walks 17: 1.3 % further than 1e-3.
  right, _ = table.run_steps(optax.adamw(1e-6, weight_decay=0.0), {"w": jnp.ones((4, 64))}, one, 1000)
  np.testing.assert_allclose(olp.master_params(state, new)["w"], right["w"], rtol=1e-6)
  assert 9e-4 < float(1 - right["w"][0, 0]) < 1.1e-3
  zero = lambda t, p: jax.tree.map(jnp.zeros_like, p)
  for master, rtol in (("remainder16", 1e-5), ("remainder8", 1e-2)):
    lr, decay = (1e-3, 0.1) if master == "remainder16" else (1e-2, 0.1)
    tx = olp.adamw(lr, weight_decay=decay, master=master, min_quantized_size=0, implementation=implementation)
    new, state = table.run_steps(tx, params, zero, 1000, fused=fused)
    np.testing.assert_allclose(olp.master_params(state, new)["w"], (1 - lr * decay) ** 1000, rtol=rtol)


@pytest.mark.parametrize("formats", table.FEW)
def test_case_27_structure_before_any_step(formats, implementation):
  """Megatron-LM #1820."""
  params = table.tree(table.SMALL_SHAPES, lambda i: jnp.bfloat16 if i % 2 else jnp.float32)
  keywords = {"min_quantized_size": 0, **table.FEW[formats], "implementation": implementation}
  tx = optax.chain(optax.clip(1.0), olp.adamw(1e-2, **keywords))
  abstract = jax.eval_shape(tx.init, params)
  _, state = table.run_steps(tx, params, lambda t, p: p, 2)
  assert jax.tree.structure(abstract) == jax.tree.structure(state)
  assert table.shapes_and_dtypes(abstract) == table.shapes_and_dtypes(state)


def test_case_28_embeddings_with_rare_rows(implementation):
  """bitsandbytes #11: a row never seen stays finite and still for 5,000 steps, in float8 and with an override."""
  params = {"embedding": jnp.ones((8, 160)), "head": jnp.ones((160, 32))}
  override = lambda path, leaf: "float32" if "embedding" in jax.tree_util.keystr(path) else "float8_e4m3fn"
  for formats in ({}, dict(mu=override, nu=override)):
    tx = olp.adamw(1e-4, weight_decay=0.0, min_quantized_size=0, **formats, implementation=implementation)

    def gradients(t, p):
      row = jnp.arange(8)[:, None]
      seen = (row < 4) & (row == t % 5)
      once = (row == 5) & (t == 0)
      return {"embedding": jnp.where(seen | once, jnp.sin(t + row) * jnp.ones((8, 160)), 0.0), "head": p["head"]}

    new, state = table.run_steps(tx, params, gradients, 5000, fused=True)
    chex.assert_tree_all_finite(jax.tree.map(lambda x: x.astype(jnp.float32), (new, state)))
    np.testing.assert_array_equal(new["embedding"][6], 1.0)
    assert float(jnp.abs(new["embedding"][5] - 1).max()) < 1e-2
    assert float(jnp.abs(new["embedding"][0] - 1).max()) > 1e-4
    if formats:
      assert state.mu["embedding"].dtype == jnp.float32 and state.mu["head"].dtype == jnp.float8_e4m3fn
