"""Fine-tuning with a frozen part: the head learns other text, the rest has no optimizer state and does not move.

The model is trained on Python sources, then its head on Python's reference manual (the help texts of ``pydoc``)::

    python examples/frozen_part.py
"""

from collections.abc import Sequence
import functools

import common
import jax
import jax.numpy as jnp
import optax

import optax_lowprec as olp


def main(argv: Sequence[str] | None = None) -> list[float]:
  args = common.flags(__doc__).parse_args(argv)
  model, params = common.make(args, jnp.bfloat16)
  loss_of = lambda params, rows: common.loss_fn(lambda x: model.apply({"params": params}, x), rows)

  adamw = olp.adamw(args.lr, weight_decay=0.01)
  labels = lambda params: {layer: "tuned" if layer == "head" else "frozen" for layer in params}
  head_only = optax.partition({"tuned": adamw, "frozen": optax.set_to_zero()}, labels)
  pattern = "pydoc_data/topics.py"
  all_losses: list[float] = []
  for name, tx, (data, held_out) in (
      ("all, on sources", adamw, common.text()),
      ("head, on the manual", head_only, common.text(pattern)),
  ):

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, rows, tx=tx):
      params, opt_state = state
      loss, grads = jax.value_and_grad(loss_of)(params, rows)
      return olp.apply_gradients(tx, grads, opt_state, params), loss

    held_out = common.windows(held_out, 4096, 1)
    before, start = loss_of(params, held_out), jax.device_get(params)
    (params, opt_state), losses = common.train(
        step, (params, tx.init(params)), common.batches(data, args), args.steps, name
    )
    after = loss_of(params, held_out)
    common.report(name, losses, after, params, opt_state)
    all_losses += losses
  moved = [k for k in params if any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (start[k], params[k])),
                                                                   strict=True))]  # fmt: skip
  print(f"evaluation on the manual: {float(before):.3f} before tuning, {float(after):.3f} after")
  print("layers that moved while the head was tuned:", ", ".join(moved))
  return all_losses


if __name__ == "__main__":
  main()
