"""Drop-in train states for Flax whose steps take the fused path (``optax_lowprec.apply_gradients``)."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from flax.training import train_state
import optax

from optax_lowprec.adam import apply_gradients

PyTree = Any
# Parameters that are replaced by their "gradient" (fp8 scales of flax.linen.fp8_ops).
_OVERWRITE = "_overwrite_with_gradient"


class TrainState(train_state.TrainState):
  """``flax.training.train_state.TrainState`` with a fused ``apply_gradients``.

  Its state is the same, so that one can be exchanged for the other and checkpoints stay valid.
  """

  def apply_gradients(self, *, grads: PyTree, extra_args: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """One step.

    Args:
      grads: gradients, a tree like ``params``.
      extra_args: extra arguments of ``tx.update``, such as ``{"grad_scale": scale}``.
      **kwargs: further attributes to replace.

    Returns:
      The new train state.
    """
    overwritten = _OVERWRITE in grads
    new_params, opt_state = apply_gradients(
        self.tx,
        grads["params"] if overwritten else grads,
        self.opt_state,
        self.params["params"] if overwritten else self.params,
        **(extra_args or {}),
    )
    if overwritten:
      new_params = {"params": new_params, _OVERWRITE: grads[_OVERWRITE]}
    return self.replace(step=self.step + 1, params=new_params, opt_state=opt_state, **kwargs)


def _pure(tree: PyTree) -> PyTree:
  if hasattr(nnx, "as_pure"):
    return nnx.as_pure(tree)
  old_nnx: Any = nnx
  return old_nnx.to_arrays(nnx.pure(tree))  # flax < 0.12.2


class Optimizer(nnx.Optimizer):
  """``flax.nnx.Optimizer`` with a fused ``update``."""

  def update(self, model: Any, grads: PyTree, /, **kwargs: Any) -> optax.Updates | None:
    """One step, in place: updates the model's parameters and the optimizer's state.

    Args:
      model: the model.
      grads: gradients with respect to ``wrt``.
      **kwargs: extra arguments of ``tx.update``, such as ``grad_scale``.

    Returns:
      None: there is no tree of updates. (Newer releases of ``nnx.Optimizer.update`` return theirs.)
    """
    mode = {"graph": self.graph} if hasattr(self, "graph") else {}  # flax < 0.12.3 has no tree mode
    params = nnx.state(model, self.wrt, **mode)
    new_params, opt_state = apply_gradients(
        self.tx, _pure(nnx.state(grads, self.wrt, **mode)), _pure(self.opt_state), _pure(params), **_pure(kwargs)
    )
    nnx.update(model, new_params)
    nnx.update(self.opt_state, nnx.state(opt_state, **mode))
    self.step[...] += 1
    return None
