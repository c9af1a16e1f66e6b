"""A search over learning rates as one program: ``jax.vmap`` over the whole training step, optimizer included.

::

    python examples/batched_learning_rates.py --rates 1e-4,1e-3,1e-2
"""

from collections.abc import Sequence
import functools

import common
import jax
import jax.numpy as jnp
import numpy as np

import optax_lowprec as olp


def main(argv: Sequence[str] | None = None) -> list[float]:
  args = common.flags(__doc__, rates="3e-4,1e-3,3e-3,1e-2", width=128).parse_args(argv)
  rates = jnp.asarray([float(r) for r in args.rates.split(",")])
  data, held_out = common.text()
  model, params = common.make(args)
  loss_of = lambda params, rows: common.loss_fn(lambda x: model.apply({"params": params}, x), rows)
  optimizer = lambda rate: olp.adamw(rate, weight_decay=0.01)

  def one_step(params, opt_state, rate, rows):
    loss, grads = jax.value_and_grad(loss_of)(params, rows)
    return *olp.apply_gradients(optimizer(rate), grads, opt_state, params), loss

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state, rows):
    # Every rate sees the same batch.
    params, opt_state, losses = jax.vmap(one_step, in_axes=(0, 0, 0, None))(*state, rates, rows)
    return (params, opt_state), losses.mean()

  params = jax.tree.map(lambda p: jnp.stack([p] * len(rates)), params)
  opt_state = jax.vmap(lambda rate, params: optimizer(rate).init(params))(rates, params)
  (params, _), losses = common.train(step, (params, opt_state), common.batches(data, args), args.steps)
  evaluation = np.asarray(jax.vmap(loss_of, in_axes=(0, None))(params, common.windows(held_out, 4096, 1)))
  print("learning rate   evaluation loss")
  for rate, loss in zip(rates, evaluation, strict=True):
    print(f"{float(rate):>13g}{float(loss):>18.3f}{'   <- best' if loss == evaluation.min() else ''}")
  return losses


if __name__ == "__main__":
  main()
