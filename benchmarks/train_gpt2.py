"""Trains GPT-2 (124M parameters) with optax.adamw in float32 and with ours in several formats, and compares.

The text is Python source code (corpus.py): under one epoch of it, and files held out for evaluation. Every run begins
with the float32 weights of its seed and sees the batches of its seed; the model computes in bfloat16. Steps are those
of ``olp.apply_gradients``, by the kernel. The parts:

- time: milliseconds of a whole train step inside a scan, and the peak of device memory, for three optimizers
- train: loss curves; three seeds of ``optax.adamw`` in float32 say what differences mean nothing
- finetune: from the trained weights, learning rate 1e-5 and b2 = 0.999
- convert: half a run in Optax, and the other half in ours, from its state; and our state to Optax and back
- digits: a small network on scikit-learn's handwritten digits, with small leaves quantized too

    python benchmarks/train_gpt2.py --out results --budget 560
    python benchmarks/train_gpt2.py --tiny --out results          # everything, small, on a CPU
    python benchmarks/train_gpt2.py --plot docs/loss_curves.png --out results

The result is written after every row. In training, gradients and the optimizer's step are two programs: the first,
which takes long to compile, is then the same for all rows of a parameter dtype, and the dispatch is hidden behind the
device's work.
"""

import argparse
from collections.abc import Callable, Sequence
import concurrent.futures
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any, NamedTuple

import common
import corpus
from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowprec as olp
from optax_lowprec import checkpoint

PARTS = ("time", "train", "finetune", "convert", "digits")
F32, BF16 = jnp.float32, jnp.bfloat16


class Config(NamedTuple):
  """Sizes of the model and of what it is trained on."""

  width: int = 768
  depth: int = 12
  heads: int = 12
  length: int = 1024
  vocabulary: int = 50304
  batch: int = 4
  eval_sequences: int = 256
  megabytes: float = 100
  attention: str = "xla"


TINY = Config(64, 2, 2, 32, 512, 2, 8, 0.6)


# --- model ----------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
  return table[tokens].astype(BF16)


def _embed_backward(saved: Any, g: jax.Array) -> Any:
  # A product with one-hot rows: a scatter adds in an order of its own, atomically.
  table, tokens = saved
  one_hot = (tokens.reshape(-1, 1) == jnp.arange(table.shape[0])).astype(g.dtype)
  grad = lax.dot_general(one_hot, g.reshape(-1, g.shape[-1]), (((0,), (0,)), ((), ())), preferred_element_type=F32)
  return grad.astype(table.dtype), None


embed.defvjp(lambda table, tokens: (embed(table, tokens), (table, tokens)), _embed_backward)


def _losses(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
  wide = logits.astype(F32)
  log_sum = jax.nn.logsumexp(wide, axis=-1)
  right = jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], wide, 0).sum(-1)
  return (log_sum - right).mean(), log_sum


@jax.custom_vjp
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Mean over tokens, computed in float32; keeps no float32 copy of the logits for the backward pass."""
  return _losses(logits, labels)[0]


def _cross_entropy_forward(logits: jax.Array, labels: jax.Array) -> Any:
  loss, log_sum = _losses(logits, labels)
  return loss, (logits, labels, log_sum)


def _cross_entropy_backward(saved: Any, g: jax.Array) -> Any:
  logits, labels, log_sum = saved
  p = jnp.exp(logits.astype(F32) - log_sum[..., None])
  one_hot = jnp.arange(logits.shape[-1]) == labels[..., None]
  return ((p - one_hot) * (g / labels.size)).astype(logits.dtype), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


class Block(nn.Module):
  """Pre-norm attention and MLP, as in GPT-2."""

  config: Config

  @nn.compact
  def __call__(self, x):
    c = self.config
    norm = functools.partial(nn.LayerNorm, epsilon=1e-5, dtype=BF16)

    def dense(features: int, name: str, stddev: float = 0.02) -> nn.Dense:
      return nn.Dense(features, dtype=BF16, kernel_init=nn.initializers.normal(stddev), name=name)

    residual = 0.02 / math.sqrt(2 * c.depth)
    h = dense(3 * c.width, "attention_in")(norm(name="attention_norm")(x))
    q, k, v = (part.reshape(*h.shape[:-1], c.heads, -1) for part in jnp.split(h, 3, axis=-1))
    h = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=c.attention)
    x = x + dense(c.width, "attention_out", residual)(h.reshape(x.shape))
    h = dense(4 * c.width, "mlp_in")(norm(name="mlp_norm")(x))
    return x + dense(c.width, "mlp_out", residual)(nn.gelu(h))


class GPT2(nn.Module):
  """GPT-2: learned positions, biases, and one table for embeddings and logits."""

  config: Config

  @nn.compact
  def __call__(self, tokens):
    c = self.config
    table = self.param("tokens", nn.initializers.normal(0.02), (c.vocabulary, c.width))
    positions = self.param("positions", nn.initializers.normal(0.01), (c.length, c.width))
    x = embed(table, tokens) + positions.astype(BF16)
    for i in range(c.depth):
      x = Block(c, name=f"block_{i}")(x)
    x = nn.LayerNorm(epsilon=1e-5, dtype=BF16, name="norm")(x)
    return x @ table.astype(BF16).T


def loss_fn(params: Any, windows: jax.Array, model: nn.Module) -> jax.Array:
  windows = windows.astype(jnp.int32)
  return cross_entropy(model.apply({"params": params}, windows[:, :-1]), windows[:, 1:])


def choose_attention() -> str:
  """Fused attention by cuDNN where it runs, forwards and backwards."""
  if jax.default_backend() != "gpu":
    return "xla"
  q = jnp.ones((1, 1024, 2, 64), BF16)
  attend = lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn").astype(F32).sum()
  try:
    jax.block_until_ready(jax.jit(jax.grad(attend))(q))
  except Exception as e:  # pylint: disable=broad-except
    print(f"attention by XLA, as cuDNN's does not run: {type(e).__name__}: {str(e)[:200]}", flush=True)
    return "xla"
  return "cudnn"


# --- optimizers -----------------------------------------------------------------------------------------------------


class Row(NamedTuple):
  label: str
  dtype: Any  # of the parameters
  options: dict[str, Any] | None  # of olp.adamw; None is optax.adamw


class Phase(NamedTuple):
  name: str
  learning_rate: Any
  b2: float


def _both(rounding: Any) -> dict[str, olp.StateFormat]:
  """The default formats with one rounding: by default mu is rounded to nearest and nu stochastically."""
  return dict(
      mu=olp.StateFormat("float8_e4m3fn", rounding=rounding),
      nu=olp.StateFormat("float8_e4m3fn", transform="sqrt", rounding=rounding),
  )


def _tensor(transform: str | None = None) -> olp.StateFormat:
  return olp.StateFormat("float8_e4m3fn", scaling="tensor", transform=transform)


OPTAX = Row("optax f32", F32, None)
OURS_F32 = Row("ours f32", F32, {})
OURS_BF16 = Row("ours bf16", BF16, {})
STOCHASTIC = Row("ours f32, stochastic", F32, _both("stochastic"))
NEAREST = Row("ours f32, nearest", F32, _both("nearest"))
NO_MASTER = Row("ours bf16, no master", BF16, dict(master=None))
# Run at seed 0, in this order, after everything else at seed 0.
VARIANTS = [
    Row("ours bf16, remainder8", BF16, dict(master="remainder8")),
    Row("ours bf16, float16 master", BF16, dict(master="float16")),
    Row("ours f32, fp8 per tensor", F32, dict(mu=_tensor(), nu=_tensor("sqrt"))),
    STOCHASTIC,
    NEAREST,
    Row("ours f32, float16 nu", F32, dict(nu="float16")),
    Row("ours f32, fp8 per tensor, nu itself", F32, dict(mu=_tensor(), nu=_tensor())),
]


def make_tx(row: Row, phase: Phase) -> optax.GradientTransformationExtraArgs:
  matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
  args = dict(learning_rate=phase.learning_rate, b1=0.9, b2=phase.b2, eps=1e-8, weight_decay=0.1, mask=matrices)
  if row.options is None:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(**args))
  return olp.adamw(**args, max_grad_norm=1.0, **row.options)


def apply_gradients(row: Row, tx: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
  if row.options is not None:
    return olp.apply_gradients(tx, grads, state, params)
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def begin(row: Row, tx: Any, weights: Any) -> tuple[Any, Any]:
  """Parameters of the row's dtype, and the state; bits that parameters cannot hold go to the masters."""
  params = jax.tree.map(lambda w: w.astype(row.dtype), weights)
  state = tx.init(params)
  if row.options is not None and row.dtype != F32:
    params, state = olp.with_master_params(state, params, weights)
  return params, state


def copy(tree: Any) -> Any:
  """So that the copy can be donated."""
  return jax.tree.map(jnp.copy, tree)


def kernel_of(row: Row, compiled: Any) -> str:
  """Which implementation a compiled program calls.

  Raises:
    RuntimeError: if it is not the GPU's kernel on a GPU.
  """
  if row.options is None:
    return "optax"
  text = compiled.as_text()
  name = next((name for name in ("cuda", "cpu") if f"optax_lowprec_{name}_step" in text), "jnp")
  if jax.default_backend() == "gpu" and name != "cuda":
    raise RuntimeError(f"{row.label} was compiled with {name}, not cuda: {olp.available_implementations()}")
  return name


# --- programs -------------------------------------------------------------------------------------------------------


class Carry(NamedTuple):
  """What a run keeps on the device beside parameters and state."""

  step: jax.Array
  seed: jax.Array  # of the batches
  losses: jax.Array  # of every step


class Programs:
  """Compiles in threads, so that the device works on one row while the next ones are compiled."""

  def __init__(self, config: Config, tokens: jax.Array, steps: int):
    self.config = config
    self.model = GPT2(config)
    self.tokens = tokens
    self.carry = Carry(jnp.int32(0), jnp.uint32(0), jnp.zeros((steps,), F32))
    self.weights = jax.eval_shape(self._init, jnp.uint32(0))
    self._pool = concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2))
    self._futures: dict[Any, concurrent.futures.Future[Any]] = {}

  def _init(self, seed: jax.Array) -> Any:
    tokens = jnp.zeros((1, self.config.length), jnp.int32)
    return self.model.init(jax.random.key(seed), tokens)["params"]

  def _gradients(self, params: Any, carry: Carry, tokens: jax.Array) -> tuple[Any, Carry]:
    c = self.config
    key = jax.random.fold_in(jax.random.key(carry.seed), carry.step)
    starts = jax.random.randint(key, (c.batch,), 0, tokens.size - c.length)
    windows = jax.vmap(lambda i: lax.dynamic_slice(tokens, (i,), (c.length + 1,)))(starts)
    loss, grads = jax.value_and_grad(loss_fn)(params, windows, self.model)
    return grads, carry._replace(step=carry.step + 1, losses=carry.losses.at[carry.step].set(loss))

  def _shapes(self, row: Row, phase: Phase) -> tuple[Any, Any]:
    return jax.eval_shape(functools.partial(begin, row, make_tx(row, phase)), self.weights)

  def _params(self, dtype: Any) -> Any:
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, dtype), self.weights)

  def submit(self, key: Any, build: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """``key`` is looked up by the main thread alone."""
    if key not in self._futures:
      self._futures[key] = self._pool.submit(build)
    return self._futures[key]

  def init(self) -> concurrent.futures.Future[Any]:
    return self.submit("init", lambda: jax.jit(self._init).lower(self.carry.seed).compile())

  def begin(self, row: Row, phase: Phase) -> concurrent.futures.Future[Any]:
    run = functools.partial(begin, row, make_tx(row, phase))
    return self.submit(("begin", row.label, phase.name), lambda: jax.jit(run).lower(self.weights).compile())

  def gradients(self, dtype: Any) -> concurrent.futures.Future[Any]:
    build = lambda: (
        jax.jit(self._gradients, donate_argnums=1).lower(self._params(dtype), self.carry, self.tokens).compile()
    )
    return self.submit(("gradients", dtype), build)

  def apply(self, row: Row, phase: Phase) -> concurrent.futures.Future[Any]:
    run = functools.partial(apply_gradients, row, make_tx(row, phase))

    def build() -> Any:
      params, state = self._shapes(row, phase)
      return jax.jit(run, donate_argnums=(1, 2)).lower(params, state, params).compile()

    return self.submit(("apply", row.label, phase.name), build)

  def evaluate(self, dtype: Any, windows: jax.Array) -> concurrent.futures.Future[Any]:
    run = lambda params, windows: lax.map(lambda w: loss_fn(params, w, self.model), windows).mean()
    return self.submit(("evaluate", dtype), lambda: jax.jit(run).lower(self._params(dtype), windows).compile())

  def scan(self, row: Row, phase: Phase, steps: int) -> concurrent.futures.Future[Any]:
    """Whole steps in one program, and the seconds that it took to compile."""
    tx = make_tx(row, phase)

    def run(params: Any, state: Any, carry: Carry, tokens: jax.Array) -> Any:
      def step(c: Any, _: Any) -> Any:
        params, state, carry = c
        grads, carry = self._gradients(params, carry, tokens)
        return (*apply_gradients(row, tx, grads, state, params), carry), None

      return lax.scan(step, (params, state, carry), length=steps)[0]

    def build() -> Any:
      start = time.perf_counter()
      lowered = jax.jit(run, donate_argnums=(0, 1, 2)).lower(*self._shapes(row, phase), self.carry, self.tokens)
      return lowered.compile(), time.perf_counter() - start

    return self.submit(("scan", row.label), build)

  def wait(self) -> None:
    """Until all that was begun is compiled."""
    concurrent.futures.wait(self._futures.values())

  def close(self) -> None:
    self._pool.shutdown(cancel_futures=True)


# --- runs -----------------------------------------------------------------------------------------------------------


class Benchmark:
  """The parts, what they have found so far, and the time that is left."""

  def __init__(self, args: argparse.Namespace, config: Config, text: tuple[np.ndarray, np.ndarray, dict[str, Any]]):
    self.args = args
    self.started = args.started
    training, evaluation, about = text
    n, length = config.eval_sequences, config.length
    if len(evaluation) <= length or len(training) <= length:
      raise SystemExit(f"{len(training)} and {len(evaluation)} tokens are too few for sequences of {length}")
    starts = np.linspace(0, len(evaluation) - length - 1, n).astype(np.int64)
    windows = evaluation[starts[:, None] + np.arange(length + 1)].reshape(-1, config.batch, length + 1)
    self.held_out = jnp.asarray(windows)
    self.longest = max(args.steps, args.finetune_steps, args.convert_steps)
    self.programs = Programs(config, jnp.asarray(training), self.longest)
    self.n_params = sum(math.prod(w.shape) for w in jax.tree.leaves(self.programs.weights))
    lr, floor = args.lr, 0.1 * args.lr
    cosine = lambda steps: optax.warmup_cosine_decay_schedule(0.0, lr, max(1, min(200, steps // 10)), steps, floor)
    self.main = Phase("train", cosine(args.steps), 0.95)
    self.finetune_phase = Phase("finetune", args.finetune_lr, 0.999)
    self.convert_phase = Phase("convert", cosine(2 * args.convert_steps), 0.95)
    self.trained: Any = None  # weights of the first run of optax.adamw
    self.ms_per_step = 12.0 if jax.default_backend() == "gpu" else 0.0
    self.eval_seconds = 0.0
    settings = config._asdict() | {
        k: getattr(args, k) for k in ("steps", "finetune_steps", "convert_steps", "eval_every", "lr", "finetune_lr")
    }
    settings |= {"parameters": self.n_params, "leaves": len(jax.tree.leaves(self.programs.weights))}
    self.results: dict[str, Any] = {"settings": settings, "corpus": about, "not_run": [], "failed": []}
    self.name = f"train_gpt2_{jax.default_backend()}"
    if args.resume:
      self._resume()

  def _resume(self) -> None:
    path = pathlib.Path(self.args.out or common.RESULTS) / f"{self.name}.json"
    if not path.exists():
      return
    old = json.loads(path.read_text())["rows"]
    same = json.loads(json.dumps({k: self.results[k] for k in ("settings", "corpus")}))
    if any(old[k] != v for k, v in same.items()):
      raise SystemExit(f"{path} was made with other settings or another text: {old['settings']}, {old['corpus']}")
    self.results |= {k: v for k, v in old.items() if k not in ("not_run", "failed")}

  def write(self) -> None:
    common.write(self.name, self.results, self.args.out)

  def log(self, text: str) -> None:
    print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", flush=True)

  def wanted(self, row: Row) -> bool:
    names = [w.strip() for w in self.args.rows.split(";") if w.strip()]
    return not names or row.label in names

  def is_done(self, part: str, row: Row, seed: int) -> bool:
    return any(r["row"] == row.label and r["seed"] == seed for r in self.results.get(part, []))

  def has_time(self, what: str, steps: int, more: float = 2) -> bool:
    """Whether so many steps still fit into the budget; writes down what does not."""
    evaluations = steps / self.args.eval_every + 1
    need = steps * self.ms_per_step / 1e3 + evaluations * self.eval_seconds + more
    left = self.args.budget - (time.perf_counter() - self.started)
    if need <= left:
      self.log(f"{what}: about {need:.0f} s")
      return True
    self.log(f"{what}: NOT RUN, needs {need:.0f} s of the {left:.0f} s that are left")
    self.results["not_run"].append(what)
    self.write()
    return False

  def evaluate(self, dtype: Any, params: Any) -> float:
    program = self.programs.evaluate(dtype, self.held_out).result()
    start = time.perf_counter()
    loss = float(program(params, self.held_out))
    self.eval_seconds = time.perf_counter() - start
    return loss

  def start(self, row: Row, phase: Phase, weights: Any) -> tuple[Any, Any]:
    return self.programs.begin(row, phase).result()(copy(weights))

  def weights(self, seed: int) -> Any:
    return self.programs.init().result()(jnp.uint32(seed))

  def steps(
      self, row: Row, phase: Phase, params: Any, state: Any, data_seed: int, steps: int
  ) -> tuple[Any, Any, dict[str, Any]]:
    """Trains, and evaluates now and then; ``params`` and ``state`` are donated."""
    gradients, apply = self.programs.gradients(row.dtype).result(), self.programs.apply(row, phase).result()
    kernel = kernel_of(row, apply)
    self.programs.evaluate(row.dtype, self.held_out).result()
    carry = Carry(jnp.int32(0), jnp.uint32(data_seed), jnp.zeros((self.longest,), F32))
    size = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    evals, times, done = [], [], 0
    first = time.perf_counter()
    while done < steps:
      n = min(self.args.eval_every, steps - done)
      start = time.perf_counter()
      for _ in range(n):
        grads, carry = gradients(params, carry, self.programs.tokens)
        params, state = apply(grads, state, params)
        del grads
      jax.block_until_ready((params, state, carry))
      times.append((time.perf_counter() - start) / n * 1e3)
      done += n
      evals.append([done, self.evaluate(row.dtype, params)])
    losses = np.asarray(carry.losses)[:steps]
    self.ms_per_step = statistics.median(times)
    every = self.args.loss_every
    record = {
        "row": row.label,
        "params": jnp.dtype(row.dtype).name,
        "kernel": kernel,
        "eval_loss": evals[-1][1],
        "ms_per_step": round(self.ms_per_step, 3),
        "bytes_per_param": round(size / self.n_params, 3),
        "seconds": round(time.perf_counter() - first, 1),
        "steps": steps,
        "evals": evals,
        # Means over as many steps as lie between two points.
        "losses": [[i + every, float(losses[i : i + every].mean())] for i in range(0, steps - every + 1, every)],
    }
    self.log(f"  {row.label} ({kernel}): evaluation loss {evals[-1][1]:.4f}, {self.ms_per_step:.2f} ms a step")
    return params, state, record

  # --- parts

  def prepare(self, jobs: Sequence[tuple[str, Any]]) -> None:
    """Begins to compile, in the order of need."""
    programs, args = self.programs, self.args
    rows: list[tuple[Row, Phase]] = []
    parts = {part for part, _ in jobs}
    self.programs.init()
    if "time" in parts and "time" not in self.results:
      for row in self.time_rows():
        programs.scan(row, self.main, args.time_steps)
        programs.begin(row, self.main)
    for part, job in jobs:
      if part == "train" and not self.is_done("train", *job):
        rows.append((job[0], self.main))
      elif part == "finetune":
        rows += [(OPTAX, self.main), *((row, self.finetune_phase) for row, _ in self.finetune_rows())]
      elif part == "convert":
        rows += [(row, self.convert_phase) for row in (OPTAX, OURS_F32, OURS_BF16)]
        programs.submit("convert", self.compile_conversions)
    for row, phase in rows:
      programs.gradients(row.dtype)
      programs.evaluate(row.dtype, self.held_out)
      programs.apply(row, phase)
      programs.begin(row, phase)

  def run(self, jobs: Sequence[tuple[str, Any]]) -> None:
    try:
      if jobs and jobs[0][0] == "time" and "time" not in self.results:
        self.prepare(jobs[:4])
        self.programs.wait()
        self.time()
      if self.args.budget > time.perf_counter() - self.started:
        self.prepare(jobs)
      for part, job in jobs:
        self.run_job(part, job)
    finally:
      self.programs.close()

  def run_job(self, part: str, job: Any) -> None:
    """What fails is written down, and the rest still runs."""
    try:
      if part == "train":
        self.train(*job)
      elif part != "time":
        getattr(self, part)()
    except Exception as e:  # pylint: disable=broad-except
      traceback.print_exc()
      what = f"{part} {job[0].label}, seed {job[1]}" if job else part
      self.results["failed"].append(f"{what}: {type(e).__name__}: {str(e)[:300]}")
      self.write()

  def train(self, row: Row, seed: int) -> None:
    if self.is_done("train", row, seed) or not self.has_time(f"train {row.label}, seed {seed}", self.args.steps):
      return
    params, state = self.start(row, self.main, self.weights(seed))
    params, state, record = self.steps(row, self.main, params, state, seed, self.args.steps)
    if row == OPTAX and self.trained is None:
      self.trained = params
    self.results.setdefault("train", []).append(record | {"seed": seed})
    self.write()

  def finetune_rows(self) -> list[tuple[Row, int]]:
    rows = [*((OPTAX, seed) for seed in self.args.seeds), (OURS_F32, 0), (OURS_BF16, 0), (NEAREST, 0)]
    return [(row, seed) for row, seed in [*rows, (NO_MASTER, 0)] if self.wanted(row)]

  def finetune(self) -> None:
    rows = [(row, seed) for row, seed in self.finetune_rows() if not self.is_done("finetune", row, seed)]
    if rows and self.trained is None:
      # A resumed run has the numbers of this one, but not its weights.
      if not self.has_time("train optax f32, seed 0, for fine-tuning", self.args.steps):
        return
      params, state = self.start(OPTAX, self.main, self.weights(0))
      self.trained, state, _ = self.steps(OPTAX, self.main, params, state, 0, self.args.steps)
      del params, state
    for row, seed in rows:
      if self.has_time(f"finetune {row.label}, seed {seed}", self.args.finetune_steps):
        before = self.evaluate(F32, self.trained)
        params, state = self.start(row, self.finetune_phase, self.trained)
        _, _, record = self.steps(row, self.finetune_phase, params, state, 200 + seed, self.args.finetune_steps)
        self.results.setdefault("finetune", []).append(record | {"seed": seed, "eval_before": before})
        self.write()

  def compile_conversions(self) -> None:
    """They compile for every shape, so once in the background, on zeros."""
    zeros = lambda dtype: jax.tree.map(lambda w: jnp.zeros(w.shape, dtype), self.programs.weights)
    optax_tx = make_tx(OPTAX, self.convert_phase)
    for row in (OURS_F32, OURS_BF16):
      from_optax(row, self.convert_phase, optax_tx.init(zeros(F32)), zeros(F32))
      tx, params = make_tx(row, self.convert_phase), zeros(row.dtype)
      there_and_back(row, self.convert_phase, params, tx.init(params))

  def convert(self) -> None:
    """Half a run in Optax; the other half in Optax on three seeds' batches, and in ours from Optax's state."""
    phase, half = self.convert_phase, self.args.convert_steps
    done = self.results.setdefault("convert", [])
    if done or not self.has_time("convert", half * (len(self.args.seeds) + 3), 10):
      return
    params, state = self.start(OPTAX, phase, self.weights(0))
    params, state, record = self.steps(OPTAX, phase, params, state, 100, half)
    done.append(record | {"seed": 0, "part": "first half"})
    weights, optax_state = params, state
    for seed in self.args.seeds:
      params, state, record = self.steps(OPTAX, phase, copy(weights), copy(optax_state), 101 + seed, half)
      done.append(record | {"seed": seed, "part": "second half"})
      del params, state
      self.write()
    self.programs.submit("convert", self.compile_conversions).result()
    seed = self.args.seeds[0]
    for row in (OURS_F32, OURS_BF16):
      start = time.perf_counter()
      params, state = jax.block_until_ready(from_optax(row, phase, optax_state, weights))
      seconds = time.perf_counter() - start
      params, state, record = self.steps(row, phase, params, state, 101 + seed, half)
      start = time.perf_counter()
      back = jax.block_until_ready(there_and_back(row, phase, params, state))
      record |= {"seed": seed, "part": "second half", "from_optax_s": round(seconds, 2)}
      record |= {"there_and_back_s": round(time.perf_counter() - start, 2)}
      record |= {"there_and_back_equal": same_bits((params, state), back)}
      self.log(f"  {row.label}: our state to Optax and back: equal bit for bit: {record['there_and_back_equal']}")
      done.append(record)
      del params, state, back
      self.write()

  def time_rows(self) -> list[Row]:
    # The least memory first: the peak is the process's, and only ever rises.
    return [row for row in (OURS_BF16, OURS_F32, OPTAX) if self.wanted(row)]

  def time(self) -> None:
    """While nothing is compiled: tuning what is compiled uses the device and its memory."""
    programs, n = self.programs, self.args.time_steps
    compiled = [(row, *programs.scan(row, self.main, n).result()) for row in self.time_rows()]
    self.log("time: compiled")
    self.results["time"] = []
    for row, program, compile_seconds in compiled:
      before = peak_bytes()
      carry = Carry(jnp.int32(0), jnp.uint32(0), jnp.zeros((self.longest,), F32))
      box = [(*self.start(row, self.main, self.weights(0)), carry)]
      del carry

      def run(program: Any = program, box: list[Any] = box) -> Any:
        box[0] = program(*box[0], programs.tokens)
        return box[0]

      jax.block_until_ready(run())
      seconds, spread = common.median_time(run, 5)
      after = peak_bytes()
      analysis = program.memory_analysis()
      parts = {k: getattr(analysis, f"{k}_size_in_bytes") for k in ("argument", "output", "temp", "alias")}
      record: dict[str, Any] = {
          "row": row.label,
          "kernel": kernel_of(row, program),
          "ms_per_step": round(seconds / n * 1e3, 3),
          "spread_ms": round(spread / n * 1e3, 3),
          "tokens_per_s": round(n * self.programs.config.batch * self.programs.config.length / seconds),
          "peak_MB": after and round(after / 1e6, 1),
          "peak_before_MB": before and round(before / 1e6, 1),
          # Where the peak did not rise, it is another row's or the compiler's: this row's is at most that.
          "peak_is_this_row": after and after > before,
          "xla_MB": round((parts["argument"] + parts["output"] + parts["temp"] - parts["alias"]) / 1e6, 1),
          "xla_temp_MB": round(parts["temp"] / 1e6, 1),
          "compile_s": round(compile_seconds, 1),
      }
      box.clear()
      self.ms_per_step = record["ms_per_step"]
      self.results["time"].append(record)
      self.log(f"  {record}")
      self.write()

  def digits(self) -> None:
    if "digits" in self.results or not self.has_time("digits", 0, 20):
      return
    try:
      from sklearn import datasets  # pylint: disable=import-outside-toplevel
    except ImportError as e:
      self.log(f"digits: NOT RUN, as they come with scikit-learn: {e}")
      self.results["not_run"].append(f"digits: {e}")
      self.write()
      return
    images, labels = datasets.load_digits(return_X_y=True)
    self.results["digits"] = digits_rows(images, labels, self.args.digits_steps, len(self.args.seeds))
    for record in self.results["digits"]:
      self.log(f"  {record}")
    self.write()


def from_optax(row: Row, phase: Phase, optax_state: Any, weights: Any) -> tuple[Any, Any]:
  """Parameters and state of ours that go on where Optax's are."""
  params = jax.tree.map(lambda w: jnp.array(w, row.dtype, copy=True), weights)
  # Copied, as what stays in float32 is handed on, and donated by the next step.
  state = checkpoint.from_optax(copy(optax_state), params, make_tx(row, phase))
  return olp.with_master_params(state, params, copy(weights))


def there_and_back(row: Row, phase: Phase, params: Any, state: Any) -> tuple[Any, Any]:
  there = checkpoint.to_optax(state, params, make_tx(OPTAX, phase))
  masters = olp.master_params(state, params)
  narrow = jax.tree.map(lambda w: w.astype(row.dtype), masters)
  return olp.with_master_params(checkpoint.from_optax(there, narrow, make_tx(row, phase)), narrow, masters)


def same_bits(a: Any, b: Any) -> bool:
  bits = lambda x: np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)
  same = lambda x, y: x.dtype == y.dtype and x.shape == y.shape and np.array_equal(bits(x), bits(y))
  return bool(jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(same, a, b)))


def peak_bytes() -> int | None:
  """The most device memory that this process ever used, where the platform counts it."""
  stats = jax.devices()[0].memory_stats()
  return stats.get("peak_bytes_in_use") if stats else None


# --- digits ---------------------------------------------------------------------------------------------------------


class MLP(nn.Module):

  @nn.compact
  def __call__(self, x):
    for _ in range(2):
      x = nn.relu(nn.Dense(512, dtype=BF16)(x))
    return nn.Dense(10, dtype=BF16)(x).astype(F32)


def digits_rows(images: np.ndarray, labels: np.ndarray, steps: int, seeds: int) -> list[dict[str, Any]]:
  order = np.random.default_rng(0).permutation(len(images))
  x = jnp.asarray(images[order] / 16.0, F32)
  y = jnp.asarray(labels[order], jnp.int32)
  split = len(order) * 4 // 5
  model = MLP()
  schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, max(1, steps // 20), steps)
  phase = Phase("digits", schedule, 0.999)

  def run(seed: jax.Array, row: Row) -> dict[str, jax.Array]:
    tx = make_tx(row, phase)
    key = jax.random.key(seed)
    params, state = begin(row, tx, model.init(key, x[:1])["params"])

    def loss_of(params: Any, i: jax.Array) -> Any:
      logits = model.apply({"params": params}, x[i])
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, y[i])
      return losses.mean(), (logits.argmax(-1) == y[i]).mean()

    def step(c: Any, n: jax.Array) -> Any:
      params, state = c
      i = jax.random.randint(jax.random.fold_in(key, n), (64,), 0, split)
      grads, _ = jax.grad(loss_of, has_aux=True)(params, i)
      return apply_gradients(row, tx, grads, state, params), None

    (params, _), _ = lax.scan(step, (params, state), jnp.arange(steps))
    loss, accuracy = loss_of(params, jnp.arange(split, len(order)))
    return {"test_loss": loss, "test_accuracy": accuracy, "train_loss": loss_of(params, jnp.arange(split))[0]}

  results: list[dict[str, Any]] = []
  # With 256 all leaves but the last bias are quantized.
  quantize = dict(min_quantized_size=256)
  for row in (OPTAX, Row("ours f32", F32, quantize), Row("ours bf16", BF16, quantize)):
    program = jax.jit(functools.partial(run, row=row)).lower(jnp.uint32(0)).compile()
    found = [jax.tree.map(float, program(jnp.uint32(seed))) for seed in range(seeds)]
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x[:1])["params"])
    shapes = jax.tree.map(lambda w, row=row: jax.ShapeDtypeStruct(w.shape, row.dtype), shapes)
    record: dict[str, Any] = {"row": row.label, "kernel": kernel_of(row, program), "steps": steps, "seeds": seeds}
    record["bytes_per_param"] = round(olp.memory_report(make_tx(row, phase), shapes).bytes_per_parameter, 3)
    for name in ("test_loss", "test_accuracy", "train_loss"):
      values = [f[name] for f in found]
      record[name] = [round(v, 5) for v in values]
      record[f"{name}_mean"] = round(statistics.fmean(values), 5)
      record[f"{name}_std"] = round(statistics.stdev(values), 5) if seeds > 1 else None
    results.append(record)
  return results


# --- results --------------------------------------------------------------------------------------------------------


def against_f32(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Each row's final loss beside the float32 runs' mean, in units of their standard deviation."""
  base = {r["seed"]: r["eval_loss"] for r in records if r["row"] == OPTAX.label}
  mean = statistics.fmean(base.values()) if base else math.nan
  std = statistics.stdev(base.values()) if len(base) > 1 else math.nan
  out = []
  for r in records:
    out.append({
        "row": r["row"],
        "parameters": r["params"],
        "bytes": f"{r['bytes_per_param']:.2f}",
        "seed": r["seed"],
        "evaluation loss": f"{r['eval_loss']:.4f}",
        "less f32's mean": f"{r['eval_loss'] - mean:+.4f}",
        "in its deviations": f"{(r['eval_loss'] - mean) / std:+.2f}" if std > 0 else "",
        "less f32, same seed": f"{r['eval_loss'] - base[r['seed']]:+.4f}" if r["seed"] in base else "",
        "ms a step": f"{r['ms_per_step']:.2f}",
    })  # fmt: skip
  if std > 0:
    print(f"float32: mean {mean:.5f}, standard deviation {std:.5f} of {len(base)} seeds")
  return out


def markdown(rows: list[dict[str, Any]]) -> str:
  if not rows:
    return "(none)"
  columns = list(rows[0])
  lines = [columns, ["---"] * len(columns), *([str(r.get(c, "")) for c in columns] for r in rows)]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def print_results(results: dict[str, Any]) -> None:
  about, s = results["corpus"], results["settings"]
  print(f"\n{s['parameters']:,} parameters in {s['leaves']} leaves; {s['batch']} x {s['length']} tokens a step")
  print(f"text: {about['training']['tokens']:,} tokens for training, {about['evaluation']['tokens']:,} for evaluation")
  for part in ("train", "finetune"):
    if results.get(part):
      print(f"\n{part}, {results[part][0]['steps']} steps")
      print(markdown(against_f32(results[part])))
  if results.get("convert"):
    print("\nconvert: the second half")
    print(markdown(against_f32([r for r in results["convert"] if r["part"] == "second half"])))
    for r in results["convert"]:
      if "there_and_back_equal" in r:
        print(f"{r['row']}: to Optax and back {'equal' if r['there_and_back_equal'] else 'DIFFERENT'} bit for bit")
  for part in ("time", "digits"):
    if results.get(part):
      print(f"\n{part}")
      print(markdown([{k: v for k, v in r.items() if not isinstance(v, list)} for r in results[part]]))
  for key, name in (("not_run", "not run"), ("failed", "FAILED")):
    if results[key]:
      print(f"\n{name}: " + "; ".join(results[key]))


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
  """Training losses; and evaluation losses less the mean of float32's, over the spread of float32's seeds."""
  from matplotlib import figure  # pylint: disable=import-outside-toplevel

  records = results["train"]
  base = [r for r in records if r["row"] == OPTAX.label]
  fig = figure.Figure(figsize=(13, 5.5), layout="constrained")
  left, right = fig.subplots(1, 2)
  names = list(dict.fromkeys(r["row"] for r in records))
  colors = {name: f"C{i % 10}" for i, name in enumerate(n for n in names if n != OPTAX.label)} | {OPTAX.label: "k"}
  for r in records:
    if r["seed"] == base[0]["seed"]:
      steps, losses = zip(*r["losses"], strict=True)
      style = "-" if r["row"] == OPTAX.label else "--"
      left.plot(steps, losses, style, color=colors[r["row"]], linewidth=1, label=r["row"])
  left.set_xlabel("step")
  left.set_ylabel("training loss (nats a token)")
  left.legend(fontsize=8)
  steps = [n for n, _ in base[0]["evals"]]
  each = np.asarray([[loss for _, loss in r["evals"]] for r in base])
  mean = each.mean(0)
  if len(base) > 1:
    deviation = each.std(0, ddof=1)
    right.fill_between(steps, -2 * deviation, 2 * deviation, color="k", alpha=0.12, label="2 deviations of f32's seeds")
  labelled = set()
  for r in records:
    losses = np.asarray([loss for _, loss in r["evals"]])
    label = None if r["row"] in labelled else r["row"]
    labelled.add(r["row"])
    right.plot(steps, losses - mean, marker=".", color=colors[r["row"]], linewidth=1, label=label)
  # The formats that fail would press all others into one line.
  last = each[:, -1]
  near = max(0.02, 6 * float(last.std()))
  right.set_ylim(-near, near)
  right.axhline(0, color="k", linewidth=0.5)
  right.set_xlabel("step")
  right.set_ylabel("evaluation loss less the mean of f32's seeds")
  right.legend(fontsize=8)
  for axes in (left, right):
    axes.grid(alpha=0.3)
  fig.suptitle(f"GPT-2, {results['settings']['parameters'] / 1e6:.1f}M parameters, on Python source code")
  path.parent.mkdir(parents=True, exist_ok=True)
  fig.savefig(path, dpi=120)
  print(f"plot: {path}")


# --- command --------------------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  add = parser.add_argument
  add("--out", default=None, help="folder of the result file")
  add("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
  add("--rows", default="", help="only these rows of time, train and finetune, separated by ;")
  add("--seeds", default="0,1,2", help="of optax.adamw and of our defaults; other rows run at the first")
  add("--steps", type=int, default=None, help="of a training run (2000)")
  add("--finetune-steps", type=int, default=None, help="(500)")
  add("--convert-steps", type=int, default=None, help="of each half (500)")
  add("--time-steps", type=int, default=None, help="inside the program that is timed (50)")
  add("--digits-steps", type=int, default=None, help="(1000)")
  add("--eval-every", type=int, default=None, help="steps between evaluations (250)")
  add("--loss-every", type=int, default=None, help="steps between points of the loss curve (20)")
  add("--batch", type=int, default=None, help="sequences of a batch (4)")
  add("--length", type=int, default=None, help="tokens of a sequence (1024)")
  add("--lr", type=float, default=6e-4, help="peak learning rate")
  add("--finetune-lr", type=float, default=1e-5)
  add("--budget", type=float, default=math.inf, help="seconds; what would not end in time is not begun")
  add("--corpus", default=None, help="an npz file of corpus.py; made there if it is missing")
  add("--resume", action="store_true", help="keep the rows that the result file has")
  add("--attention", default=None, choices=("cudnn", "xla"))
  add("--tiny", action="store_true", help="a tiny model and a few steps: to see that everything runs")
  add("--plot", default=None, metavar="PNG", help="only draw the result file, and print its tables")
  args = parser.parse_args(argv)
  full = dict(steps=2000, finetune_steps=500, convert_steps=500, time_steps=50, digits_steps=1000, eval_every=250)
  tiny = dict(steps=6, finetune_steps=4, convert_steps=4, time_steps=2, digits_steps=20, eval_every=3)
  for name, value in ((tiny if args.tiny else full) | {"loss_every": 2 if args.tiny else 20}).items():
    if getattr(args, name) is None:
      setattr(args, name, value)
  args.seeds = [int(s) for s in args.seeds.split(",")]
  args.parts = args.parts.split(",")
  if not set(args.parts) <= set(PARTS):
    parser.error(f"--parts must be some of {', '.join(PARTS)}")
  labels = {row.label for row in (OPTAX, OURS_F32, OURS_BF16, NO_MASTER, *VARIANTS)}
  if unknown := {w.strip() for w in args.rows.split(";") if w.strip()} - labels:
    parser.error(f"no rows {sorted(unknown)}; there are {sorted(labels)}")
  return args


def plan(args: argparse.Namespace) -> list[tuple[str, Any]]:
  """The most important first, as time may run out."""
  names = [w.strip() for w in args.rows.split(";") if w.strip()]
  first, *others = args.seeds
  train = [(row, first) for row in (OPTAX, OURS_F32, OURS_BF16)] + [(OPTAX, seed) for seed in others]
  more = [(row, first) for row in VARIANTS] + [(row, seed) for seed in others for row in (OURS_F32, OURS_BF16)]
  jobs: list[tuple[str, Any]] = [("time", None)]
  jobs += [("train", job) for job in train]
  jobs += [(part, None) for part in ("finetune", "convert", "digits")]
  jobs += [("train", job) for job in more]
  if names:
    jobs = [(part, job) for part, job in jobs if part != "train" or job[0].label in names]
  return [(part, job) for part, job in jobs if part in args.parts]


def main(argv: Sequence[str] | None = None) -> None:
  started = time.perf_counter()
  args = parse_args(argv)
  args.started = started
  if args.plot:
    folder = pathlib.Path(args.out) if args.out else common.RESULTS
    found = sorted(folder.glob("train_gpt2_*.json"))
    if not found:
      raise SystemExit(f"no train_gpt2_*.json in {folder}")
    path = next((p for p in found if p.stem.endswith("_gpu")), found[0])
    results = json.loads(path.read_text())["rows"]
    print_results(results)
    plot(results, pathlib.Path(args.plot))
    return
  config = TINY if args.tiny else Config()
  if args.tiny:
    # Nearly all of the time would be LLVM's.
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ.setdefault("XLA_FLAGS", quick)
  sizes = {k: getattr(args, k) for k in ("batch", "length") if getattr(args, k) is not None}
  config = config._replace(**sizes)
  if config.eval_sequences % config.batch:
    raise SystemExit(f"the batch must divide {config.eval_sequences}, the sequences for evaluation")
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(args.corpus or f"{folder}/corpus.npz")
    maker = None
    if not path.exists():
      # In a process of its own, as it forks: beside jax's threads that is not safe.
      flags = ["--vocabulary", str(config.vocabulary), "--megabytes", str(config.megabytes), "--out", str(path)]
      flags += ["--processes", "1"] if args.tiny else []
      maker = subprocess.Popen([sys.executable, corpus.__file__, *flags], stdout=subprocess.DEVNULL)
    config = config._replace(attention=args.attention or choose_attention())
    if maker and maker.wait():
      raise SystemExit("corpus.py failed")
    text = corpus.load(path)
  # Threads that trace hold the interpreter's lock for this long before the one that feeds the device gets it.
  sys.setswitchinterval(5e-4)
  benchmark = Benchmark(args, config, text)
  s = benchmark.results["settings"]
  device, kernels = jax.devices()[0].device_kind, ", ".join(olp.available_implementations())
  benchmark.log(f"{s['parameters']:,} parameters in {s['leaves']} leaves on {device}; implementations: {kernels}")
  benchmark.log(f"attention by {config.attention}")
  benchmark.log(f"text: {text[2]}")
  benchmark.run(plan(args))
  benchmark.write()
  print_results(benchmark.results)
  benchmark.log(f"done; written to {benchmark.name}.json")
  if benchmark.results["failed"]:
    raise SystemExit("something failed")


if __name__ == "__main__":
  main()
