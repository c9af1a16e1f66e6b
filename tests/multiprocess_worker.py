"""One of the processes of tests/test_multiprocess.py: some steps on a mesh over all processes' devices.

  python multiprocess_worker.py PROCESS PROCESSES PORT OUT

writes to OUT what ``local`` gives for each scenario: the shards that this process holds, as ``write`` does.
"""

import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import table
from table import StateFormat

import optax_lowprec as olp

STEPS = 3
SHAPES = {"matrix": (16, 512), "bias": (256,), "scalar": ()}
# The processes differ in "x", their devices in "y". The last two are on all devices.
SPECS = {"matrix": P("x", "y"), "bias": P(), "scalar": P()}
TENSOR = StateFormat("float8_e4m3fn", "tensor", transform="sqrt")
FORMATS = {
    "blocks": dict(),
    # All that looks beyond a shard: a maximum over the leaf, and random bits by position.
    "tensor_stochastic": dict(mu=StateFormat("float8_e5m2", rounding="stochastic"), nu=TENSOR, master="remainder8"),
}


def scenarios() -> list[tuple[str, str]]:
  kernels = [name for name in olp.available_implementations() if name == "cpu"]
  return [*((formats, name) for formats in FORMATS for name in kernels), ("tensor_stochastic", "jnp")]


def make(formats: str, implementation: str) -> Any:
  return olp.adamw(1e-2, **FORMATS[formats], min_quantized_size=64, skip_nonfinite=True, implementation=implementation)


def gradients(step: int) -> dict[str, np.ndarray]:
  values = table.Gradients(SHAPES)
  return {k: values.numpy(step, k).astype(jnp.bfloat16) for k in SHAPES}


def run(formats: str, implementation: str, mesh: Any = None, poisoned: bool = False) -> tuple[Any, Any]:
  """Parameters and state after ``STEPS`` steps.

  Args:
    formats: a key of ``FORMATS``.
    implementation: a name.
    mesh: over the devices of all processes; None for this one's first device.
    poisoned: whether this process's shards of one gradient are infinite in one more, last step.
  """
  tx = make(formats, implementation)
  params = {k: np.asarray(p) for k, p in table.tree(SHAPES, jnp.bfloat16).items()}
  step = jax.jit(lambda p, s, g: olp.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
  if mesh is None:
    put = lambda tree: jax.device_put(tree, jax.local_devices(backend="cpu")[0])
  else:
    # Each process makes the shards that it holds, and no more.
    cut = lambda x, spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])
    put = lambda tree: jax.tree.map(cut, tree, SPECS)
  params = put(params)
  state = jax.jit(tx.init)(params)
  for t in range(STEPS):
    params, state = step(params, state, put(gradients(t)))
  if mesh is not None:
    grads = gradients(STEPS)
    # Other processes see a finite one.
    grads["matrix"] = np.full_like(grads["matrix"], np.inf) if poisoned else grads["matrix"]
    params, state = step(params, state, put(grads))
  return params, state


Rows = list[tuple[str, tuple[slice, ...], np.ndarray]]


def local(tree: Any) -> Rows:
  """For every shard of a tree in this process: its leaf, where in the leaf it is, and what it holds."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return [(jax.tree_util.keystr(path), shard.index, np.asarray(shard.data))
          for path, x in leaves for shard in x.addressable_shards]  # fmt: skip


def write(path: pathlib.Path, results: dict[tuple[str, str], Rows]) -> None:
  """Shards' bytes as an npz file, and what they are as JSON inside of it: npz has no float8."""
  described, arrays = [], {}
  for scenario, rows in results.items():
    for leaf, index, x in rows:
      cuts = [[s.start, s.stop] for s in index]
      described.append([*scenario, leaf, cuts, x.dtype.name, x.shape])
      arrays[str(len(arrays))] = np.frombuffer(x.tobytes(), np.uint8)
  np.savez(path, described=np.array(json.dumps(described)), **arrays)


def read(path: pathlib.Path) -> dict[tuple[str, str], Rows]:
  results: dict[tuple[str, str], Rows] = {}
  with np.load(path, allow_pickle=False) as file:
    for i, (formats, name, leaf, cuts, dtype, shape) in enumerate(json.loads(str(file["described"]))):
      x = file[str(i)].view(jnp.dtype(dtype)).reshape(shape)
      results.setdefault((formats, name), []).append((leaf, tuple(slice(*c) for c in cuts), x))
  return results


def main() -> None:
  process, processes, port = (int(x) for x in sys.argv[1:4])
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
  assert jax.process_count() == processes
  mesh = jax.make_mesh((processes, jax.local_device_count()), ("x", "y"), (AxisType.Auto,) * 2)
  results = {scenario: local(run(*scenario, mesh, poisoned=process == 1)) for scenario in scenarios()}
  write(pathlib.Path(sys.argv[4]), results)
  jax.distributed.shutdown()


if __name__ == "__main__":
  main()
