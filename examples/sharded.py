"""One training run in five layouts on a mesh: replicated, ZeRO-1, FSDP, tensor parallel, and FSDP with tensor parallel.

They differ only in shardings; losses are the same but for rounding. The table at the end has, for each layout, the
bytes that one device holds, and what the optimizer's step communicates. It uses all devices, or simulated ones::

    python examples/sharded.py
    python examples/sharded.py --devices 8
"""

import collections
from collections.abc import Sequence
import os
import re
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowprec as olp

BLOCK = 128  # a shard must hold whole blocks of the last axis
# The axis of each parameter that tensor parallelism cuts: columns of the first layer, rows of the second.
TENSOR_AXIS = {"embedding/embedding": 0, "hidden/kernel": 1, "hidden/bias": 0, "head/kernel": 0}
COLLECTIVE = re.compile(r" (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")


class Layout(NamedTuple):
  """What is cut along the mesh's axis "data", beside the batches; "model" cuts what ``TENSOR_AXIS`` says."""

  model: int  # devices along "model"
  params: bool
  state: bool


def layouts(n: int) -> dict[str, Layout]:
  return {
      "replicated": Layout(1, False, False),
      "ZeRO-1": Layout(1, False, True),
      "FSDP": Layout(1, True, True),
      "tensor parallel": Layout(n, False, False),
      "FSDP + tensor parallel": Layout(2 if n % 2 == 0 else 1, True, True),
  }


def shardings(mesh: Any, shapes: Any, over_data: bool) -> Any:
  """A tree of shardings: an axis is cut as often as its length allows."""

  def of_leaf(path, x):
    cuts: list[tuple[str, ...]] = [()] * x.ndim
    tensor_axis = TENSOR_AXIS.get("/".join(k.key for k in path))
    for name, axis in (("model", tensor_axis), ("data", 0 if over_data else None)):
      if axis is not None and x.shape[axis] % NamedSharding(mesh, P((*cuts[axis], name))).num_devices == 0:
        cuts[axis] += (name,)
    return NamedSharding(mesh, P(*cuts))

  return jax.tree_util.tree_map_with_path(of_leaf, shapes)


def bytes_per_device(tree: Any) -> int:
  """Of the device that holds most."""
  held: collections.Counter = collections.Counter()
  for x in jax.tree.leaves(tree):
    for shard in x.addressable_shards:
      held[shard.device] += shard.data.nbytes
  return max(held.values())


def run(name: str, layout: Layout, args: Any, data: Any) -> tuple[list[float], dict[str, Any]]:
  """Trains in one layout; returns its losses and a row of the table."""
  n = jax.device_count()
  mesh = jax.make_mesh((n // layout.model, layout.model), ("data", "model"), (AxisType.Auto, AxisType.Auto))
  model = common.ByteModel(args.width)
  tx = olp.adamw(args.lr, weight_decay=0.01, max_grad_norm=1.0)

  # Parameters and state are made in shards: nothing is ever whole on one device that need not be.
  init = lambda key: model.init(key, jnp.zeros((1, common.CONTEXT), jnp.int32))["params"]
  key = jax.random.key(args.seed)
  shapes = jax.eval_shape(init, key)
  param_shardings = shardings(mesh, shapes, layout.params)
  grad_shardings = shardings(mesh, shapes, layout.state)
  state_shardings = olp.state_shardings(tx, shapes, grad_shardings)
  params = jax.jit(init, out_shardings=param_shardings)(key)
  state = jax.jit(tx.init, out_shardings=state_shardings)(params)

  def apply(grads, params, state):
    return olp.apply_gradients(tx, grads, state, params)

  def step(carry, rows):
    params, state = carry
    loss, grads = jax.value_and_grad(lambda p: common.loss_fn(lambda x: model.apply({"params": p}, x), rows))(params)
    # A gradient is summed where it is used: with ZeRO-1 each device needs its part only.
    grads = jax.lax.with_sharding_constraint(grads, grad_shardings)
    return apply(grads, params, state), loss

  out = (param_shardings, state_shardings)
  train_step = jax.jit(step, donate_argnums=0, out_shardings=(out, NamedSharding(mesh, P())))
  rows_sharding = NamedSharding(mesh, P("data"))
  put = lambda rows: jax.device_put(rows, rows_sharding)
  (params, state), losses = common.train(
      lambda carry, rows: train_step(carry, put(rows)), (params, state), common.batches(data, args), args.steps, name
  )

  grads = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, grad_shardings)
  hlo = jax.jit(apply, donate_argnums=(1, 2), out_shardings=out).lower(grads, params, state).compile().as_text()
  counts = collections.Counter(COLLECTIVE.findall(hlo))
  return losses, {
      "layout": name,
      "mesh": f"{mesh.shape['data']} x {mesh.shape['model']}",
      "loss": sum(losses[-20:]) / len(losses[-20:]),
      "params": bytes_per_device(params),
      "state": bytes_per_device(state),
      "communication": ", ".join(f"{k} {v}" for k, v in sorted(counts.items())) or "none",
  }


def main(argv: Sequence[str] | None = None) -> list[float]:
  args = common.flags(__doc__, devices=0, width=512, steps=100).parse_args(argv)
  if args.devices:  # of the CPU; jax looks at this when it is first asked for a device
    jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
  n = jax.device_count()
  args.width = -(-args.width // (n * BLOCK)) * n * BLOCK  # so that every layout can cut it
  args.batch = -(-args.batch // n) * n
  data, _ = common.text()
  results = {name: run(name, layout, args, data) for name, layout in layouts(n).items()}

  size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: common.make(args)[1])))
  print(f"\n{size:,} parameters in float32 on {n} devices ({jax.devices()[0].device_kind})")
  head = f"{'layout':<24}{'data x model':<14}{'loss':>10}{'parameters':>13}{'state':>12}  step communicates"
  print(f"{'':<48}{'bytes a device':>25}\n{head}\n{'-' * len(head)}")
  for _, row in results.values():
    print(f"{row['layout']:<24}{row['mesh']:<14}{row['loss']:>10.4f}{row['params']:>13,}{row['state']:>12,}"
          f"  {row['communication']}")  # fmt: skip
  curves = jnp.asarray([losses for losses, _ in results.values()])
  print(f"losses of all layouts agree to {float(jnp.ptp(curves, axis=0).max()):.1e}")
  return results["replicated"][0]


if __name__ == "__main__":
  main()
