"""Device memory that saving, restoring and converting take beside what the live state needs.

Each operation runs in a process of its own, since a device's peak cannot be reset, on parameters and a state that were
put on the device leaf by leaf. ``over`` is the peak during the operation less the bytes in use before or after it,
whichever is more: those of the live arrays, and what the allocator rounds them up by (some percent; ``live_*`` are the
arrays alone). A figure counts only if preparation did not reach further than that: else it would hide the peak.

    python benchmarks/checkpoint_memory.py                 # on a GPU: 1.1B parameters
    python benchmarks/checkpoint_memory.py --tree many     # on CPUs: runs, measures nothing
"""

import argparse
from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import trees

import optax_lowprec as olp
from optax_lowprec import checkpoint

STEP = 500
FORMATS = {"bf16": jnp.bfloat16, "f32": jnp.float32}  # of the parameters; the state's are the defaults
ALLOCATION = 256  # what the device rounds an array's bytes up to
SLACK = 2**20  # bytes that are in use without any array
Tree = Any


class Job:
  """What every operation works on: the model, our optimizer, Optax's, and values to fill arrays with."""

  def __init__(self, tree: str, formats: str, directory: str):
    self.directory = directory
    shapes = trees.TREES[tree]()
    self.largest = max(math.prod(s) for s in shapes)
    self.shapes = {f"leaf{i}": jax.ShapeDtypeStruct(s, FORMATS[formats]) for i, s in enumerate(shapes)}
    self.tx = olp.adamw(1e-3)
    self.wide = olp.adamw(1e-3, mu="float32", nu="float32")
    rng = np.random.default_rng(0)
    self._values = np.square(rng.normal(size=2**16)).astype(np.float32)
    self._repeated: dict[Any, np.ndarray] = {}  # to the largest leaf's size, by dtype

  def host(self, x: Any) -> np.ndarray:
    """Positive values of a shape and dtype; arrays of one dtype share their memory."""
    dtype = jnp.dtype(x.dtype)
    if x.shape == ():
      return np.full((), STEP, dtype)
    if dtype not in self._repeated:
      self._repeated[dtype] = np.resize(self._values.astype(dtype), self.largest)
    return self._repeated[dtype][: math.prod(x.shape)].reshape(x.shape)

  def put(self, tree: Tree) -> Tree:
    """Arrays on the device, one after the other."""
    return jax.tree.map(lambda x: jax.block_until_ready(jax.device_put(self.host(x))), tree)

  def params(self) -> Tree:
    return self.put(self.shapes)

  def state(self, tx: optax.GradientTransformation) -> Tree:
    return self.put(jax.eval_shape(tx.init, self.shapes))

  def leaves(self) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    for name, x in self.shapes.items():
      values = self.host(jax.ShapeDtypeStruct(x.shape, jnp.float32))
      yield f"['{name}']", dict(master=values, mu=values, nu=values)

  def optax_state(self, put: Callable[[Any], Any]) -> tuple[optax.GradientTransformation, Tree]:
    wide = {k: jax.ShapeDtypeStruct(x.shape, jnp.float32) for k, x in self.shapes.items()}
    tx = optax.adamw(1e-3)
    return tx, jax.tree.map(put, jax.eval_shape(tx.init, wide))


# An operation prepares, and returns what is to be measured; that returns everything that its caller then holds.
Operation = Callable[[], Any]


def save(job: Job) -> Operation:
  params, state = job.params(), job.state(job.tx)

  def run() -> Any:
    checkpoint.save(os.path.join(job.directory, "saved"), params, state)
    return params, state

  return run


def manager(job: Job) -> Operation:
  import orbax.checkpoint as ocp

  params, state = job.params(), job.state(job.tx)

  def run() -> Any:
    with ocp.CheckpointManager(os.path.join(job.directory, "manager")) as steps:
      steps.save(STEP, args=checkpoint.save_args(params, state))
      steps.wait_until_finished()
    return params, state

  return run


def restore(job: Job) -> Operation:
  def run() -> Any:
    return checkpoint.restore(os.path.join(job.directory, "manager", str(STEP)), job.tx, job.shapes)

  return run


def export_float32(job: Job) -> Operation:
  params, state = job.params(), job.state(job.tx)

  def run() -> Any:
    count = 0
    for _, parts in checkpoint.export_float32(state, params):
      count += sum(x.size for x in parts.values())
    assert count == 3 * sum(x.size for x in jax.tree.leaves(params))
    return params, state

  return run


def import_float32(job: Job) -> Operation:
  return lambda: checkpoint.import_float32(job.leaves(), job.shapes, job.tx, STEP)


def from_optax(job: Job) -> Operation:
  """Moments on the host."""
  params = job.params()
  _, opt_state = job.optax_state(job.host)
  return lambda: (params, checkpoint.from_optax(opt_state, params, job.tx))


def from_optax_donate(job: Job) -> Operation:
  """Moments on the device."""
  params = job.params()
  _, opt_state = job.optax_state(lambda x: job.put(x))
  return lambda: (params, opt_state, checkpoint.from_optax(opt_state, params, job.tx, donate=True))


def to_optax_donate(job: Job) -> Operation:
  params, state = job.params(), job.state(job.tx)
  tx, _ = job.optax_state(lambda x: x)
  return lambda: (params, state, checkpoint.to_optax(state, params, tx, donate=True))


def convert_wider(job: Job) -> Operation:
  params, state = job.params(), job.state(job.tx)
  return lambda: (params, state, checkpoint.convert(state, params, job.tx, job.wide, donate=True))


def convert_narrower(job: Job) -> Operation:
  params, state = job.params(), job.state(job.wide)
  return lambda: (params, state, checkpoint.convert(state, params, job.wide, job.tx, donate=True))


OPERATIONS: dict[str, Callable[[Job], Operation]] = {
    f.__name__: f
    for f in (
        save, manager, restore, export_float32, import_float32, from_optax, from_optax_donate, to_optax_donate,
        convert_wider, convert_narrower,
    )
}  # fmt: skip


def live_bytes(tree: Tree) -> int:
  """What the device arrays of a tree need, each counted once."""
  arrays = {id(x): x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not x.is_deleted()}
  return sum(-(-x.nbytes // ALLOCATION) * ALLOCATION for x in arrays.values())


def memory() -> dict[str, int]:
  return jax.devices()[0].memory_stats() or {}


def child(job: Job, operation: str) -> dict[str, Any]:
  """Runs one operation.

  Returns:
    Seconds; bytes of the live arrays before and after; and where the device counts its memory, bytes in use before and
    after, and the peak so far before and after.
  """
  prepared = OPERATIONS[operation](job)
  before, live_before = memory(), live_bytes(jax.live_arrays())
  start = time.perf_counter()
  held = prepared()
  jax.block_until_ready([x for x in jax.tree.leaves(held) if isinstance(x, jax.Array) and not x.is_deleted()])
  seconds = time.perf_counter() - start
  after = memory()
  row: dict[str, Any] = {
      "seconds": round(seconds, 2),
      "live_before": live_before,
      "live_after": live_bytes(held),
  }
  if after:
    row |= {
        "in_use_before": before["bytes_in_use"],
        "in_use_after": after["bytes_in_use"],
        "peak_before": before["peak_bytes_in_use"],
        "peak": after["peak_bytes_in_use"],
    }
  return row


def judge(row: dict[str, Any], largest: int) -> dict[str, Any]:
  """What a child's figures say.

  Raises:
    RuntimeError: if the preparation's peak may have hidden the operation's.
  """
  used = max(row["in_use_before"], row["in_use_after"])
  if row["peak_before"] > used + SLACK:
    raise RuntimeError(
        f"{row['formats']} {row['operation']}: preparing it took {row['peak_before']:,} bytes, more than the {used:,} "
        "in use, so the peak of the operation is not known"
    )
  return row | {"over": row["peak"] - used, "within_largest_leaf": row["peak"] - used <= 4 * largest}


def run_child(args: argparse.Namespace, formats: str, operation: str, directory: str) -> dict[str, Any]:
  command = [sys.executable, os.path.abspath(__file__), "--tree", args.tree, "--formats", formats, "--child", operation,
             "--directory", directory]  # fmt: skip
  env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=False)
  if done.returncode:
    raise RuntimeError(f"{formats} {operation} ended with {done.returncode}")
  return {"formats": formats, "operation": operation, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tree", default="llama1b", choices=sorted(trees.TREES))
  parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS), help="of the parameters")
  parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=list(OPERATIONS),
                      help="restore needs manager before it")  # fmt: skip
  parser.add_argument("--out", default=None, help="folder of the result file")
  parser.add_argument("--directory", default=None, help="where checkpoints of some GiB are written for the time being")
  parser.add_argument("--jobs", type=int, default=1, help="operations at a time: each has its own process and figures")
  parser.add_argument("--child", choices=list(OPERATIONS), help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    print(json.dumps(child(Job(args.tree, args.formats[0], args.directory), args.child)))
    return
  rows, failed = [], []
  largest = max(math.prod(s) for s in trees.TREES[args.tree]())

  def run(formats: str, operations: list[str], directory: str) -> None:
    for operation in operations:
      try:
        row = run_child(args, formats, operation, directory)
        rows.append(judge(row, largest) if "peak" in row else row)
        print(json.dumps(rows[-1]), flush=True)
      except RuntimeError as e:
        failed.append(f"{formats}, {operation}: {e}")
        print(failed[-1], flush=True)
    if "save" in operations:  # the disk need not hold it beside the manager's
      shutil.rmtree(os.path.join(directory, "saved"), ignore_errors=True)

  with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
    for formats in args.formats:
      directory = stack.enter_context(tempfile.TemporaryDirectory(dir=args.directory))
      after_another = [o for o in ("manager", "restore") if o in args.operations]
      alone = [[o] for o in args.operations if o not in after_another]
      for operations in [*([after_another] if after_another else []), *alone]:
        pool.submit(run, formats, operations, directory)
    pool.shutdown(wait=True)  # before the directories go
  rows.sort(key=lambda row: (row["formats"], list(OPERATIONS).index(row["operation"])))
  columns = ["formats", "operation", "live_before", "live_after", "peak_before", "peak", "over", "within_largest_leaf",
             "seconds"]  # fmt: skip
  print(common.table(rows, columns))
  leaf = {formats: jnp.dtype(FORMATS[formats]).itemsize * largest for formats in args.formats}
  print(f"largest leaf: {largest:,} elements; {4 * largest:,} bytes in float32, as a parameter {leaf}")
  if failed:
    raise SystemExit("failed:\n" + "\n".join(failed))
  if not all("over" in row for row in rows):
    print(f"{jax.default_backend()} devices have no memory_stats(): all operations ran, nothing was measured, no file")
    return
  result = {
      "tree": args.tree,
      "parameters": trees.count(trees.TREES[args.tree]()),
      "largest_leaf": {"elements": largest, "float32_bytes": 4 * largest, "parameter_bytes": leaf},
      "operations": rows,
  }
  print(f"written to {common.write('checkpoint_memory', result, args.out)}")
  if not all(row["within_largest_leaf"] for row in rows):
    raise SystemExit("an operation took more than the largest leaf in float32")


if __name__ == "__main__":
  main()
