"""Flax nnx: the model and its optimizer are updated in place.

::

    python examples/nnx.py --steps 300
"""

from collections.abc import Sequence

import common
from flax import nnx
import jax.numpy as jnp

import optax_lowprec as olp
from optax_lowprec.flax import Optimizer


class ByteModel(nnx.Module):
  """Predicts the next byte from those before it."""

  def __init__(self, width, rngs):
    kind = dict(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=rngs)
    self.embedding = nnx.Embed(common.VOCABULARY, 32, **kind)
    self.hidden = nnx.Linear(32 * common.CONTEXT, width, **kind)
    self.head = nnx.Linear(width, common.VOCABULARY, **kind)

  def __call__(self, context):
    return self.head(nnx.relu(self.hidden(self.embedding(context).reshape(len(context), -1))))


@nnx.jit
def update(model, optimizer, rows):
  loss, grads = nnx.value_and_grad(common.loss_fn)(model, rows)
  optimizer.update(model, grads)
  return loss


def main(argv: Sequence[str] | None = None) -> list[float]:
  args = common.flags(__doc__).parse_args(argv)
  data, held_out = common.text()
  model = ByteModel(args.width, nnx.Rngs(args.seed))
  optimizer = Optimizer(model, olp.adamw(args.lr, weight_decay=0.01), wrt=nnx.Param)
  step = lambda state, rows: (state, update(model, optimizer, rows))
  _, losses = common.train(step, None, common.batches(data, args), args.steps)
  evaluation = common.loss_fn(model, common.windows(held_out, 4096, 1))
  common.report("nnx, bfloat16", losses, evaluation, nnx.state(model, nnx.Param), nnx.state(optimizer.opt_state))
  return losses


if __name__ == "__main__":
  main()
