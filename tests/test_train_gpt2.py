"""benchmarks/train_gpt2.py with a tiny model, in a process of its own: it chooses XLA's flags before jax starts."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent


def run(folder, *flags):
  path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
  command = [sys.executable, str(ROOT / "benchmarks" / "train_gpt2.py"), "--tiny", "--out", str(folder), *flags]
  environment = {**os.environ, "PYTHONPATH": path}
  environment.pop("XLA_FLAGS", None)
  done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  (result,) = folder.glob("train_gpt2_*.json")
  return json.loads(result.read_text())["rows"], done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp("train_gpt2")
  flags = ["--parts", "train", "--rows", "optax f32;ours bf16", "--corpus", str(folder / "corpus.npz")]
  return folder, flags, run(folder, *flags, "--seeds", "0", "--lr", "0.01")


def test_rows_begin_alike_and_learn(trained):
  _, _, (results, _) = trained
  assert not results["not_run"] and not results["failed"]
  optax_row, ours = results["train"]
  assert [optax_row["row"], ours["row"]] == ["optax f32", "ours bf16"]
  assert ours["params"] == "bfloat16" and ours["kernel"] in ("cpu", "cuda", "jnp")
  assert ours["bytes_per_param"] < 0.6 * optax_row["bytes_per_param"]
  for row in (optax_row, ours):
    assert [step for step, _ in row["evals"]] == [3, 6] and [step for step, _ in row["losses"]] == [2, 4, 6]
    assert row["eval_loss"] < row["evals"][0][1] < np.log(results["settings"]["vocabulary"])
  # The same weights and batches.
  np.testing.assert_allclose([y for _, y in ours["losses"]], [y for _, y in optax_row["losses"]], rtol=2e-3)


def test_a_resumed_run_keeps_its_rows_and_skips_what_has_no_time(trained):
  folder, flags, (before, _) = trained
  after, said = run(folder, *flags, "--seeds", "0,1", "--lr", "0.01", "--resume", "--budget", "0")
  assert after["train"] == before["train"]
  assert after["not_run"] == ["train optax f32, seed 1", "train ours bf16, seed 1"]
  assert said.count("NOT RUN") == 2
