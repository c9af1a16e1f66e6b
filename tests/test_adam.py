"""The numbers of a step: equality with optax, every combination of formats against float64, and the traps."""

import functools

import chex
from conftest import runnable_implementations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import table
from table import StateFormat

import optax_lowprec as olp

FLOAT32 = dict(mu="float32", nu="float32", master="float32")

# --- equality with optax --------------------------------------------------------------------------------------------

_SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
_MASK = {k: len(s) > 1 for k, s in table.SHAPES.items()}
# At a larger learning rate float32 itself rounds 1 in 10^5 elements further apart than atol.
VARIANTS = {
    "weight_decay": dict(learning_rate=1e-3, weight_decay=0.1),
    "mask": dict(learning_rate=1e-3, weight_decay=0.1, mask=_MASK),
    "schedule": dict(learning_rate=_SCHEDULE, weight_decay=0.1),
    "nesterov": dict(learning_rate=1e-3, weight_decay=0.1, nesterov=True),
    "eps_root": dict(learning_rate=1e-3, weight_decay=0.1, eps=1e-6, eps_root=1e-3),
}


@functools.cache
def _gradients() -> table.Gradients:
  return table.Gradients(table.SHAPES)


@functools.cache
def _optax_result(variant: str, mode: str):
  return table.run_steps(optax.adamw(**VARIANTS[variant]), table.tree(), jax.jit(_gradients().at), 100, mode)


def assert_equals_optax(params, right):
  """rtol 1e-5, atol 1e-7, and not by standing still."""
  chex.assert_trees_all_close(params, right, rtol=1e-5, atol=1e-7)
  chex.assert_trees_all_equal_shapes_and_dtypes(params, right)
  moved = [
      float(jnp.abs(a - b).max())
      for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(table.tree()), strict=True)
      if a.size
  ]
  assert min(moved) > 5e-4


@pytest.mark.parametrize("mode", ["eager", "jit", "scan"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_float32_equals_optax_adamw(variant, mode, implementation):
  tx = olp.adamw(**VARIANTS[variant], **FLOAT32, implementation=implementation)
  # Gradients from one jitted function: what is compared is the optimizer.
  gradients = jax.jit(_gradients().at)
  params, state = table.run_steps(tx, table.tree(), gradients, 100, mode)
  right, right_state = _optax_result(variant, mode)
  assert_equals_optax(params, right)
  mu, nu = olp.moments(state, params)
  chex.assert_trees_all_close(mu, right_state[0].mu, rtol=1e-5, atol=1e-7)
  chex.assert_trees_all_close(nu, right_state[0].nu, rtol=1e-5, atol=1e-7)
  assert int(state.count) == 100


@pytest.mark.parametrize("name", ["adam", "scale_by_adam"])
def test_other_optimizers_equal_optax(name, implementation):
  """Updates are compared: ``scale_by_adam``'s are a direction, not a step."""
  ours, theirs = table.OPTIMIZERS[name]
  tx = ours(**table.optimizer_keywords(name, FLOAT32), implementation=implementation)
  reference = theirs()
  params = table.tree(table.SMALL_SHAPES)
  gradients = table.Gradients(table.SMALL_SHAPES).at

  def run(tx):
    def step(state, t):
      updates, state = tx.update(gradients(t, params), state, params)
      return state, updates

    return jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(20)))(tx.init(params))[1]

  chex.assert_trees_all_close(run(tx), run(reference), rtol=1e-5, atol=1e-7)


def test_scale_by_adam_needs_no_params(implementation):
  tx = olp.scale_by_adam(min_quantized_size=0, implementation=implementation)
  params = table.tree(table.SMALL_SHAPES)
  updates, _ = tx.update(params, tx.init(params))
  chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
  chex.assert_trees_all_close(updates, jax.tree.map(jnp.sign, params), rtol=0.1)


# --- every combination against float64 ------------------------------------------------------------------------------


# Every row for the first implementation. The others store the same bits (test_kernels.py), and jnp takes long to
# compile: of theirs one in seven.
ROWS_OF = [(i, r) for n, i in enumerate(runnable_implementations()) for k, r in enumerate(table.ROWS)
           if n == 0 or table.ALL_ROWS or k % 7 == 3]  # fmt: skip
EVERY_ROW = pytest.mark.parametrize(
    "implementation, row", ROWS_OF, ids=[f"{i}-{str(r).replace(' ', '_')}" for i, r in ROWS_OF]
)


@functools.cache
def _scaled_gradients() -> table.Gradients:
  return table.Gradients(table.SHAPES, scales=table.GRADIENT_SCALES)


@functools.cache
def _leaf64(key: str, dtype: str, wrong: str | None = None):
  """A leaf's start, and AdamW's ``(w, mu, nu)`` after 50 steps, with its gradients rounded as its dtype rounds."""
  start = np.asarray(jnp.asarray(table.tree()[key], dtype), np.float32)
  gradients = _scaled_gradients()
  rounded = lambda t: np.asarray(gradients.numpy(t, key).astype(jnp.dtype(dtype)), np.float32)
  return start, *table.adamw64(start, rounded, 50, table.WRONG[wrong] if wrong else table.Wrong())


def _right(row: table.Row, wrong: str | None = None):
  """Trees of starts, masters, mu and nu."""
  leaves = {k: _leaf64(k, jnp.dtype(row.dtype(i)).name, wrong) for i, k in enumerate(table.SHAPES)}
  return [{k: v[j] for k, v in leaves.items()} for j in range(4)]


def _exceeded(row: table.Row, master, mu, nu) -> dict[str, float]:
  """What is out of the row's tolerances, as a multiple of the tolerance."""
  start, right, right_mu, right_nu = _right(row)
  errors = (
      table.group_errors(mu, right_mu),
      table.group_errors(nu, right_nu),
      table.group_errors(master, right, start),
  )
  found = {}
  for part, tolerance, by_group in zip(("mu", "nu", "the way"), row.tolerances(), errors, strict=True):
    for group, error in by_group.items():
      if not error <= tolerance:
        found[f"{part} of {group}"] = error / tolerance
  return found


@EVERY_ROW
def test_every_format_follows_float64_adamw(implementation, row):
  """50 jitted steps on the whole tree: finite, of stable dtypes, and within the format's tolerance."""
  tx = olp.adamw(**table.HYPER, **row.keywords(), implementation=implementation)
  params = table.tree(dtype=row.dtype)
  state = tx.init(params)
  new_params, new_state = table.run_steps(tx, params, _scaled_gradients().at, 50, fused=True, state=state)
  chex.assert_tree_all_finite(jax.tree.map(lambda x: x.astype(jnp.float32), (new_params, new_state)))
  chex.assert_trees_all_equal_shapes_and_dtypes(new_params, params)
  chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
  mu, nu = olp.moments(new_state, new_params)
  assert not _exceeded(row, olp.master_params(new_state, new_params), mu, nu)


@pytest.mark.parametrize("wrong", table.WRONG)
def test_wrong_optimizers_fail_the_table(wrong):
  """The tolerances are tight enough to tell: a wrong AdamW, itself without any rounding, is out of them.

  By twice, so that no rounding error of a row could hide it. Only rows with a float8 part may be blind to a mistake
  (their own error can be as large), and not most of those.
  """
  blind = []
  for row in table.ROWS:
    _, master, mu, nu = _right(row, wrong)
    if max(_exceeded(row, master, mu, nu).values(), default=0) < 2:
      blind.append(row)
  sharp = [r for r in blind if not any(f.dtype.startswith("float8") for f in (r.mu, r.nu, r.master))]
  assert not sharp, [str(r) for r in sharp]
  assert len(blind) <= len(table.ROWS) / 2, [str(r) for r in blind]


@pytest.mark.parametrize("master", ["auto", "float32", "remainder16", "remainder8", "float16", None])
def test_float16_parameters(master, implementation):
  """float16 parameters with their own kinds of master; none at all loses the most."""
  shapes = table.SMALL_SHAPES
  params = table.tree(shapes, jnp.float16)
  gradients = table.Gradients(shapes)
  tx = olp.adamw(
      **table.HYPER, mu="float32", nu="float32", master=master, min_quantized_size=0, implementation=implementation
  )
  new, state = table.run_steps(tx, params, gradients.at, 50, fused=True)
  chex.assert_trees_all_equal_dtypes(new, params)
  right = {}
  for k, p in params.items():
    rounded = lambda t, k=k: gradients.numpy(t, k).astype(np.float16).astype(np.float32)
    right[k] = table.adamw64(np.asarray(p, np.float32), rounded, 50)[0]
  errors = table.group_errors(olp.master_params(state, new), right, params)
  tolerance = {"remainder8": 1e-4, "float16": 3e-3, None: 1e-2}.get(master, 3e-5)
  assert max(errors.values()) < tolerance, errors


# --- traps ----------------------------------------------------------------------------------------------------------


@EVERY_ROW
def test_zero_gradients_after_real_ones_stay_finite(implementation, row):
  """100 steps with gradients of 1e-7, 1 and 7e5 by block, then 5,000 with none.

  A block whose gradient stays zero decays by 0.9 a step and reaches float32's end in ~800; a reciprocal scale that
  overflows there made 0 * inf = NaN of a real training run. Without decay a parameter then comes to rest.
  """
  tx = olp.adamw(1e-3, **{**row.keywords(), "implementation": implementation}, weight_decay=0.0)
  params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(3, 160)), jnp.bfloat16 if row.flip else jnp.float32)}
  size = jnp.asarray([[1e-7], [1.0], [7e5]], jnp.float32)
  base = jnp.asarray(np.random.default_rng(1).normal(size=(3, 160)), jnp.float32) * size

  @jax.jit
  def run(params, state, live, start, stop):
    def step(t, carry):
      params, state = carry
      g = (base * jnp.where(live, jnp.cos(0.1 * t) + 0.1, 0.0)).astype(params["w"].dtype)
      return olp.apply_gradients(tx, {"w": g}, state, params)

    return jax.lax.fori_loop(start, stop, step, (params, state))

  finite = lambda x: chex.assert_tree_all_finite(jax.tree.map(lambda v: v.astype(jnp.float32), x))
  one, one_state = run(params, tx.init(params), True, 0, 100)
  finite((one, one_state, olp.moments(one_state, one)))
  moved = np.abs(np.asarray(olp.master_params(one_state, one)["w"], np.float64) - np.asarray(params["w"], np.float64))
  assert moved.max() > 1e-2 or row.master.dtype.startswith("float8"), "the real steps must be real"
  two, two_state = run(one, one_state, False, 100, 5100)
  finite((two, two_state, olp.moments(two_state, two)))
  assert int(two_state.count) == 5100
  # Not so without a scale in 8 or 16 bits: mu stays at its last code (0.9 x 4 rounds to 4) while nu falls or saturates.
  if all(f.scaling or f.dtype in ("float32", "bfloat16") for f in (row.mu, row.nu)):
    drift = np.abs(np.asarray(two["w"], np.float64) - np.asarray(one["w"], np.float64)).max()
    assert drift < 1, drift


@pytest.mark.parametrize("size", [1e-7, 7e5])
@pytest.mark.parametrize("formats", table.FEW)
def test_extreme_gradients(formats, size, implementation):
  """Adam does not see the size of gradients: the same steps as with gradients of 1."""
  shapes = {"w": (8, 256)}
  params = table.tree(shapes)
  tx = olp.adamw(1e-2, eps=1e-20, **{"min_quantized_size": 0, **table.FEW[formats]}, implementation=implementation)
  run = lambda scale: table.run_steps(tx, params, table.Gradients(shapes, scale).at, 20)[0]
  way, right = (np.asarray(run(s)["w"] - params["w"], np.float64) for s in (size, 1.0))
  assert np.isfinite(way).all()
  assert np.sqrt(np.mean((way - right) ** 2) / np.mean(right**2)) < (1e-4 if formats == "all_float32" else 0.2)


@pytest.mark.parametrize("formats", table.FEW)
def test_one_nan_gradient_does_not_poison_its_block(formats, implementation):
  """Without skipping, that element is NaN from then on, as in optax; its neighbours go on as if nothing was."""
  params = table.tree({"w": (4, 256)})
  gradients = table.Gradients({"w": (4, 256)})
  tx = olp.adamw(1e-2, **{"min_quantized_size": 0, **table.FEW[formats]}, implementation=implementation)

  def spoiled(t, p):
    g = gradients.at(t, p)["w"]
    return {"w": jnp.where((t == 3) & (jnp.arange(4 * 256).reshape(4, 256) == 300), jnp.nan, g)}

  clean, _ = table.run_steps(tx, params, gradients.at, 10)
  got, state = table.run_steps(tx, params, spoiled, 10)
  got, clean = np.asarray(got["w"]).ravel(), np.asarray(clean["w"]).ravel()
  assert np.isnan(got[300])
  others = np.arange(got.size) != 300
  assert np.isfinite(got[others]).all()
  # The block's absmax may have been the spoiled element's: equal but for that.
  np.testing.assert_allclose(got[others], clean[others], atol=2e-2)
  assert np.isfinite(np.asarray(olp.moments(state, params)[1]["w"]).ravel()[others]).all()


@pytest.mark.parametrize(
    ("formats", "bad"), [*((f, np.nan) for f in table.FEW), ("default", np.inf), ("default", -np.inf)]
)
def test_skip_nonfinite_changes_nothing(formats, bad, implementation):
  """Count included, updates are zero, the next step is what it would have been."""
  shapes = {"a": (4, 256), "b": (3,)}
  params = table.tree(shapes, lambda i: (jnp.bfloat16, jnp.float32)[i])
  keywords = {"min_quantized_size": 0, **table.FEW[formats]}
  tx = olp.adamw(1e-2, **keywords, skip_nonfinite=True, max_grad_norm=1.0, implementation=implementation)
  gradients = table.Gradients(shapes)
  params, state = table.run_steps(tx, params, gradients.at, 3)
  good = gradients.at(4, params)
  spoiled = {**good, "b": good["b"].at[1].set(bad)}
  update = jax.jit(tx.update)
  updates, same = update(spoiled, state, params)
  table.assert_same_bits(same, state)
  chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
  table.assert_same_bits(jax.jit(functools.partial(olp.apply_gradients, tx))(spoiled, state, params), (params, state))
  table.assert_same_bits(update(good, same, params), update(good, state, params))
  assert int(update(good, state, params)[1].count) == 4


def test_skip_nonfinite_leaves_finite_steps_alone(implementation):
  params = table.tree({"ragged": (4, 257), "short": (5, 3)})
  run = lambda skip: table.run_steps(
      olp.adamw(1e-2, min_quantized_size=0, skip_nonfinite=skip, implementation=implementation), params,
      table.Gradients({"ragged": (4, 257), "short": (5, 3)}).at, 5)  # fmt: skip
  table.assert_same_bits(run(True), run(False))


# --- eager, jit, scan; donation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", table.FEW)
@pytest.mark.parametrize("fused", [False, True], ids=["chain", "fused"])
def test_eager_jit_and_scan_give_the_same_bits(formats, fused, implementation):
  shapes = {"short": (5, 3), "ragged": (4, 257)}
  params = table.tree(shapes, lambda i: (jnp.float32, jnp.bfloat16)[i])
  keywords = {"min_quantized_size": 0, **table.FEW[formats]}
  tx = olp.adamw(1e-2, weight_decay=0.1, **keywords, implementation=implementation)
  gradients = jax.jit(table.Gradients(shapes).at)
  results = [table.run_steps(tx, params, gradients, 4, mode, fused) for mode in ("eager", "jit", "scan")]
  table.assert_same_bits(results[0], results[1], "eager and jit")
  table.assert_same_bits(results[1], results[2], "jit and scan")


@pytest.mark.parametrize("formats", table.FEW)
def test_stochastic_bits_depend_on_seed_step_and_leaf_alone(formats, implementation):
  """The same seed repeats bit for bit; another seed, leaf or step draws otherwise (and nearest never does)."""
  params = {k: table.tree({"w": (8, 256)})["w"] for k in "ab"}
  g = {k: table.tree({"w": (8, 256)}, seed=5)["w"] for k in "ab"}
  keywords = {"min_quantized_size": 0, **table.FEW[formats]}
  run = lambda seed, count: (
      lambda tx: jax.jit(tx.update)(g, tx.init(params)._replace(count=jnp.int32(count)), params)[1]
  )(olp.adamw(1e-2, **keywords, seed=seed, implementation=implementation))
  first = run(0, 0)
  table.assert_same_bits(first, run(0, 0))
  differs = formats == "stochastic"
  same = lambda x, y: bool((table.bits(x) == table.bits(y)).all())
  assert same(first.mu["a"], run(1, 0).mu["a"]) != differs
  assert same(first.mu["a"], run(0, 1).mu["a"]) != differs
  assert same(first.mu["a"], first.mu["b"]) != differs


def test_donated_step_equals_undonated(implementation):
  """Donated buffers are reused and gone; without donation the inputs survive. The results are the same."""
  shapes = {"w": (64, 256), "b": (7,)}
  params = table.tree(shapes, jnp.bfloat16)
  tx = olp.adamw(1e-2, min_quantized_size=0, implementation=implementation)
  state = tx.init(params)
  g = table.Gradients(shapes).at(0, params)
  step = lambda p, s: olp.apply_gradients(tx, g, s, p)
  right = jax.jit(step)(params, state)
  assert not any(x.is_deleted() for x in jax.tree.leaves((params, state)))
  copy = jax.tree.map(lambda x: x + jnp.zeros_like(x), (params, state))
  got = jax.jit(step, donate_argnums=(0, 1))(*copy)
  table.assert_same_bits(got, right)
  assert copy[0]["w"].is_deleted() and copy[1].mu["w"].is_deleted() and copy[1].master["w"].is_deleted()


# --- dtypes ---------------------------------------------------------------------------------------------------------


def test_float64_parameters_are_float64_throughout(implementation):
  """optax.adamw in float64, to float64's rounding; formats do not apply."""
  with table.x64():
    w = jnp.asarray(np.random.default_rng(0).normal(size=(4, 257)), jnp.float64)
    params = {"w": w, "narrow": w.astype(jnp.bfloat16)}
    g = lambda t, p: jax.tree.map(lambda x: (w * jnp.cos(t)).astype(x.dtype), p)
    tx = olp.adamw(1e-2, min_quantized_size=0, weight_decay=0.1, implementation=implementation)
    new, state = table.run_steps(tx, params, g, 20)
    right, _ = table.run_steps(optax.adamw(1e-2, weight_decay=0.1), params, g, 20)
    assert new["w"].dtype == jnp.float64 and state.mu["w"].dtype == jnp.float64
    assert new["narrow"].dtype == jnp.bfloat16 and state.mu["narrow"].dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(new["w"], right["w"], rtol=1e-12)
    fused, fused_state = table.run_steps(tx, params, g, 20, fused=True)
    np.testing.assert_allclose(fused["w"], right["w"], rtol=1e-12)
    assert olp.master_params(fused_state, fused)["w"].dtype == jnp.float64


@pytest.mark.parametrize("fused", [False, True], ids=["chain", "fused"])
def test_integer_leaves_are_untouched(fused, implementation):
  params = {"w": jnp.ones((4, 64)), "steps": jnp.arange(5), "flag": jnp.asarray(True)}
  g = {"w": jnp.ones((4, 64)), "steps": jnp.zeros((5,), jnp.int32), "flag": jnp.zeros((), bool)}
  tx = olp.adamw(1e-2, min_quantized_size=0, implementation=implementation)
  new, state = table.run_steps(tx, params, lambda t, p: g, 3, fused=fused)
  chex.assert_trees_all_equal({k: new[k] for k in ("steps", "flag")}, {k: params[k] for k in ("steps", "flag")})
  chex.assert_trees_all_equal_shapes_and_dtypes(new, params)
  assert float(jnp.abs(new["w"] - 1).min()) > 1e-2
  assert int(olp.master_params(state, new)["steps"][4]) == 4


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_max_grad_norm_is_clip_by_global_norm(limit, implementation):
  """The clipped gradients are never written, but the step is that of the chain; a large limit changes nothing."""
  shapes = {k: s for k, s in table.SHAPES.items() if k != "matrix"}
  params = table.tree(shapes)
  gradients = table.Gradients(shapes).at
  run = lambda tx: table.run_steps(tx, params, gradients, 10)[0]
  own = run(olp.adamw(1e-2, **FLOAT32, max_grad_norm=limit, implementation=implementation))
  chain = run(optax.chain(optax.clip_by_global_norm(limit), optax.adamw(1e-2)))
  chex.assert_trees_all_close(own, chain, rtol=1e-5, atol=1e-6)
  free = run(olp.adamw(1e-2, **FLOAT32, implementation=implementation))
  different = max(
      float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (own, free)), strict=True) if a.size
  )
  assert (different > 1e-4) == (limit < 1)


def test_grad_scale_divides_gradients(implementation):
  params = table.tree({"ragged": (4, 257), "short": (5, 3)})
  g = table.Gradients({"ragged": (4, 257), "short": (5, 3)}).at(0, params)
  scaled = jax.tree.map(lambda x: x * 1024, g)
  tx = olp.adamw(1e-2, min_quantized_size=0, max_grad_norm=1.0, implementation=implementation)
  state = tx.init(params)
  right = tx.update(g, state, params)
  for scale in (1024.0, jnp.float32(1024)):
    table.assert_same_bits(tx.update(scaled, state, params, grad_scale=scale), right)
    table.assert_same_bits(olp.apply_gradients(tx, scaled, state, params, grad_scale=scale)[1], right[1])


def test_min_quantized_size(implementation):
  """Below it leaves keep float32 moments; the default is 4096 elements."""
  params = table.tree({"below": (4095,), "at": (4096,), "two": (64, 63)}, jnp.bfloat16)
  kinds = lambda **k: {
      n: v.dtype.name for n, v in olp.adamw(1e-2, **k, implementation=implementation).init(params).mu.items()
  }
  f8, f32 = "float8_e4m3fn", "float32"
  assert kinds() == {"below": f32, "at": f8, "two": f32}
  assert kinds(min_quantized_size=4033) == {"below": f8, "at": f8, "two": f32}
  assert kinds(min_quantized_size=0) == dict.fromkeys(params, f8)
  state = olp.adamw(1e-2, implementation=implementation).init(params)
  assert state.master["below"].dtype == jnp.float32 and state.master["at"].dtype == jnp.int16
  new, state = table.run_steps(olp.adamw(1e-2, implementation=implementation), params, lambda t, p: p, 3)
  chex.assert_trees_all_equal_dtypes(new, params)


def test_formats_by_parameter(implementation):
  """A callable of (path, leaf) decides for each parameter; the result is that of the uniform optimizers."""
  params = table.tree({"embedding": (16, 256), "head": (256, 16)}, jnp.bfloat16)
  embedding = lambda path: jax.tree_util.keystr(path) == "['embedding']"
  by_leaf = dict(
      mu=lambda path, leaf: "float32" if embedding(path) else "float8_e5m2",
      nu=lambda path, leaf: StateFormat("float16") if leaf.shape[0] == 16 else "float8_e4m3fn",
      master=lambda path, leaf: None if embedding(path) else "remainder8",
  )
  gradients = table.Gradients({k: v.shape for k, v in params.items()})
  make = functools.partial(olp.adamw, 1e-2, min_quantized_size=0, implementation=implementation)
  new, state = table.run_steps(make(**by_leaf), params, gradients.at, 5)
  assert state.mu["embedding"].dtype == jnp.float32 and state.mu["head"].dtype == jnp.float8_e5m2
  assert state.nu["embedding"].dtype == jnp.float16 and state.nu["head"].dtype == jnp.float8_e4m3fn
  assert state.master["embedding"].shape != params["embedding"].shape and state.master["head"].dtype == jnp.int8
  for name, formats in (
      ("embedding", dict(mu="float32", nu="float16", master=None)),
      ("head", dict(mu="float8_e5m2", nu="float8_e4m3fn", master="remainder8")),
  ):
    alone, alone_state = table.run_steps(make(**formats), params, gradients.at, 5)
    table.assert_same_bits(new[name], alone[name])
    table.assert_same_bits(state.mu[name], alone_state.mu[name])
    table.assert_same_bits(state.nu[name], alone_state.nu[name])


def test_mu_dtype_is_unscaled_mu(implementation):
  """As in optax: ``mu`` in that dtype."""
  params = table.tree({"w": (8, 256)})
  tx = olp.adamw(
      1e-2, 0.9, 0.999, 1e-8, 0.0, jnp.bfloat16, nu="float32", min_quantized_size=0, implementation=implementation
  )
  state = tx.init(params)
  assert state.mu["w"].dtype == jnp.bfloat16 and state.mu_scale == ()
  gradients = table.Gradients({"w": (8, 256)})
  new, _ = table.run_steps(tx, params, gradients.at, 20)
  right, _ = table.run_steps(optax.adamw(1e-2, mu_dtype=jnp.bfloat16), params, gradients.at, 20)
  # optax takes the step with the rounded mu, we with the exact one.
  chex.assert_trees_all_close(new, right, atol=3e-3)


_KINDS = {
    "python": lambda x: x,
    "numpy": np.float32,
    "numpy64": np.float64,
    "jax": jnp.float32,
    "jax_array": lambda x: jnp.asarray([x], jnp.float32)[0],
}


@pytest.mark.parametrize("kind", _KINDS)
def test_hyperparameters_of_any_kind(kind, implementation):
  """Neither the result (but for 1 - b in float32 beside in float64) nor any dtype depends on how they are passed."""
  shapes = {"w": (4, 257), "b": (7,)}
  params = table.tree(shapes, lambda i: (jnp.bfloat16, jnp.float32)[i])
  g = table.Gradients(shapes).at(0, params)

  def step(**h):
    tx = olp.adamw(**h, min_quantized_size=0, implementation=implementation)
    return tx.update(g, tx.init(params), params)

  h = dict(learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-6, eps_root=1e-8, weight_decay=0.1)
  right = step(**h)
  got = step(**{k: _KINDS[kind](v) for k, v in h.items()})
  chex.assert_trees_all_equal_shapes_and_dtypes(got, right)
  chex.assert_trees_all_close(got[0], right[0], rtol=1e-2)
  scheduled = step(**{**h, "learning_rate": lambda count: _KINDS[kind](1e-2)})
  table.assert_same_bits(scheduled, right)


def test_traced_hyperparameters_trace_once(implementation):
  """Changing a value never recompiles."""
  chex.clear_trace_counter()
  params = table.tree({"ragged": (4, 257), "short": (5, 3)})
  g = table.Gradients({"ragged": (4, 257), "short": (5, 3)}).at(0, params)
  state = olp.adamw(0.0, min_quantized_size=0).init(params)

  @jax.jit
  @chex.assert_max_traces(n=1)
  def step(state, h):
    tx = olp.adamw(**h, max_grad_norm=h["learning_rate"] * 100, min_quantized_size=0, implementation=implementation)
    return tx.update(g, state, params)

  sizes = []
  for lr in (1e-3, 1e-2, 1e-1):
    h = dict(learning_rate=lr, b1=0.9, b2=0.999, eps=1e-8, eps_root=lr * 1e-9, weight_decay=lr)
    updates, _ = step(state, h)
    sizes.append(float(jnp.abs(updates["ragged"]).mean()))
  np.testing.assert_allclose(np.asarray(sizes[1:]) / sizes[:-1], 10, rtol=0.1)


def test_schedule_sees_the_count_of_steps_taken(implementation):
  """0 at the first step, as in optax."""
  params = {"w": jnp.ones((4, 64))}
  tx = olp.adamw(lambda count: jnp.where(count == 2, 1.0, 0.0), **FLOAT32, implementation=implementation)
  state = tx.init(params)
  moved = []
  for _ in range(4):
    updates, state = tx.update(params, state, params)
    moved.append(bool(jnp.abs(updates["w"]).max() > 0))
  assert moved == [False, False, True, False]


def test_extra_arguments_are_ignored(implementation):
  params = {"w": jnp.ones((4, 64))}
  tx = olp.adamw(1e-2, implementation=implementation)
  state = tx.init(params)
  right = tx.update(params, state, params)
  table.assert_same_bits(tx.update(params, state, params, value=1.0, anything=None), right)


def test_donated_step_is_in_place(implementation):
  """Every buffer of the parameters and the state is aliased to its successor."""
  params = {"w": jnp.ones((2048, 1024), jnp.bfloat16)}
  tx = olp.adamw(1e-2, implementation=implementation)
  state = tx.init(params)
  step = jax.jit(lambda g, s, p: olp.apply_gradients(tx, g, s, p), donate_argnums=(1, 2))
  memory = step.lower(params, state, params).compile().memory_analysis()
  assert memory.alias_size_in_bytes >= params["w"].size * (2 + 1 + 1 + 2)
