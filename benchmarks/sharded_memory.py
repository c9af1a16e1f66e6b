"""Bytes that each device holds of parameters and optimizer state, for Llamas cut over 8 to 1024 devices.

Nothing is allocated and no device is needed: trees come from ``jax.eval_shape`` of each optimizer's ``init``, shardings
from ``olp.state_shardings`` on an abstract mesh, and bytes from the shape of a shard. It takes minutes: 405B has 1137
leaves.

    python benchmarks/sharded_memory.py
"""

import argparse
from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax

import optax_lowprec as olp

BLOCK = 128
DEVICES = tuple(2**i for i in range(3, 11))


class Llama(NamedTuple):
  """Widths of a decoder with grouped-query attention, gated MLP and an output head of its own."""

  width: int
  layers: int
  hidden: int
  vocabulary: int
  key_value: int = 1024  # 8 heads of 128

  def params(self, dtype: Any) -> dict[str, Any]:
    d, f, kv = self.width, self.hidden, self.key_value
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    layer = lambda: {
        "attention_norm": leaf(d),
        "query": leaf(d, d),
        "key": leaf(d, kv),
        "value": leaf(d, kv),
        "out": leaf(d, d),
        "mlp_norm": leaf(d),
        "gate": leaf(d, f),
        "up": leaf(d, f),
        "down": leaf(f, d),
    }
    return {
        "embedding": leaf(self.vocabulary, d),
        **{f"layer_{i}": layer() for i in range(self.layers)},
        "norm": leaf(d),
        "head": leaf(d, self.vocabulary),
    }


MODELS = {
    "7B": Llama(4096, 32, 14336, 32000),
    "70B": Llama(8192, 80, 28672, 128256),
    "405B": Llama(16384, 126, 53248, 128256),
}


class Row(NamedTuple):
  label: str
  dtype: Any  # of the parameters
  make: Callable[[], optax.GradientTransformation]


_ours = functools.partial(olp.adamw, 1e-4, weight_decay=0.1)
_wide = functools.partial(_ours, mu="float32", nu="float32", master="float32")
ROWS = [
    Row("float32, `optax.adamw`", jnp.float32, functools.partial(optax.adamw, 1e-4, weight_decay=0.1)),
    Row("bfloat16, float32 master and moments", jnp.bfloat16, _wide),
    Row("float32, `olp.adamw()`", jnp.float32, _ours),
    Row("bfloat16, `olp.adamw()`", jnp.bfloat16, _ours),
    Row('bfloat16, `olp.adamw(master="remainder8")`', jnp.bfloat16, functools.partial(_ours, master="remainder8")),
]


def mesh_of(devices: int) -> AbstractMesh:
  # Two axes, as 1024 divides no vocabulary here: then rows are cut by the first and columns by the second.
  first = min(devices, 256)
  return AbstractMesh((first, devices // first), ("x", "y"), (AxisType.Auto, AxisType.Auto))


def fsdp(mesh: AbstractMesh, x: jax.ShapeDtypeStruct) -> NamedSharding:
  """Over all devices, so that every shard has whole blocks; a vector that is too short for it is replicated."""
  whole = lambda axis, pieces: x.shape[axis] % (pieces * (BLOCK if axis == len(x.shape) - 1 else 1)) == 0
  sizes = dict(mesh.shape)
  for axis in range(len(x.shape)):
    if whole(axis, math.prod(sizes.values())):
      return NamedSharding(mesh, P(*[None] * axis, ("x", "y")))
  if len(x.shape) == 2 and whole(0, sizes["x"]) and whole(1, sizes["y"]):
    return NamedSharding(mesh, P("x", "y"))
  return NamedSharding(mesh, P())


def bytes_per_device(shapes: Any, shardings: Any) -> int:
  pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
  return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)


def measure(model: str, row: Row) -> list[dict[str, Any]]:
  params = MODELS[model].params(row.dtype)
  tx = row.make()
  state = jax.eval_shape(tx.init, params)
  results = []
  for devices in DEVICES:
    param_shardings = jax.tree.map(functools.partial(fsdp, mesh_of(devices)), params)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(param_shardings), strict=True)
    results.append(
        {
            "model": model,
            "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(params)),
            "optimizer": row.label,
            "devices": devices,
            "parameter_bytes": bytes_per_device(params, param_shardings),
            "state_bytes": bytes_per_device(state, olp.state_shardings(tx, params, param_shardings)),
            "replicated_parameters": sum(math.prod(p.shape) for p, s in pairs if s.is_fully_replicated),
        }
    )
  return results


def markdown(results: list[dict[str, Any]]) -> str:
  lines = [f"| model | parameters, optimizer | {' | '.join(map(str, DEVICES))} |", "|---|---|" + "---:|" * len(DEVICES)]
  for model in MODELS:
    for row in ROWS:
      held = [r["parameter_bytes"] + r["state_bytes"] for r in results
              if r["model"] == model and r["optimizer"] == row.label]  # fmt: skip
      lines.append(f"| {model} | {row.label} | {' | '.join(f'{x / 2**30:.2f}' for x in held)} |")
  return "\n".join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", default=None, help="folder of the result file")
  args = parser.parse_args()
  results = [result for model in MODELS for row in ROWS for result in measure(model, row)]
  print("GiB a device: parameters and optimizer state, by the number of devices\n")
  print(markdown(results))
  for model in MODELS:
    row = next(r for r in results if r["model"] == model)
    most = max(r["replicated_parameters"] for r in results if r["model"] == model)
    print(f"\n{model}: {row['parameters'] / 1e9:.2f} billion parameters, at most {most / 1e6:.1f} million replicated")
  print(f"written to {common.write('sharded_memory', results, args.out).name}")


if __name__ == "__main__":
  main()
