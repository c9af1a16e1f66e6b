"""``python -m optax_lowprec`` says what is there and why not, in a process of its own."""

import subprocess
import sys

import jax

import optax_lowprec as olp
from optax_lowprec import __main__ as cli


def test_main_prints_everything(capsys):
  assert cli.main() == 0
  text = capsys.readouterr().out
  assert olp.__version__ in text and jax.__version__ in text
  for name in olp.implementations.NAMES:
    if name in olp.implementations.explain():
      assert name in text
  for name in olp.available_implementations():
    assert any(line.split()[:2] == [name, "available"] for line in text.splitlines())


def test_module_runs():
  done = subprocess.run([sys.executable, "-m", "optax_lowprec"], capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert "implementations" in done.stdout


def test_public_names():
  """What ``__all__`` says is there, and every public callable has a docstring."""
  for name in olp.__all__:
    assert hasattr(olp, name)
  for name in ("adam", "adamw", "scale_by_adam", "apply_gradients", "master_params", "moments", "memory_report"):
    doc = getattr(olp, name).__doc__
    assert "Args:" in doc and "Returns:" in doc
