"""Gradient accumulation: one optimizer step for every few batches, with ``optax.MultiSteps``.

Beside it, the same optimizer on batches as large as the accumulated ones; the two take the same steps but for
rounding::

    python examples/gradient_accumulation.py --every 4 --batch 64
"""

from collections.abc import Sequence
import functools

import common
import jax
import optax

import optax_lowprec as olp


def main(argv: Sequence[str] | None = None) -> list[float]:
  args = common.flags(__doc__, every=4, steps=400).parse_args(argv)
  data, held_out = common.text()
  rows = list(common.batches(data, args, args.steps // args.every * args.every))
  large = [common.np.concatenate(rows[i : i + args.every]) for i in range(0, len(rows), args.every)]
  model, start = common.make(args)
  loss_of = lambda params, rows: common.loss_fn(lambda x: model.apply({"params": params}, x), rows)
  adamw = olp.adamw(args.lr, weight_decay=0.01)
  every: list[float] = []
  for name, tx, batches in (
      (f"{args.every} x {args.batch} rows", optax.MultiSteps(adamw, args.every).gradient_transformation(), rows),
      (f"1 x {args.every * args.batch} rows", adamw, large),
  ):

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, rows, tx=tx):
      params, opt_state = state
      loss, grads = jax.value_and_grad(loss_of)(params, rows)
      return olp.apply_gradients(tx, grads, opt_state, params), loss

    params = jax.tree.map(jax.numpy.copy, start)
    (params, opt_state), losses = common.train(step, (params, tx.init(params)), iter(batches), len(batches), name)
    common.report(name, losses, loss_of(params, common.windows(held_out, 4096, 1)), params, opt_state)
    every = every or losses
  return every


if __name__ == "__main__":
  main()
