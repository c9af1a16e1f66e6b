"""A format for each layer: embeddings keep float32 moments, everything else float8.

Rows of an embedding are updated when their token occurs, which for some is almost never; many train them at full
precision for that reason. ``mu``, ``nu`` and ``master`` each take a function of the parameter's path::

    python examples/formats_by_layer.py
"""

from collections.abc import Sequence
import functools

import common
import jax
import jax.numpy as jnp

import optax_lowprec as olp


def moment(path, leaf):
  del leaf
  return "float32" if "embedding" in jax.tree_util.keystr(path) else "float8_e4m3fn"


def main(argv: Sequence[str] | None = None) -> list[float]:
  args = common.flags(__doc__).parse_args(argv)
  data, held_out = common.text()
  model, params = common.make(args, jnp.bfloat16)
  loss_of = lambda params, rows: common.loss_fn(lambda x: model.apply({"params": params}, x), rows)
  tx = olp.adamw(args.lr, weight_decay=0.01, mu=moment, nu=moment, master="remainder8")

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state, rows):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params, rows)
    return olp.apply_gradients(tx, grads, opt_state, params), loss

  (params, opt_state), losses = common.train(step, (params, tx.init(params)), common.batches(data, args), args.steps)
  common.report("formats by layer", losses, loss_of(params, common.windows(held_out, 4096, 1)), params, opt_state)
  for layer, leaves in opt_state.mu.items():
    print("  first moment of", layer, {k: f"{v.dtype.name}{list(v.shape)}" for k, v in leaves.items()})
  return losses


if __name__ == "__main__":
  main()
