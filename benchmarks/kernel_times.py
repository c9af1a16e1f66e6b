"""What a device does during a step: time and count of every kernel, from JAX's own profiler.

    python benchmarks/kernel_times.py --tree llama1b --rows "optax.adamw f32;bf16 remainder16 fp8/fp8"

A step in the table is one iteration of step_time.py's loop. `idle` is the time between the first and the last kernel in
which none ran.
"""

import argparse
import collections
import glob
import tempfile
from typing import Any

import common
import jax
from jax import lax
import step_time
import trees


def device_events(folder: str) -> list[tuple[float, float, str]]:
  """(start, end, name) of every kernel, in ms."""
  path = max(glob.glob(f"{folder}/**/*.xplane.pb", recursive=True))
  data = jax.profiler.ProfileData.from_file(path)
  events = []
  for plane in data.planes:
    if "/device:" not in plane.name:
      continue
    for line in plane.lines:
      if "Stream" not in line.name:
        continue
      events += [(e.start_ns / 1e6, (e.start_ns + e.duration_ns) / 1e6, e.name) for e in line.events]
  return sorted(events)


def profile(row: step_time.Row, shapes: list[trees.Shape], steps: int) -> list[dict[str, Any]]:
  init, step = step_time.step_function(row)
  params = step_time.random_tree(shapes, row.params, 0)
  grads = step_time.random_tree(shapes, row.params, 1)
  state = jax.jit(init)(params)
  loop = jax.jit(lambda p, s, g: lax.fori_loop(0, steps, lambda _, c: step(*c, g), (p, s)), donate_argnums=(0, 1))
  carry = jax.block_until_ready(loop(params, state, grads))
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(loop(*carry, grads))
    events = device_events(folder)
  total: dict[str, float] = collections.defaultdict(float)
  count: dict[str, int] = collections.defaultdict(int)
  busy, last = 0.0, events[0][0]
  for start, end, name in events:
    name = name.replace("optax_lowprec::(anonymous namespace)::", "").split("(")[0][-70:]
    total[name] += end - start
    count[name] += 1
    busy += max(0.0, end - max(start, last))
    last = max(last, end)
  span = last - events[0][0]
  rows = [
      {"row": row.label, "kernel": n, "ms a step": round(t / steps, 4), "a step": round(count[n] / steps, 2)}
      for n, t in sorted(total.items(), key=lambda x: -x[1])[:14]
  ]
  rows.append({"row": row.label, "kernel": "all", "ms a step": round(span / steps, 4), "a step": ""})
  rows.append({"row": row.label, "kernel": "idle", "ms a step": round((span - busy) / steps, 4), "a step": ""})
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tree", default="llama1b", choices=sorted(trees.TREES))
  parser.add_argument("--steps", type=int, default=10)
  parser.add_argument("--rows", default="bf16 remainder16 fp8/fp8")
  parser.add_argument("--out", default=None, help="folder of the result file")
  args = parser.parse_args()
  kernel = "cuda" if jax.default_backend() == "gpu" else "cpu"
  wanted = args.rows.split(";")
  results = []
  for row in step_time.rows(kernel):
    if row.label in wanted:
      results += profile(row, trees.TREES[args.tree](), args.steps)
  print(common.table(results, ["row", "kernel", "ms a step", "a step"]))
  common.write(f"kernel_times_{args.tree}_{jax.default_backend()}", {"steps": args.steps, "results": results}, args.out)


if __name__ == "__main__":
  main()
