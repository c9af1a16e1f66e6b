"""Time of one optimizer step, ours beside others', on one device.

Steps run inside one jitted ``fori_loop`` with a donated carry (in-graph: no dispatch), on random gradients. The
ceiling is the read and write bandwidth of ``x + 1`` over 4 GiB (256 MiB on a CPU), measured in the same run.

    python benchmarks/step_time.py --tree llama1b
    python benchmarks/step_time.py --tree 50m --steps 3        # CPU
"""

import argparse
from collections.abc import Callable
import functools
import time
from typing import Any, NamedTuple

import common
import jax
from jax import lax
import jax.numpy as jnp
import optax
import trees

import optax_lowprec as olp

NEAREST_MU = olp.StateFormat("float8_e4m3fn")
NEAREST_NU = olp.StateFormat("float8_e4m3fn", transform="sqrt")
SR_MU = olp.StateFormat("float8_e4m3fn", rounding="stochastic")
SR_NU = olp.StateFormat("float8_e4m3fn", transform="sqrt", rounding="stochastic")
TENSOR_NU = olp.StateFormat("float8_e4m3fn", scaling="tensor", transform="sqrt")


class Row(NamedTuple):
  label: str
  params: Any  # dtype
  make: Callable[[], Any]
  fused: bool = True


def _ours(**kw: Any) -> Callable[[], Any]:
  return lambda: olp.adamw(1e-3, weight_decay=0.1, **kw)


def rows(implementation: str) -> list[Row]:
  bf16, f32 = jnp.bfloat16, jnp.float32
  ours = functools.partial(_ours, implementation=implementation)
  jnp_ours = functools.partial(_ours, implementation="jnp")
  return [
      Row("optax.adamw f32", f32, lambda: optax.adamw(1e-3, weight_decay=0.1), False),
      Row("optax.adamw f32, mu bf16", f32, lambda: optax.adamw(1e-3, mu_dtype=bf16, weight_decay=0.1), False),
      Row("optax.adamw bf16", bf16, lambda: optax.adamw(1e-3, weight_decay=0.1), False),
      Row("bf16 remainder16 fp8/fp8", bf16, ours(master="remainder16")),
      Row("bf16 remainder8 fp8/fp8", bf16, ours(master="remainder8")),
      Row("f32 fp8/fp8", f32, ours()),
      Row("bf16 f16 master fp8/fp8", bf16, ours(master="float16")),
      Row("bf16 remainder16 fp8/f16", bf16, ours(nu="float16")),
      Row("bf16 remainder16 fp8/fp8, nearest", bf16, ours(mu=NEAREST_MU, nu=NEAREST_NU)),
      Row("bf16 remainder8 fp8/fp8, nearest", bf16, ours(master="remainder8", mu=NEAREST_MU, nu=NEAREST_NU)),
      Row("f32 fp8/fp8, nearest", f32, ours(mu=NEAREST_MU, nu=NEAREST_NU)),
      Row("bf16 remainder16 fp8/fp8 stochastic", bf16, ours(mu=SR_MU, nu=SR_NU)),
      Row("bf16 remainder16 e5m2/fp8 (generic kernel)", bf16, ours(mu="float8_e5m2")),
      Row("bf16 remainder16 fp8/fp8 tensor", bf16, ours(mu=olp.StateFormat("float8_e4m3fn", "tensor"), nu=TENSOR_NU)),
      Row("f32 f32/f32", f32, ours(mu="float32", nu="float32")),
      Row("bf16 remainder16 fp8/fp8, chain path", bf16, ours(master="remainder16"), False),
      Row("f32 fp8/fp8, chain path", f32, ours(), False),
      Row("jnp: bf16 remainder16 fp8/fp8", bf16, jnp_ours(master="remainder16")),
      Row("jnp: f32 fp8/fp8", f32, jnp_ours()),
  ]


def flashoptim_row() -> Row | None:
  try:
    import flashoptim_jax  # pylint: disable=import-outside-toplevel
  except ImportError:
    return None
  return Row("flashoptim_jax", jnp.bfloat16, lambda: flashoptim_jax.flash_adamw(1e-3, weight_decay=0.1))


def random_tree(shapes: list[tuple[int, ...]], dtype: Any, seed: int) -> list[jax.Array]:
  key = jax.random.key(seed)
  make = jax.jit(lambda i, s: jax.random.normal(jax.random.fold_in(key, i), s, dtype) * 0.02, static_argnums=1)
  return [make(i, s) for i, s in enumerate(shapes)]


def step_function(row: Row) -> tuple[Callable[..., Any], Callable[..., Any]]:
  tx = row.make()
  if hasattr(tx, "step"):  # flashoptim_jax
    return tx.init, lambda p, s, g: tx.step(p, s, g)
  if row.fused:
    return tx.init, lambda p, s, g: olp.apply_gradients(tx, g, s, p)

  def chain(p: Any, s: Any, g: Any) -> Any:
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s

  return tx.init, chain


def addresses(tree: Any) -> list[int]:
  """Where the arrays lie that hold something."""
  return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size]


def measure(row: Row, shapes: list[tuple[int, ...]], steps: int, repeats: int) -> dict[str, Any]:
  init, step = step_function(row)
  params = random_tree(shapes, row.params, 0)
  grads = random_tree(shapes, row.params, 1)
  state = jax.jit(init)(params)
  size = sum(x.nbytes for x in jax.tree.leaves((params, state)))
  bytes_moved = 2 * size + sum(g.nbytes for g in grads)
  loop = jax.jit(lambda p, s, g: lax.fori_loop(0, steps, lambda _, c: step(*c, g), (p, s)), donate_argnums=(0, 1))
  start = time.perf_counter()
  compiled = loop.lower(params, state, grads).compile()
  compile_time = time.perf_counter() - start
  carry = [params, state]
  del params, state
  before = addresses(carry)

  def run() -> Any:
    carry[:] = compiled(*carry, grads)
    return carry

  jax.block_until_ready(run())
  in_place = addresses(carry) == before
  seconds, spread = common.median_time(run, repeats)
  analysis = compiled.memory_analysis()
  n = trees.count(shapes)
  return {
      "row": row.label,
      "ms": round(seconds / steps * 1e3, 4),
      "spread_ms": round(spread / steps * 1e3, 4),
      "state_bytes_per_param": round(size / n, 3),
      "moved_bytes_per_param": round(bytes_moved / n, 3),
      "GB/s": round(bytes_moved * steps / seconds / 1e9, 1),
      "in_place": in_place,
      "temp_MB": round(analysis.temp_size_in_bytes / 1e6, 3),
      "compile_s": round(compile_time, 2),
  }


def ceiling(repeats: int) -> float:
  """GB/s of reading and writing, by ``x + 1``."""
  n = 1 << (30 if jax.default_backend() == "gpu" else 26)
  steps = 20 if jax.default_backend() == "gpu" else 5
  f = jax.jit(lambda x: lax.fori_loop(0, steps, lambda _, x: x + 1, x), donate_argnums=0)
  box = [f(jnp.ones((n,), jnp.float32))]

  def run() -> Any:
    box[0] = f(box[0])
    return box[0]

  seconds, _ = common.median_time(run, repeats)
  return 8 * n * steps / seconds / 1e9


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--tree", default="gpt2", choices=sorted(trees.TREES))
  parser.add_argument("--steps", type=int, default=20, help="steps inside one call")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--rows", default="", help="only rows whose label contains one of these, separated by ;")
  parser.add_argument("--skip", default="", help="no rows whose label contains one of these, separated by ;")
  parser.add_argument("--out", default=None, help="folder of the result file")
  args = parser.parse_args()
  kernel = "cuda" if jax.default_backend() == "gpu" else "cpu"
  if kernel not in olp.available_implementations():
    kernel = "jnp"
  selected = rows(kernel)
  flash = flashoptim_row()
  if flash is not None and jax.default_backend() == "gpu":
    selected.insert(next(i for i, r in enumerate(selected) if r.label.startswith("jnp")), flash)
  wanted = [w for w in args.rows.split(";") if w]
  if wanted:
    selected = [r for r in selected if any(w in r.label for w in wanted)]
  unwanted = [w for w in args.skip.split(";") if w]
  selected = [r for r in selected if not any(w in r.label for w in unwanted)]
  shapes = trees.TREES[args.tree]()
  top = ceiling(args.repeats)
  print(f"{args.tree}: {trees.count(shapes) / 1e6:.1f}M parameters in {len(shapes)} leaves; ceiling {top:.0f} GB/s")
  results: list[dict[str, Any]] = []
  for row in selected:
    slow = row.label.startswith("jnp")
    try:
      result = measure(row, shapes, max(1, args.steps // 5) if slow else args.steps, args.repeats)
    except Exception as e:  # pylint: disable=broad-except
      result = {"row": row.label, "error": f"{type(e).__name__}: {str(e)[:300]}"}
    if "GB/s" in result:
      result["of_ceiling"] = round(result["GB/s"] / top, 3)
      base = next((r["ms"] for r in results if r["row"] == "optax.adamw f32"), None)
      result["of_optax_f32"] = round(result["ms"] / base, 3) if base else ""
    results.append(result)
    print(result, flush=True)
    record = {"tree": args.tree, "ceiling_GB/s": round(top, 1), "kernel": kernel, "steps": args.steps}
    # After each row: a run that is cut short keeps what it measured.
    path = common.write(f"step_time_{args.tree}_{jax.default_backend()}", {**record, "results": results}, args.out)
  columns = ["row", "ms", "of_optax_f32", "GB/s", "of_ceiling", "in_place", "temp_MB", "compile_s", "error"]
  print(common.table(results, columns))
  print(f"written to {path.name}")


if __name__ == "__main__":
  main()
