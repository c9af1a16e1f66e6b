"""Everything that wraps, chains, masks, injects or accumulates an Optax optimizer does the same with ours.

One table: wrapper x optimizer x format. For each row the wrapped optimizer minimizes a bowl, by updates and by
``apply_gradients``, beside the same wrapper around Optax's optimizer; docs/optax.md lists the wrappers by these names.
"""

import functools
import pathlib

import chex
from conftest import runnable_implementations
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
import pytest
import table

import optax_lowprec as olp

LEARNING_RATE = 3e-2
STEPS = 24
TARGET = 0.05


def _labels(params):
  return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


def _matrices(params):
  return jax.tree.map(lambda p: p.ndim > 1, params)


# name -> (wrap(make) -> transform, where make() is the inner optimizer)
WRAPPERS = {
    "alone": lambda make: make(),
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(1.0), make()),
    "chain, followed": lambda make: optax.chain(make(), optax.scale(0.5)),
    "named_chain": lambda make: optax.named_chain(("clip", optax.clip(1.0)), ("optimizer", make())),
    "partition": lambda make: optax.partition({"matrix": make(), "vector": optax.sgd(1e-2)}, _labels),
    "partition, ours twice": lambda make: optax.partition({"matrix": make(), "vector": make()}, _labels),
    "multi_transform, freeze": lambda make: optax.multi_transform(
        {"matrix": make(), "vector": optax.set_to_zero()}, _labels
    ),
    "masked": lambda make: optax.chain(
        optax.masked(make(), _matrices),
        optax.masked(optax.scale(-1e-2), lambda p: jax.tree.map(lambda m: not m, _matrices(p))),
    ),
    "MultiSteps": lambda make: optax.MultiSteps(make(), 4).gradient_transformation(),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(), 3),
    "conditionally_mask": lambda make: optax.conditionally_mask(make(), lambda step, **kw: step % 2 == 0),
    "conditionally_transform": lambda make: optax.chain(
        optax.scale(1e-4), optax.conditionally_transform(make(), lambda step, **kw: step >= 0)
    ),
    "ema": lambda make: optax.chain(make(), optax.ema(0.5)),
    "schedule_free": lambda make: contrib.schedule_free(make(), LEARNING_RATE, b1=0.9),
    "reduce_on_plateau": lambda make: optax.chain(make(), contrib.reduce_on_plateau(patience=50)),
    "keep_params_nonnegative": lambda make: optax.chain(make(), optax.keep_params_nonnegative()),
    "freeze": lambda make: optax.chain(
        make(), optax.transforms.freeze(lambda p: jax.tree.map(lambda x: x.ndim < 2, p))
    ),
    "selective_transform": lambda make: optax.transforms.selective_transform(
        make(), freeze_mask={"w": False, "deep": {"b": True}}
    ),
    "snapshot": lambda make: optax.chain(make(), optax.snapshot("updates", lambda u: u)),
    "flatten": lambda make: optax.flatten(make()),
    "with_extra_args_support": lambda make: optax.with_extra_args_support(make()),
    "split_real_and_imaginary": lambda make: contrib.split_real_and_imaginary(make()),
}
WRAPPERS = {
    k: v for k, v in WRAPPERS.items() if k not in ("freeze", "selective_transform") or hasattr(optax.transforms, k)
}

OURS = {
    "adamw": lambda **kw: olp.adamw(LEARNING_RATE, **kw),
    "adam": lambda **kw: olp.adam(LEARNING_RATE, **kw),
    "scale_by_adam": lambda master=None, **kw: optax.chain(
        olp.scale_by_adam(**kw), optax.scale_by_learning_rate(LEARNING_RATE)
    ),
}
THEIRS = {
    "adamw": lambda: optax.adamw(LEARNING_RATE),
    "adam": lambda: optax.adam(LEARNING_RATE),
    "scale_by_adam": lambda: optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(LEARNING_RATE)),
}
# With its formats, the parameters' dtype.
FORMATS = {
    "all_float32": (table.FEW["all_float32"], jnp.float32),
    "default, f32": (table.FEW["default"], jnp.float32),
    "default, bf16": (table.FEW["default"], jnp.bfloat16),
    "stochastic, bf16": ({**table.FEW["stochastic"], "master": "remainder16"}, jnp.bfloat16),
}
ROWS = [
    *((w, "adamw", f) for w in WRAPPERS for f in ("default, f32", "default, bf16")),
    *(
        (w, "adamw", f)
        for w in ("alone", "chain", "partition", "MultiSteps")
        for f in ("all_float32", "stochastic, bf16")
    ),
    *(
        (w, "scale_by_adam", "default, f32")
        for w in ("alone", "chain", "partition", "MultiSteps", "conditionally_mask")
    ),
    ("alone", "adam", "default, f32"),
]


def _params(dtype, seed=0):
  rng = np.random.default_rng(seed)
  make = lambda *shape: jnp.asarray(rng.uniform(0.2, 0.4, shape), dtype)
  return {"w": make(4, 160), "deep": {"b": make(7)}}


def _loss(params):
  return sum(jnp.sum(jnp.square(p.astype(jnp.float32) - TARGET)) for p in jax.tree.leaves(params))


def _train(tx, dtype, fused):
  params = _params(dtype)
  state = tx.init(params)
  wide = optax.with_extra_args_support(tx)

  def step(carry, _):
    params, state = carry
    value, grads = jax.value_and_grad(_loss)(params)
    if fused:
      return olp.apply_gradients(tx, grads, state, params, **_extra(tx, value)), value
    updates, state = wide.update(grads, state, params, value=value)
    return (optax.apply_updates(params, updates), state), value

  (params, state), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=STEPS))((params, state))
  return params, state, float(_loss(params))


def _extra(tx, value):
  return {"value": value} if isinstance(tx, optax.GradientTransformationExtraArgs) else {}


@functools.cache
def _theirs(wrapper, optimizer, dtype):
  return _train(WRAPPERS[wrapper](THEIRS[optimizer]), dtype, False)[2]


# What only differs in who calls the step needs no second implementation: of the others, every wrapper once.
ROWS_OF = [(i, *row) for n, i in enumerate(runnable_implementations()) for row in ROWS
           if n == 0 or table.ALL_ROWS or row[1:] == ("adamw", "default, bf16")]  # fmt: skip


@pytest.mark.parametrize(
    "implementation, wrapper, optimizer, formats", ROWS_OF, ids=["-".join(r).replace(" ", "_") for r in ROWS_OF]
)
def test_wrapper(implementation, wrapper, optimizer, formats):
  keywords, dtype = FORMATS[formats]
  make = lambda: OURS[optimizer](min_quantized_size=0, implementation=implementation, **keywords)
  tx = WRAPPERS[wrapper](make)
  chain_params, chain_state, loss = _train(tx, dtype, False)
  fused_params, fused_state, fused_loss = _train(tx, dtype, True)

  start = _params(dtype)
  assert table.shapes_and_dtypes(chain_params) == table.shapes_and_dtypes(start)
  assert (
      table.shapes_and_dtypes(chain_state)
      == table.shapes_and_dtypes(tx.init(start))
      == table.shapes_and_dtypes(fused_state)
  )
  if dtype == jnp.float32:
    table.assert_same_bits(chain_params, fused_params)
    table.assert_same_bits(chain_state, fused_state)
  theirs = _theirs(wrapper, optimizer, dtype if optimizer != "adamw" or formats == "all_float32" else jnp.float32)
  begin = float(_loss(start))
  assert theirs < 0.9 * begin, "the row proves nothing: Optax's optimizer does not get anywhere either"
  tolerance = 1e-4 if formats == "all_float32" else 0.05
  assert abs(loss - theirs) <= tolerance * begin, f"{loss} beside {theirs}, from {begin}"
  assert abs(fused_loss - theirs) <= tolerance * begin, f"{fused_loss} beside {theirs}, from {begin}"


def test_separate_master_has_to_be_the_last_word():
  """What a following transform does to the update is undone: the parameter goes where its master is (documented)."""
  make = lambda: olp.adamw(LEARNING_RATE, master="float32", min_quantized_size=0)
  alone = _train(make(), jnp.bfloat16, False)
  followed = _train(optax.chain(make(), optax.scale(0.5)), jnp.bfloat16, False)
  assert abs(alone[2] - followed[2]) < 0.1 * float(_loss(_params(jnp.bfloat16)))


@pytest.mark.parametrize("formats", FORMATS)
def test_lookahead(formats, implementation):
  """Lookahead updates fast and slow parameters together."""
  keywords, dtype = FORMATS[formats]

  def train(inner):
    tx = optax.lookahead(inner, 5, 0.5)
    params = optax.LookaheadParams.init_synced(_params(dtype))
    state = tx.init(params)

    @jax.jit
    def step(params, state):
      updates, state = tx.update(jax.grad(_loss)(params.fast), state, params)
      return optax.apply_updates(params, updates), state

    for _ in range(20):
      params, state = step(params, state)
    return float(_loss(params.slow))

  ours = train(olp.adamw(LEARNING_RATE, min_quantized_size=0, implementation=implementation, **keywords))
  theirs = train(optax.adamw(LEARNING_RATE))
  assert abs(ours - theirs) <= 0.05 * float(_loss(_params(dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lookahead_that_resets_its_state(dtype, implementation):
  """It multiplies every part of the state with 0 or 1: codes, remainders and scales keep their dtypes."""
  tx = optax.lookahead(olp.adamw(LEARNING_RATE, min_quantized_size=0, implementation=implementation), 2, 0.5, True)
  params = optax.LookaheadParams.init_synced(_params(dtype))
  start = state = tx.init(params)
  update = jax.jit(lambda g, s, p: tx.update(g, s, p))
  _, state = update(params.fast, state, params)
  assert int(state.fast_state.count) == 1 and float(jnp.max(olp.moments(state, params.fast)[1]["w"])) > 0
  _, state = update(params.fast, state, params)
  table.assert_same_bits(state, start)


def test_sam(implementation):
  """Two gradients a step; its ``update`` refuses extra arguments, so ``apply_gradients`` asks for none."""
  wrap = lambda tx: contrib.sam(tx, optax.chain(contrib.normalize(), optax.sgd(0.02)), opaque_mode=False)

  def train(inner, step):
    tx, params = wrap(inner), _params(jnp.float32)
    step = jax.jit(functools.partial(step, tx))
    state = tx.init(params)
    for _ in range(6):
      params, state = step(jax.grad(_loss)(params), state, params)
    return params

  def plain(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  make = lambda: olp.adamw(LEARNING_RATE, min_quantized_size=0, implementation=implementation)
  ours = train(make(), plain)
  table.assert_same_bits(train(make(), olp.apply_gradients), ours)
  begin = float(_loss(_params(jnp.float32)))
  assert abs(float(_loss(ours)) - float(_loss(train(optax.adamw(LEARNING_RATE), plain)))) < 0.05 * begin
  assert float(_loss(ours)) < 0.9 * begin


def test_inject_stateful_hyperparams(implementation):
  """The older name of ``inject_hyperparams``, and a schedule that keeps a state."""

  class Halving(optax.schedules.StatefulSchedule):
    init = lambda self: jnp.float32(2 * LEARNING_RATE)
    update = lambda self, state, **extra_args: state / 2
    __call__ = lambda self, state, **extra_args: state

  with pytest.deprecated_call():
    ours = optax.inject_stateful_hyperparams(olp.adamw)
  params = _params(jnp.float32)
  tx = ours(learning_rate=LEARNING_RATE, implementation=implementation)
  right = optax.inject_hyperparams(olp.adamw)(learning_rate=LEARNING_RATE, implementation=implementation)
  table.assert_same_bits(tx.update(params, tx.init(params), params), right.update(params, right.init(params), params))
  tx = ours(learning_rate=Halving(), implementation=implementation)
  state = tx.init(params)
  sizes = []
  for _ in range(3):
    updates, state = tx.update(params, state, params)
    sizes.append(float(jnp.abs(updates["w"]).mean()))
  np.testing.assert_allclose(sizes, 2 * LEARNING_RATE * np.asarray([1, 0.5, 0.25]), rtol=1e-2)


@pytest.mark.parametrize("formats", ["all_float32", "default, bf16"])
def test_average_of_the_parameters(formats, implementation):
  """``optax.ema`` and ``optax.incremental_update`` of the masters: a float32 average of a bfloat16 model."""
  keywords, dtype = FORMATS[formats]

  def train(tx, dtype, read):
    params = _params(dtype)
    state = tx.init(params)
    average = read(state, params)
    ema = optax.ema(0.9, debias=False)
    ema_state = ema.init(average)

    @jax.jit
    def step(params, state, average, ema_state):
      params, state = olp.apply_gradients(tx, jax.grad(_loss)(params), state, params)
      values = read(state, params)
      return params, state, optax.incremental_update(values, average, 0.1), ema.update(values, ema_state)[1]

    for _ in range(8):
      params, state, average, ema_state = step(params, state, average, ema_state)
    return average, ema_state.ema

  ours = train(olp.adamw(LEARNING_RATE, min_quantized_size=0, implementation=implementation, **keywords), dtype,
               olp.master_params)  # fmt: skip
  theirs = train(optax.adamw(LEARNING_RATE), jnp.float32, lambda state, params: params)
  rounded = 2e-3 if dtype == jnp.bfloat16 else 0  # what the start lost
  for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=1e-5 if formats == "all_float32" else 0.02 + rounded)


@pytest.mark.parametrize("formats", FORMATS)
def test_inject_hyperparams(formats, implementation):
  """Every number becomes an array, in the parameters' dtype; a changed learning rate acts at once."""
  keywords, dtype = FORMATS[formats]
  ours = optax.inject_hyperparams(olp.adamw)
  tx = ours(learning_rate=LEARNING_RATE, implementation=implementation, **keywords)
  params, state, loss = _train(tx, dtype, False)
  _, fused_state, fused_loss = _train(tx, dtype, True)
  theirs = _train(optax.adamw(LEARNING_RATE), jnp.float32, False)[2]
  begin = float(_loss(_params(dtype)))
  assert abs(loss - theirs) <= 0.05 * begin and abs(fused_loss - theirs) <= 0.05 * begin
  assert table.shapes_and_dtypes(state) == table.shapes_and_dtypes(fused_state)
  state.hyperparams["learning_rate"] = jnp.zeros_like(state.hyperparams["learning_rate"])
  updates, _ = tx.update(params, state, params)
  # A small bfloat16 leaf has a float32 master, which takes the parameter back by the last update's own rounding.
  limit = 0 if dtype == jnp.float32 else 2**-8 * 0.5
  assert all(float(jnp.max(jnp.abs(u))) <= limit for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("wrapper", ["chain", "masked", "partition", "MultiSteps", "apply_if_finite"])
def test_state_is_found_inside(wrapper, implementation):
  make = lambda: olp.adamw(LEARNING_RATE, min_quantized_size=0, implementation=implementation)
  tx = WRAPPERS[wrapper](make)
  params, state, _ = _train(tx, jnp.bfloat16, False)
  masters = olp.master_params(state, params)
  mu, nu = olp.moments(state, params)
  assert masters["w"].dtype == mu["w"].dtype == nu["w"].dtype == jnp.float32
  np.testing.assert_array_equal(masters["w"].astype(jnp.bfloat16), params["w"])
  assert float(jnp.min(nu["w"])) > 0


# Wrappers whose step is called in another way.
OWN_TESTS = ("lookahead", "sam", "inject_hyperparams", "inject_stateful_hyperparams")


def test_docs_list_every_wrapper():
  """docs/optax.md is checked by this table."""
  docs = (pathlib.Path(__file__).parent.parent / "docs" / "optax.md").read_text()
  missing = [name for name in [*WRAPPERS, *OWN_TESTS] if f"| `{name}` |" not in docs]
  assert not missing


# --- transformations ------------------------------------------------------------------------------------------------


def test_vmap_over_the_whole_optimizer(implementation):
  """A batched search over learning rates is the runs one by one."""
  rates = jnp.asarray([1e-3, 1e-2, 3e-2])

  def train(rate):
    tx = olp.adamw(rate, min_quantized_size=0, implementation=implementation)
    params = _params(jnp.float32)
    state = tx.init(params)
    for grads in steps:
      params, state = olp.apply_gradients(tx, grads, state, params)
    return params, state

  # The same gradients for all: those of a loss are not the same bits in a batched program everywhere.
  steps = [jax.grad(_loss)(_params(jnp.float32, seed)) for seed in range(3)]
  batched = jax.jit(jax.vmap(train))(rates)
  for i, rate in enumerate(rates):
    one = jax.jit(train)(rate)
    table.assert_same_bits(jax.tree.map(lambda x, i=i: x[i], batched[0]), one[0])


def test_remat_and_cond(implementation):
  tx = olp.adamw(LEARNING_RATE, min_quantized_size=0, implementation=implementation)
  params = _params(jnp.float32)
  state = tx.init(params)
  grads = jax.grad(_loss)(params)
  plain = jax.jit(tx.update)(grads, state, params)
  table.assert_same_bits(plain, jax.jit(jax.checkpoint(tx.update))(grads, state, params))
  keep = lambda g, s, p: (jax.tree.map(jnp.zeros_like, g), s)
  choose = jax.jit(lambda go: jax.lax.cond(go, tx.update, keep, grads, state, params))
  if jax.default_backend() == "cpu":
    table.assert_same_bits(plain, choose(True))
  else:  # there XLA's bias corrections differ by a rounding between the two programs
    taken = choose(True)
    chex.assert_trees_all_close(plain[0], taken[0], rtol=1e-6)
    chex.assert_trees_all_close(olp.moments(plain[1], params), olp.moments(taken[1], params), rtol=0.07)  # a code
  table.assert_same_bits(state, choose(False)[1])


def test_differentiating_through_a_step_works_with_jnp():
  """The gradient of the loss after a step with respect to the learning rate (float32 state: no codes in between)."""
  params = _params(jnp.float32)

  def after(rate, make):
    tx = make(rate)
    updates, _ = tx.update(jax.grad(_loss)(params), tx.init(params), params)
    return _loss(optax.apply_updates(params, updates))

  ours = jax.grad(after)(1e-2, lambda r: olp.adamw(r, mu="float32", nu="float32", implementation="jnp"))
  theirs = jax.grad(after)(1e-2, optax.adamw)
  np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_differentiating_through_a_kernel_says_that_it_does_not_work(implementation):
  if implementation == "jnp":
    pytest.skip("jnp can be differentiated: the test before this")
  params = _params(jnp.float32)
  tx = olp.adamw(1e-2, implementation=implementation)
  state = tx.init(params)
  with pytest.raises(NotImplementedError, match="cannot be differentiated: use implementation='jnp'"):
    jax.grad(lambda p: _loss(tx.update(p, state, p)[0]))(params)
