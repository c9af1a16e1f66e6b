"""What rounding does over 10,000 steps: a master that small steps have to move, a second moment that has to follow.

Three tables, each against Adam in float64:

- master: bfloat16 parameters around 0.02, the same gradients at every step. How far each kind of master moves.
- nu: b2 = 0.999; coordinates of a block change their scale, or not, while the block's maximum stays. How well sqrt(v)
  is followed.
- stopped: coordinates that get no gradients any more.

    python benchmarks/rounding.py
    python benchmarks/rounding.py --steps 1000
    python benchmarks/rounding.py --markdown  # from the result file: the tables of docs/numerics.md
"""

import argparse
import functools
import json
import pathlib
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

import optax_lowprec as olp
from optax_lowprec import formats
from optax_lowprec import StateFormat

SHAPE = (64, 128)
EXACT = dict(mu="float32", nu="float32")

# --- master ---------------------------------------------------------------------------------------------------------

MASTERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "float32": ("float32", EXACT),
    "remainder16": ("remainder16", EXACT),
    "remainder8, nearest": ("remainder8", EXACT),
    "remainder8, stochastic": (StateFormat("remainder8", rounding="stochastic"), EXACT),
    "float16, nearest": ("float16", EXACT),
    "float16, stochastic": (StateFormat("float16", rounding="stochastic"), EXACT),
    "none (bfloat16 alone)": (None, EXACT),
    "remainder16, default moments": ("remainder16", {}),
}


def displacement(master: Any, moments: dict[str, Any], learning_rate: float, steps: int, implementation: str | None):
  """Parameters around 0.02 after equal gradients of either sign: displacement over that of float64, elementwise."""
  rng = np.random.default_rng(0)
  start = jnp.asarray(rng.normal(0.02, 0.001, SHAPE), jnp.bfloat16)
  grads = jnp.asarray(np.where(rng.random(SHAPE) < 0.5, 1e-3, -1e-3), jnp.float32)
  tx = olp.adamw(learning_rate, weight_decay=0.0, master=master, implementation=implementation, **moments)

  @jax.jit
  def run(params):
    step = lambda carry, _: (olp.apply_gradients(tx, grads, carry[1], carry[0]), None)
    return jax.lax.scan(step, (params, tx.init(params)), length=steps)[0]

  params, state = run(start)
  end = np.asarray(olp.master_params(state, params), np.float64)
  # Equal gradients: Adam's direction is g / (|g| + eps) in every step.
  exact = -steps * learning_rate * np.asarray(grads, np.float64) / (np.abs(np.asarray(grads, np.float64)) + 1e-8)
  return (end - np.asarray(start, np.float64)) / exact


def displacement_hashed(name: str, learning_rate: float, steps: int) -> np.ndarray:
  """The same with another noise than the package's: the master's part of the step alone."""
  rng = np.random.default_rng(0)
  start = jnp.asarray(rng.normal(0.02, 0.001, SHAPE), jnp.bfloat16).astype(jnp.float32)
  sign = np.where(rng.random(SHAPE) < 0.5, 1, -1)
  update = jnp.asarray(learning_rate * sign, jnp.float32)
  fmt = StateFormat(name, rounding="stochastic")

  def step(w, t):
    noise = hashed_noise(SHAPE, t)
    if fmt.is_remainder:
      return formats.decode_remainder(*formats.encode_remainder(w - update, jnp.bfloat16, fmt, noise)), None
    return formats.decode(*formats.encode(w - update, fmt, noise32=noise), fmt), None

  end = jax.jit(lambda w: jax.lax.scan(step, w, jnp.arange(steps, dtype=jnp.int32))[0])(start)
  return (np.asarray(end, np.float64) - np.asarray(start, np.float64)) / (-steps * learning_rate * sign)


def master_rows(steps: int, implementation: str | None) -> list[dict[str, Any]]:
  rows = []
  measures = {
      name: functools.partial(displacement, *how, steps=steps, implementation=implementation)
      for name, how in MASTERS.items()
  }
  for name in ("remainder8", "float16"):
    measures[f"{name}, hashed (candidate)"] = functools.partial(displacement_hashed, name, steps=steps)
  for name, moved_at in measures.items():
    row: dict[str, Any] = {"master": name}
    for learning_rate in (1e-6, 1e-7):
      moved = moved_at(learning_rate=learning_rate)
      row[f"{learning_rate:g}: mean moved"] = float(moved.mean())
      row[f"{learning_rate:g}: rms error"] = float(np.sqrt(np.mean((moved - 1) ** 2)))
    rows.append(row)
  return rows


# --- nu -------------------------------------------------------------------------------------------------------------

# What becomes of a coordinate's scale, by its column in the block; column 0 and 64 hold the maximum.
KINDS = ("still", "drop 20x", "rise 5x", "decay 10x", "spikes")


def scales(t: Any, steps: int, uniform: Any) -> Any:
  """Standard deviation of the gradients at step ``t`` (an array of the shape of a row)."""
  change = steps // 5
  column = jnp.arange(SHAPE[1])
  kind = column % len(KINDS)
  late = t >= change
  fraction = jnp.clip((t - change) / (steps - change), 0.0, 1.0)
  factor = jnp.stack(
      [
          jnp.ones(()),
          jnp.where(late, 0.05, 1.0),
          jnp.where(late, 5.0, 1.0),
          10.0**-fraction,
          jnp.ones(()),
      ]
  )[kind]
  # One gradient in 1000 is 20 times as large.
  factor = jnp.where((kind == KINDS.index("spikes")) & (uniform < 1e-3), 20.0, factor)
  # A log-uniform spread of scales below the maximum.
  base = 0.2 * 10.0 ** (-((column * 37) % 128) / 128.0)
  return jnp.where(column % 64 == 0, 4.0, base * factor)


def hashed_noise(shape: tuple[int, ...], t: Any) -> Any:
  """A candidate: a new hash in every step."""
  return formats.mix(formats.scrambled_positions(shape, formats.mix(jnp.uint32(12345) + t.astype(jnp.uint32)), 0))


def package_noise(shape: tuple[int, ...], t: Any) -> Any:
  return formats.noise(shape, formats.noise_key(0), formats.noise_phase(t), 0).nu


def nu_formats() -> dict[str, tuple[StateFormat, Any]]:
  e4m3 = functools.partial(StateFormat, "float8_e4m3fn", transform="sqrt")
  result: dict[str, tuple[StateFormat, Any]] = {}
  for name, make in {
      "e4m3 sqrt, block 128": e4m3,
      "e4m3 sqrt, block 32": functools.partial(e4m3, block_size=32),
      "e5m2 sqrt, block 128": functools.partial(StateFormat, "float8_e5m2", transform="sqrt"),
      "float16, block 128": functools.partial(StateFormat, "float16"),
      "bfloat16": functools.partial(StateFormat, "bfloat16", scaling=None),
  }.items():
    result[f"{name}, nearest"] = make(), package_noise
    result[f"{name}, stochastic"] = make(rounding="stochastic"), package_noise
    if name.startswith("e4m3 sqrt, block 128"):
      result[f"{name}, hashed (candidate)"] = make(rounding="stochastic"), hashed_noise
  return result


def nu_rows(steps: int, b2: float) -> list[dict[str, Any]]:
  every = max(1, steps // 100)
  names = nu_formats()
  key = jax.random.key(0)

  def step(carry, t):
    exact, stored = carry
    normal = jax.random.normal(jax.random.fold_in(key, 2 * t), SHAPE, jnp.float32)
    uniform = jax.random.uniform(jax.random.fold_in(key, 2 * t + 1), SHAPE)
    g = 1e-3 * normal * scales(t, steps, uniform).astype(jnp.float32)
    g64 = g.astype(jnp.float64)
    exact = b2 * exact + (1 - b2) * g64 * g64
    new = {}
    for name, (fmt, noise) in names.items():
      v = np.float32(b2) * stored[name] + np.float32(1 - b2) * (g * g)
      new[name] = formats.decode(*formats.encode(v, fmt, positive=True, noise32=noise(SHAPE, t)), fmt)
    return (exact, new), None

  @jax.jit
  def run(carry, start):
    return jax.lax.scan(step, carry, start + jnp.arange(every, dtype=jnp.int32))[0]

  carry = jnp.zeros(SHAPE, jnp.float64), {name: jnp.zeros(SHAPE, jnp.float32) for name in names}
  ratios: dict[str, list[np.ndarray]] = {name: [] for name in names}
  for start in range(0, steps, every):
    carry = run(carry, jnp.int32(start))
    root = np.sqrt(np.asarray(carry[0]))
    for name in names:
      ratios[name].append(np.sqrt(np.asarray(carry[1][name], np.float64)) / root)
  column = np.arange(SHAPE[1])
  groups = {"maximum": column % 64 == 0}
  groups |= {kind: (column % len(KINDS) == i) & (column % 64 != 0) for i, kind in enumerate(KINDS)}
  rows = []
  for name in names:
    ratio = np.stack(ratios[name])[len(ratios[name]) // 2 :]  # the second half of the steps
    row: dict[str, Any] = {"nu": name}
    for group, columns in groups.items():
      row[f"{group}: median"] = float(np.median(ratio[..., columns]))
      row[f"{group}: rms error"] = float(np.sqrt(np.mean((ratio[..., columns] - 1) ** 2)))
    changed = ~groups["maximum"]
    row["all: rms error"] = float(np.sqrt(np.mean((ratio[..., changed] - 1) ** 2)))
    row["all: rms log2"] = float(np.sqrt(np.mean(np.log2(np.maximum(ratio[..., changed], 1e-30)) ** 2)))
    rows.append(row)
  return rows


def stopped(b2: float, rounding: str, noisy: bool, before: int, after: int) -> dict[str, Any]:
  """Coordinates of a tenth of their block's maximum whose gradients stop: what is left of sqrt(v) after that."""
  fmt = StateFormat("float8_e4m3fn", transform="sqrt", rounding=rounding)
  key = jax.random.key(0)
  top = jnp.arange(SHAPE[1]) == 0

  def step(carry, t):
    exact, stored = carry
    normal = jax.random.normal(jax.random.fold_in(key, t), SHAPE, jnp.float32)
    others = jnp.where(t < before, normal * np.float32(1e-4), np.float32(0))
    g = jnp.where(top, (normal if noisy else np.float32(1)) * np.float32(1e-3), others)
    g64 = g.astype(jnp.float64)
    v = np.float32(b2) * stored + np.float32(1 - b2) * (g * g)
    new = formats.decode(*formats.encode(v, fmt, positive=True, noise32=package_noise(SHAPE, t)), fmt)
    return (b2 * exact + (1 - b2) * g64 * g64, new), None

  run = jax.jit(lambda carry, times: jax.lax.scan(step, carry, times)[0])
  start = run((jnp.zeros(SHAPE, jnp.float64), jnp.zeros(SHAPE, jnp.float32)), jnp.arange(before, dtype=jnp.int32))
  end = run(start, jnp.arange(before, before + after, dtype=jnp.int32))
  left = [float(np.median(np.sqrt(np.asarray(b, np.float64) / np.asarray(a, np.float64))[:, 1:]))
          for a, b in zip(start, end, strict=True)]  # fmt: skip
  return dict(b2=b2, rounding=rounding, maximum="noisy" if noisy else "constant", steps=after, exact=left[0],
              stored=left[1])  # fmt: skip


def stopped_rows(steps: int) -> list[dict[str, Any]]:
  after = {0.999: steps * 4 // 5, 0.95: 200}
  return [
      stopped(b2, rounding, noisy, steps // 5, after[b2])
      for b2 in after
      for noisy in (True, False)
      for rounding in ("nearest", "stochastic")
  ]


# --- output ---------------------------------------------------------------------------------------------------------


def short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  return [{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def rewrite_docs(out: str | None) -> None:
  """Writes the tables of docs/numerics.md from the result file."""
  folder = pathlib.Path(out) if out else common.RESULTS
  results = json.loads((folder / "rounding.json").read_text())["rows"]
  masters = [
      {"master": row["master"]}
      | {
          f"{short_rate}: {short_what}": f"{row[f'{rate}: {what}']:.4f}"
          for rate, short_rate in (("1e-06", "1e-6"), ("1e-07", "1e-7"))
          for what, short_what in (("mean moved", "mean"), ("rms error", "rms error"))
      }
      for row in results["master"]
  ]
  tables = {"masters moved": common.markdown(masters)}
  for b2 in (0.999, 0.95):
    rows = [
        {"nu": row["nu"]}
        | {f"{kind}: median": f"{row[f'{kind}: median']:.2f}" for kind in KINDS}
        | {"rms error": f"{row['all: rms error']:#.3g}"}
        for row in results[f"nu, b2 = {b2}"]
    ]
    tables[f"nu follows, b2 = {b2}"] = common.markdown(rows)
  left: dict[tuple[Any, ...], dict[str, str]] = {}
  for row in results["stopped"]:
    line = {k: str(row[k]) for k in ("b2", "maximum", "steps")} | {"exact": f"{row['exact']:.3f}"}
    left.setdefault(tuple(line.values()), line)[row["rounding"]] = f"{row['stored']:.3f}"
  tables["stopped"] = common.markdown(list(left.values()))
  common.rewrite("numerics.md", tables)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=int, default=10_000)
  parser.add_argument("--b2", type=float, nargs="*", default=[0.999, 0.95], help="for the table of nu")
  parser.add_argument("--implementation", default=None, help="of the master's table: cuda, cpu or jnp")
  args = common.parse_or_rewrite(parser, rewrite_docs)
  if args is None:
    return
  masters = master_rows(args.steps, args.implementation)
  print(f"bfloat16 parameters around 0.02, {args.steps} equal gradients: displacement over that of float64\n")
  print(common.table(short(masters), list(masters[0])))
  jax.config.update("jax_enable_x64", True)
  results = {"steps": args.steps, "master": masters}
  for b2 in args.b2:
    rows = nu_rows(args.steps, b2)
    print(f"\nsqrt(v) over that of float64, b2 = {b2}, over the second half of {args.steps} steps\n")
    print(common.table(short(rows), list(rows[0])))
    results[f"nu, b2 = {b2}"] = rows
  results["stopped"] = stopped_rows(args.steps)
  print("\ncoordinates of a tenth of their block's maximum whose gradients stop: what is left of sqrt(v)\n")
  print(common.table(short(results["stopped"]), list(results["stopped"][0])))
  print(f"written to {common.write('rounding', results, args.out).name}")


if __name__ == "__main__":
  main()
