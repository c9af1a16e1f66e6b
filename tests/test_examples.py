"""Every small example runs, its loss falls, and it prints what it came to; in one process, with few steps."""

import importlib.util
import pathlib
import re

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "examples"
# name -> flags beside the common ones, and what its last lines say
EXAMPLES = {
    "linen": ([], "linen, bfloat16: loss"),
    "nnx": ([], "nnx, bfloat16: loss"),
    "gradient_accumulation": (["--every", "2", "--steps", "40"], "1 x 64 rows: loss"),
    "fp16_loss_scaling": (["--scale", "16777216"], "steps were skipped"),
    "formats_by_layer": ([], "first moment of embedding {'embedding': 'float32"),
    "frozen_part": (["--steps", "40"], "moved while the head was tuned: head\n"),
    "batched_learning_rates": (["--rates", "3e-3,1e-2"], "<- best"),
}


def test_every_example_is_here():
  """And docs/optax.md names it. (train_lm.py and sharded.py have tests of their own.)"""
  assert {f.stem for f in FOLDER.glob("*.py")} == {*EXAMPLES, "common", "sharded", "train_lm"}
  docs = (FOLDER.parent / "docs" / "optax.md").read_text()
  assert not [name for name in EXAMPLES if f"examples/{name}.py" not in docs]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, monkeypatch, capsys):
  monkeypatch.syspath_prepend(str(FOLDER))  # as for a script: they import common.py
  spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  flags, said = EXAMPLES[name]
  losses = module.main(["--steps", "20", "--width", "64", "--batch", "32", "--lr", "0.01", *flags])
  assert np.isfinite(losses).all()
  assert np.mean(losses[-3:]) < losses[0] - 0.3
  text = capsys.readouterr().out
  assert said in text
  if name == "frozen_part":
    before, after = re.search(r"([\d.]+) before tuning, ([\d.]+) after", text).groups()
    assert float(after) < float(before)
