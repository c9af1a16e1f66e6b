"""Two processes under ``jax.distributed`` take the step together, and it is the step of one process."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import multiprocess_worker as worker
import numpy as np
import pytest
import table

FOLDER = pathlib.Path(__file__).parent
PROCESSES, DEVICES = 2, 2
TIMEOUT = 90  # seconds


def free_port() -> int:
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def run_together(commands, logs, env):
  """Runs processes until all end, one fails or time is up; says what they printed if not all went well."""
  processes = []
  failed = "took too long"
  try:
    for command, log in zip(commands, logs, strict=True):
      with log.open("w") as f:
        processes.append(subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, env=env))
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
      codes = [p.poll() for p in processes]
      if any(codes) or all(c == 0 for c in codes):  # the others would wait for one that died
        failed = ", ".join(f"process {i} ended with {c}" for i, c in enumerate(codes) if c)
        break
      time.sleep(0.05)
  finally:
    for p in processes:
      p.kill()
      p.wait()
  if failed:
    said = [f"--- process {i}\n{log.read_text()[-5000:]}" for i, log in enumerate(logs)]
    pytest.fail("\n".join([failed, *said]), pytrace=False)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
  """For each process, what the worker writes."""
  folder = tmp_path_factory.mktemp("multiprocess")
  port = free_port()
  outs = [folder / f"{i}.npz" for i in range(PROCESSES)]
  commands = [[sys.executable, str(FOLDER / "multiprocess_worker.py"), str(i), str(PROCESSES), str(port), str(out)]
              for i, out in enumerate(outs)]  # fmt: skip
  env = {
      **os.environ,
      "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
      "JAX_PLATFORMS": "cpu",
      # The suite's, but fewer devices: bits are compared.
      "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES}",
  }
  run_together(commands, [out.with_suffix(".log") for out in outs], env)
  return [worker.read(out) for out in outs]


@pytest.mark.parametrize("formats, name", worker.scenarios())
def test_all_processes_have_the_bits_of_one(shards, formats, name):
  """And the last step, in which one process alone saw infinities, is in none of them: case 19 over processes."""
  params, state = jax.device_get(worker.run(formats, name))
  assert int(state.count) == worker.STEPS
  want = {jax.tree_util.keystr(k): x for k, x in jax.tree_util.tree_flatten_with_path((params, state))[0]}
  for process in shards:
    rows = process[formats, name]
    assert {path for path, _, _ in rows} == set(want)
    for path, index, got in rows:
      table.assert_same_bits(got, np.asarray(want[path])[index], f"{path}{index}")
  # Each process held half of a leaf, and all of one that is replicated, on each device.
  held = [sum(x.size for path, _, x in process[formats, name] if path == "[0]['matrix']") for process in shards]
  assert held == [np.prod(worker.SHAPES["matrix"]) / PROCESSES] * PROCESSES
  assert sum(path == "[0]['bias']" for process in shards for path, _, _ in process[formats, name]) == 4
