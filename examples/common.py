"""What the small examples share: text, a byte-level model, flags, a training loop, and the line at the end."""

import argparse
from collections.abc import Callable, Iterator
import pathlib
import sysconfig
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

VOCABULARY = 256
CONTEXT = 16  # bytes that a prediction sees


def flags(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
  """A parser with the flags that every example has; ``defaults`` replaces theirs and adds further ones."""
  parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
  common = dict(steps=300, batch=64, width=256, lr=3e-3, seed=0)
  for name, default in (common | defaults).items():
    parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"default {default}")
  return parser


def text(pattern: str = "*.py") -> tuple[np.ndarray, np.ndarray]:
  """Files of the Python standard library as bytes: for training, and the last tenth of them for evaluation."""
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  data = np.frombuffer(b"\n".join(f.read_bytes() for f in sorted(root.glob(pattern))), np.uint8)
  cut = len(data) * 9 // 10
  return data[:cut], data[cut:]


def windows(data: np.ndarray, n: int, seed: int) -> np.ndarray:
  """``n`` random windows: ``CONTEXT`` bytes and the one to predict."""
  starts = np.random.default_rng(seed).integers(len(data) - CONTEXT, size=n)
  return data[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def batches(data: np.ndarray, args: argparse.Namespace, steps: int | None = None) -> Iterator[np.ndarray]:
  steps = args.steps if steps is None else steps
  yield from windows(data, steps * args.batch, args.seed).reshape(steps, args.batch, -1)


class ByteModel(nn.Module):
  """Predicts the next byte from those before it. ``dtype`` is that of the parameters and of the computation."""

  width: int
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, context):
    kind = dict(dtype=self.dtype, param_dtype=self.dtype)
    x = nn.Embed(VOCABULARY, 32, name="embedding", **kind)(context).reshape(*context.shape[:-1], -1)
    x = nn.relu(nn.Dense(self.width, name="hidden", **kind)(x))
    return nn.Dense(VOCABULARY, name="head", **kind)(x)


def make(args: argparse.Namespace, dtype: Any = jnp.float32) -> tuple[ByteModel, Any]:
  """A model and its parameters."""
  model = ByteModel(args.width, dtype)
  return model, jax.jit(model.init)(jax.random.key(args.seed), jnp.zeros((1, CONTEXT), jnp.int32))["params"]


def loss_fn(apply: Callable[[Any], jax.Array], rows: jax.Array) -> jax.Array:
  """Nats a byte of the last byte of each row."""
  logits = apply(rows[:, :-1]).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, -1]).mean()


def train(step: Callable[..., Any], state: Any, rows: Iterator[np.ndarray], total: int, name: str = "training"):
  """``state, loss = step(state, batch)`` for every batch, with a progress bar; returns the state and the losses."""
  losses = []
  with tqdm.tqdm(rows, total=total, desc=name, unit="step") as progress:
    for i, batch in enumerate(progress):
      state, loss = step(state, batch)
      losses.append(loss)
      if i % 50 == 49:
        progress.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
  return state, [float(x) for x in losses]


def report(name: str, losses: list[float], evaluation: Any, params: Any, opt_state: Any) -> None:
  n = sum(x.size for x in jax.tree.leaves(params))
  size = sum(x.nbytes for x in jax.tree.leaves((params, opt_state))) / n
  print(f"{name}: loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f}, evaluation {float(evaluation):.3f}; "
        f"{n:,} parameters, {size:.2f} bytes each with the optimizer's state")  # fmt: skip
