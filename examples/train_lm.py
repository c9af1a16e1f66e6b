"""Trains a byte-level transformer twice, with optax.adamw in float32 and with optax_lowprec.adamw, and compares.

The text is the Python standard library's own source code, which every machine with Python has. Both runs start from
the same weights and see the same batches; the model computes in bfloat16. At the end come the evaluation losses, the
bytes that parameters and optimizer state take, and a PNG with the two loss curves::

    python examples/train_lm.py
    python examples/train_lm.py --param-dtype bfloat16 --master remainder8 --steps 1000
"""

import argparse
import functools
import pathlib
import sysconfig
import time
from typing import Any, NamedTuple

from flax import linen as nn
from flax.training import train_state as linen_state
import jax
import jax.numpy as jnp
from matplotlib import figure
import numpy as np
import optax
import tqdm

import optax_lowprec as olp
from optax_lowprec.flax import TrainState

VOCABULARY = 256
STEPS_PER_DISPATCH = 10


# --- text -----------------------------------------------------------------------------------------------------------


def read_texts(eval_every: int = 16) -> tuple[np.ndarray, np.ndarray]:
  """The standard library's source files as two strings of bytes: every 16th file is for evaluation."""
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
  files = sorted(f for f in root.rglob("*.py") if skipped.isdisjoint(f.relative_to(root).parts))
  texts = [f.read_bytes() for f in files]
  if not texts:
    raise SystemExit(f"no Python sources in {root}")
  held_out = b"\n".join(texts[::eval_every])
  del texts[::eval_every]
  return np.frombuffer(b"\n".join(texts), np.uint8), np.frombuffer(held_out, np.uint8)


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
  return text[starts[..., None] + np.arange(length)]


# --- model ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
  """Pre-norm attention and MLP."""

  heads: int
  param_dtype: Any

  @nn.compact
  def __call__(self, x):
    width = x.shape[-1]
    norm = functools.partial(nn.RMSNorm, dtype=jnp.bfloat16, param_dtype=self.param_dtype)
    dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=jnp.bfloat16, param_dtype=self.param_dtype)
    h = norm(name="attention_norm")(x)
    q, k, v = (dense(width, name=name)(h).reshape(*h.shape[:-1], self.heads, -1) for name in ("query", "key", "value"))
    h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + dense(width, name="out")(h.reshape(x.shape))
    h = norm(name="mlp_norm")(x)
    return x + dense(width, name="down")(jnp.square(nn.relu(dense(4 * width, name="up")(h))))


class Transformer(nn.Module):
  """A decoder-only transformer over bytes that computes in bfloat16."""

  width: int
  depth: int
  length: int
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens):
    embed = functools.partial(nn.Embed, features=self.width, dtype=jnp.bfloat16, param_dtype=self.param_dtype)
    x = embed(VOCABULARY, name="tokens")(tokens) + embed(self.length, name="positions")(jnp.arange(tokens.shape[-1]))
    for i in range(self.depth):
      x = Block(heads=max(1, self.width // 64), param_dtype=self.param_dtype, name=f"block_{i}")(x)
    x = nn.RMSNorm(dtype=jnp.bfloat16, param_dtype=self.param_dtype, name="norm")(x)
    logits = nn.Dense(VOCABULARY, use_bias=False, dtype=jnp.bfloat16, param_dtype=self.param_dtype, name="logits")(x)
    return logits.astype(jnp.float32)


# --- training -------------------------------------------------------------------------------------------------------


def loss_fn(params, apply_fn, text):
  text = text.astype(jnp.int32)
  logits = apply_fn({"params": params}, text[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=0)
def train_steps(state: linen_state.TrainState, batches: jax.Array) -> tuple[linen_state.TrainState, jax.Array]:
  """One step for each batch; the old state's memory becomes the new one's."""

  def step(state, text):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, text)
    return state.apply_gradients(grads=grads), loss

  return jax.lax.scan(step, state, batches)


@jax.jit
def evaluate(state: linen_state.TrainState, batches: jax.Array) -> jax.Array:
  return jax.lax.map(lambda text: loss_fn(state.params, state.apply_fn, text), batches).mean()


class Run(NamedTuple):
  """What one training run came to."""

  dtype: str  # of the parameters
  losses: list[float]
  eval_loss: float
  seconds: float
  bytes_each: float  # parameters and optimizer state, for each parameter


def train(name: str, state: linen_state.TrainState, batches: np.ndarray, held_out: np.ndarray):
  """Trains on all batches.

  Returns:
    The final state, the training losses, the evaluation loss and the seconds that training took.
  """
  losses: list[float] = []
  start = time.perf_counter()
  with tqdm.tqdm(total=len(batches), desc=name, unit="step") as progress:
    for first in range(0, len(batches), STEPS_PER_DISPATCH):
      chunk = batches[first : first + STEPS_PER_DISPATCH]
      state, chunk_losses = train_steps(state, chunk)
      losses.extend(np.asarray(chunk_losses).tolist())
      progress.update(len(chunk))
      progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
  seconds = time.perf_counter() - start
  return state, losses, float(evaluate(state, held_out)), seconds


def compare(args: argparse.Namespace) -> tuple[dict[str, Run], Any]:
  """Runs both optimizers; returns a row for each and the shapes of the model's parameters in float32."""
  text, eval_text = read_texts()
  rng = np.random.default_rng(args.seed)
  batches = windows(text, rng.integers(len(text) - args.seq, size=(args.steps, args.batch)), args.seq + 1)
  held_out = windows(eval_text, rng.integers(len(eval_text) - args.seq, size=(32, 32)), args.seq + 1)
  print(f"text: {len(text):,} bytes for training, {len(eval_text):,} for evaluation")

  model = Transformer(args.width, args.depth, args.seq)
  weights = jax.jit(model.init)(jax.random.key(args.seed), jnp.zeros((1, args.seq), jnp.int32))["params"]
  n = sum(x.size for x in jax.tree.leaves(weights))
  print(f"model: {n:,} parameters, {args.steps} steps of {args.batch} x {args.seq} bytes")
  learning_rate = optax.warmup_cosine_decay_schedule(0.0, args.lr, max(1, args.steps // 10), args.steps)

  tx = optax.adamw(learning_rate, weight_decay=args.weight_decay)
  baseline = linen_state.TrainState.create(apply_fn=model.apply, params=jax.tree.map(jnp.copy, weights), tx=tx)

  tx = low_precision(args, learning_rate, args.master)
  model = Transformer(args.width, args.depth, args.seq, args.param_dtype)
  params = jax.tree.map(lambda w: w.astype(args.param_dtype), jax.tree.map(jnp.copy, weights))
  ours = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
  # The bits of the float32 weights that narrow parameters cannot hold go to the masters.
  params, opt_state = olp.with_master_params(ours.opt_state, params, weights)
  ours = ours.replace(params=params, opt_state=opt_state)

  rows: dict[str, Run] = {}
  for name, state in (("optax.adamw", baseline), ("optax_lowprec.adamw", ours)):
    state, losses, eval_loss, seconds = train(name, state, batches, held_out)
    size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    dtype = jax.tree.leaves(state.params)[0].dtype.name
    rows[name] = Run(dtype, losses, eval_loss, seconds, size / n)
  return rows, weights


def low_precision(args: argparse.Namespace, learning_rate: Any, master: Any) -> optax.GradientTransformationExtraArgs:
  return olp.adamw(
      learning_rate,
      weight_decay=args.weight_decay,
      mu=args.mu,
      nu=args.nu,
      master=master,
      seed=args.seed,
      implementation=args.implementation,
  )


# --- results --------------------------------------------------------------------------------------------------------


def print_results(rows: dict[str, Run]) -> None:
  head = f"{'optimizer':<22}{'parameters':<12}{'evaluation loss':>16}{'bytes a parameter':>20}{'seconds':>10}"
  print(f"\n{head}\n{'-' * len(head)}")
  for name, row in rows.items():
    print(f"{name:<22}{row.dtype:<12}{row.eval_loss:>16.4f}{row.bytes_each:>20.2f}{row.seconds:>10.1f}")
  f32, ours = rows.values()
  loss, size = ours.eval_loss - f32.eval_loss, ours.bytes_each - f32.bytes_each
  print(f"{'difference':<34}{loss:>+16.4f}{size:>+20.2f}")


def print_memory(args: argparse.Namespace, weights: Any) -> None:
  """What this model takes with each kind of parameters and master, from ``olp.memory_report``."""
  head = f"{'parameters':<12}{'optimizer':<22}{'master':<14}{'bytes a parameter':>18}{'of optax.adamw':>16}"
  print(f"\nparameters + optimizer state of this model\n{head}\n{'-' * len(head)}")
  full = olp.memory_report(optax.adamw(args.lr), weights).bytes_per_parameter
  print(f"{'float32':<12}{'optax.adamw':<22}{'itself':<14}{full:>18.2f}{1:>16.0%}")
  for dtype, master in (("float32", None), ("bfloat16", "remainder16"), ("bfloat16", "remainder8")):
    params = jax.tree.map(lambda w, dtype=dtype: jax.ShapeDtypeStruct(w.shape, dtype), weights)
    each = olp.memory_report(low_precision(args, args.lr, master), params).bytes_per_parameter
    print(f"{dtype:<12}{'optax_lowprec.adamw':<22}{master or 'itself':<14}{each:>18.2f}{each / full:>16.0%}")


def save_curves(rows: dict[str, Run], path: pathlib.Path) -> None:
  """Training losses, and their running means over 20 steps."""
  fig = figure.Figure(figsize=(8, 5), layout="constrained")
  axes = fig.subplots()
  for (name, row), color, style in zip(rows.items(), ("tab:blue", "tab:orange"), ("-", "--"), strict=True):
    losses = np.asarray(row.losses)
    steps = np.arange(1, len(losses) + 1)
    window = min(20, len(losses))
    mean = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    label = f"{name}, {row.dtype} parameters ({row.bytes_each:.2f} bytes each): evaluation loss {row.eval_loss:.4f}"
    axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps[window - 1 :], mean, color=color, linestyle=style, label=label)
  axes.set_xlabel("step")
  axes.set_ylabel("training loss (nats a byte)")
  axes.set_title("Byte-level transformer on the Python standard library")
  axes.grid(alpha=0.3)
  axes.legend()
  path.parent.mkdir(parents=True, exist_ok=True)
  fig.savefig(path, dpi=120)
  print(f"\nloss curves: {path}")


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  add = parser.add_argument
  add("--steps", type=int, default=300, help="training steps of each run")
  add("--width", type=int, default=128, help="model width")
  add("--depth", type=int, default=3, help="transformer blocks")
  add("--batch", type=int, default=8, help="sequences of a batch")
  add("--seq", type=int, default=128, help="bytes of a sequence")
  add("--lr", type=float, default=4e-3, help="peak learning rate")
  add("--weight-decay", type=float, default=0.01)
  add("--seed", type=int, default=0, help="of the weights, the batches and stochastic rounding")
  add("--mu", default="float8_e4m3fn", help="dtype of the first moment: float8_e4m3fn, float16, bfloat16, ...")
  add("--nu", default="float8_e4m3fn", help="dtype of the second moment")
  add("--master", default="auto", help="auto, none, remainder16, remainder8, or a dtype")
  add("--param-dtype", default="float32", help="of the optax_lowprec run: float32, bfloat16 or float16")
  add("--implementation", default=None, help="cuda, cpu or jnp; by default the best one that is available")
  add("--out", type=pathlib.Path, default=pathlib.Path("results/train_lm.png"), help="where the loss curves go")
  args = parser.parse_args()
  if args.master == "none":
    args.master = None
  return args


def main() -> None:
  args = parse_args()
  rows, weights = compare(args)
  print_results(rows)
  print_memory(args, weights)
  save_curves(rows, args.out)


if __name__ == "__main__":
  main()
