"""float16 training with dynamic loss scaling.

Gradients stay float16 and scaled: ``grad_scale`` divides them inside the step, ``skip_nonfinite`` leaves everything as
it is when one overflowed, and the step count then says whether the scale must fall. No float32 copy of the gradients
and no select over parameters and state is needed::

    python examples/fp16_loss_scaling.py --scale 1e9
"""

from collections.abc import Sequence
import functools

import common
from flax.training.dynamic_scale import DynamicScale
import jax
import jax.numpy as jnp
import optax

import optax_lowprec as olp
from optax_lowprec.flax import TrainState


class State(TrainState):
  scale: DynamicScale


def next_scale(scale: DynamicScale, finite: jax.Array) -> DynamicScale:
  """Flax's rule: halved after an overflow, doubled after a time without one."""
  grow = finite & (scale.fin_steps >= scale.growth_interval)
  factor = jnp.where(finite, jnp.where(grow, scale.growth_factor, 1.0), scale.backoff_factor)
  steps = jnp.where(grow | ~finite, 0, scale.fin_steps + 1)
  return scale.replace(scale=scale.scale * factor, fin_steps=steps)


@functools.partial(jax.jit, donate_argnums=0)
def step(state, rows):
  def scaled_loss(params):
    loss = common.loss_fn(lambda x: state.apply_fn({"params": params}, x), rows)
    return loss * state.scale.scale, loss

  (_, loss), grads = jax.value_and_grad(scaled_loss, has_aux=True)(state.params)
  count = optax.tree.get(state.opt_state, "count")
  new = state.apply_gradients(grads=grads, extra_args={"grad_scale": state.scale.scale})
  finite = optax.tree.get(new.opt_state, "count") > count
  return new.replace(scale=next_scale(state.scale, finite)), loss


def main(argv: Sequence[str] | None = None) -> list[float]:
  args = common.flags(__doc__, scale=2.0**30, growth_interval=50).parse_args(argv)
  data, held_out = common.text()
  model, params = common.make(args, jnp.float16)
  tx = olp.adamw(args.lr, weight_decay=0.01, max_grad_norm=1.0, skip_nonfinite=True)
  scale = DynamicScale(scale=jnp.float32(args.scale), fin_steps=jnp.int32(0), growth_interval=args.growth_interval)
  state = State.create(apply_fn=model.apply, params=params, tx=tx, scale=scale)
  state, losses = common.train(step, state, common.batches(data, args), args.steps)
  evaluation = common.loss_fn(lambda x: model.apply({"params": state.params}, x), common.windows(held_out, 4096, 1))
  common.report("linen, float16", losses, evaluation, state.params, state.opt_state)
  taken = int(optax.tree.get(state.opt_state, "count"))
  print(f"loss scale {args.scale:.3g} -> {float(state.scale.scale):.3g}, {args.steps - taken} steps were skipped")
  return losses


if __name__ == "__main__":
  main()
