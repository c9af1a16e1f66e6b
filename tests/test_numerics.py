"""What the stored formats come to over many steps: masters that move, second moments that follow, remainders proven.

The tables behind these tests are in docs/numerics.md, from benchmarks/rounding.py and benchmarks/formats.py.
"""

import functools
import json

import exhaustive_remainder
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table

import optax_lowprec as olp
from optax_lowprec import formats as fmts
from optax_lowprec import StateFormat

STEPS = 10_000
SHAPE = (32, 128)  # as small as is not kept in float32

# --- remainders, exhaustively ---------------------------------------------------------------------------------------


@pytest.mark.skipif(exhaustive_remainder.compiler() is None, reason="compiles a C++ program")
def test_remainders_of_every_257th_case(tmp_path):
  """``python tests/exhaustive_remainder.py`` tries all of them; its result is in tests/data."""
  checks = exhaustive_remainder.run(stride=257, threads=1, folder=str(tmp_path))
  assert len(checks) == 6
  for check in checks:
    assert check["failures"] == 0, check
    assert check["cases"] > 60_000, check


def test_recorded_proof_is_complete():
  """All 2^32 masters, and all 2^16 x 2^16 pairs of a parameter and a remainder, without a failure."""
  checks = json.loads(exhaustive_remainder.RESULT.read_text())["checks"]
  assert sum(check["cases"] == 1 << 32 for check in checks) == 5
  assert not any(check["failures"] for check in checks)
  worst = {check["check"].split(":")[0]: check["largest_error"] for check in checks if "master" in check["check"]}
  assert worst["bfloat16 remainder16"] == 0 and worst["bfloat16 remainder8"] == 0.5


# --- the master moves -----------------------------------------------------------------------------------------------


@functools.cache
def _displacement(name: str, rounding: str, implementation: str) -> np.ndarray:
  """Parameters around 0.02 after 10,000 equal gradients at a learning rate of 1e-6: displacement over float64's."""
  rng = np.random.default_rng(0)
  start = jnp.asarray(rng.normal(0.02, 0.001, SHAPE), jnp.bfloat16)
  g = np.where(rng.random(SHAPE) < 0.5, 1e-3, -1e-3)
  fmt = StateFormat(name, rounding=rounding)
  # Exact moments: what is measured is the master.
  tx = olp.adamw(1e-6, weight_decay=0.0, mu="float32", nu="float32", master=fmt, implementation=implementation)
  grads = jnp.asarray(g, jnp.float32)
  step = lambda carry, _: (olp.apply_gradients(tx, grads, carry[1], carry[0]), None)
  run = lambda p: jax.lax.scan(step, (p, tx.init(p)), length=STEPS)[0]
  params, state = jax.jit(run, compiler_options=table.OPTIMIZED)(start)
  end = np.asarray(olp.master_params(state, params), np.float64)
  exact = -STEPS * 1e-6 * g / (np.abs(g) + 1e-8)  # with equal gradients the direction is g / (|g| + eps) at every step
  return (end - np.asarray(start, np.float64)) / exact


def test_master_moves_with_remainder16(implementation):
  moved = _displacement("remainder16", "nearest", implementation)
  np.testing.assert_allclose(moved, 1.0, atol=1e-3)


@pytest.mark.parametrize("name, spread", [("remainder8", 0.0006), ("float16", 0.006)])
def test_master_moves_with_stochastic_rounding(name, spread, implementation):
  """Within 1 % on average; single parameters stay near that mean, closer than a new hash in every step would allow."""
  moved = _displacement(name, "stochastic", implementation)
  assert abs(moved.mean() - 1) < 0.01
  assert np.sqrt(np.mean((moved - 1) ** 2)) < spread


def test_master_rounded_to_nearest_stalls_or_drifts(implementation):
  """Why it should not be used for small steps: remainder8 loses 4.6 %, float16 is dragged along by its scale."""
  moved = _displacement("remainder8", "nearest", implementation)
  np.testing.assert_allclose(moved, 2 / 2.097, rtol=1e-3)  # steps of 2.1 units are steps of 2
  moved = _displacement("float16", "nearest", implementation)
  assert abs(moved.mean()) < 0.1, "the steps are lost"
  assert np.sqrt(np.mean((moved - 1) ** 2)) > 0.5


# --- the second moment follows --------------------------------------------------------------------------------------

DROP, RISE, STILL, MAXIMUM = range(4)


@functools.cache
def _followed() -> dict[str, np.ndarray]:
  """sqrt(v) over float64's at the end of 10,000 steps with b2 = 0.999, of every kind of coordinate.

  After 2,000 steps a third of the coordinates fall by 20 and a third rise by 5; their block's maximum stays.
  """
  column = np.arange(SHAPE[1])
  kind = np.where(column % 64 == 0, MAXIMUM, column % 3)
  before = np.where(kind == MAXIMUM, 4e-3, 2e-4).astype(np.float32)
  after = before * np.asarray([0.05, 5.0, 1.0, 1.0], np.float32)[kind]
  formats = {r: StateFormat("float8_e4m3fn", transform="sqrt", rounding=r) for r in table.ROUNDINGS}

  def step(carry, t):
    exact, error, stored = carry
    bits = fmts.mix(fmts.scrambled_positions(SHAPE, fmts.mix(fmts.noise_key(1) + t.astype(jnp.uint32)), 0))
    # The sum of four uniform numbers: nearly normal, and quick.
    uniform = sum((bits >> (8 * i) & 0xFF).astype(jnp.float32) for i in range(4))
    g = (uniform - 510) * np.float32(1 / 147.8) * jnp.where(t < STEPS // 5, before, after)
    # Kahan's sum stands for float64: the decay's own rounding is left, 1e-5 at most.
    term = (g * g - exact) * np.float32(1e-3) - error
    total = exact + term
    noise = fmts.noise(SHAPE, fmts.noise_key(0), fmts.noise_phase(t), 0).nu
    new = {}
    for r, fmt in formats.items():
      v = np.float32(0.999) * stored[r] + np.float32(0.001) * (g * g)
      new[r] = fmts.decode(*fmts.encode(v, fmt, positive=True, noise32=noise), fmt)
    return (total, (total - exact) - term, new), None

  zeros = jnp.zeros(SHAPE, jnp.float32)
  start = zeros, zeros, dict.fromkeys(formats, zeros)
  run = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(STEPS))[0], compiler_options=table.OPTIMIZED)
  exact, _, stored = run(start)
  return {r: np.sqrt(np.asarray(stored[r]) / np.asarray(exact)) for r in formats} | {"kind": kind}


def test_second_moment_follows_with_stochastic_rounding():
  result = _followed()
  ratio, kind = result["stochastic"], result["kind"]
  for k in (DROP, RISE, STILL, MAXIMUM):
    assert abs(np.median(ratio[:, kind == k]) - 1) < 0.1, k
    assert np.sqrt(np.mean((ratio[:, kind == k] - 1) ** 2)) < 0.5, k


def test_second_moment_stalls_with_rounding_to_nearest():
  """A coordinate's sqrt(v) decays by 0.05 % a step, and half a code is 3 to 6 %: it stays where it was."""
  result = _followed()
  ratio, kind = result["nearest"], result["kind"]
  assert np.median(ratio[:, kind == DROP]) > 5
  assert abs(np.median(ratio[:, kind == MAXIMUM]) - 1) < 0.01
