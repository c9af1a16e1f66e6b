"""Flax linen: bfloat16 parameters with exact float32 masters, in a train state whose step is fused.

::

    python examples/linen.py --steps 300
"""

from collections.abc import Sequence
import functools

import common
import jax
import jax.numpy as jnp

import optax_lowprec as olp
from optax_lowprec.flax import TrainState


@functools.partial(jax.jit, donate_argnums=0)
def step(state, rows):
  loss, grads = jax.value_and_grad(lambda p: common.loss_fn(lambda x: state.apply_fn({"params": p}, x), rows))(
      state.params
  )
  return state.apply_gradients(grads=grads), loss


def main(argv: Sequence[str] | None = None) -> list[float]:
  args = common.flags(__doc__).parse_args(argv)
  data, held_out = common.text()
  model, params = common.make(args, jnp.bfloat16)
  state = TrainState.create(apply_fn=model.apply, params=params, tx=olp.adamw(args.lr, weight_decay=0.01))
  state, losses = common.train(step, state, common.batches(data, args), args.steps)
  evaluation = common.loss_fn(lambda x: model.apply({"params": state.params}, x), common.windows(held_out, 4096, 1))
  common.report("linen, bfloat16", losses, evaluation, state.params, state.opt_state)
  return losses


if __name__ == "__main__":
  main()
