"""examples/sharded.py on simulated devices, in a process of its own: they are chosen before jax starts."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
ROW = re.compile(r"^(.+?)  +(\d x \d) +([\d.]+) +([\d,]+) +([\d,]+)  (.+)$", re.MULTILINE)


def test_layouts_differ_in_memory_and_not_in_losses():
  path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
  flags = ["--devices", "4", "--steps", "10", "--batch", "32", "--lr", "0.01"]
  done = subprocess.run([sys.executable, str(ROOT / "examples" / "sharded.py"), *flags], capture_output=True, text=True,
                        env={**os.environ, "PYTHONPATH": path}, timeout=120, check=False)  # fmt: skip
  assert done.returncode == 0, done.stderr[-5000:]
  rows = {name: rest for name, *rest in ROW.findall(done.stdout)}
  assert list(rows) == ["replicated", "ZeRO-1", "FSDP", "tensor parallel", "FSDP + tensor parallel"], done.stdout
  assert float(re.search(r"agree to ([\d.e+-]+)", done.stdout)[1]) < 1e-3
  size = lambda name, column: int(rows[name][column].replace(",", ""))
  params, state = 2, 3
  assert size("ZeRO-1", params) == size("replicated", params) == 4 * size("FSDP", params)
  for name in ("ZeRO-1", "FSDP", "tensor parallel", "FSDP + tensor parallel"):
    assert size(name, state) < 0.26 * size("replicated", state)
  # max_grad_norm takes one reduction; parameters that are whole on every device have to be put together again.
  communication = {name: row[4] for name, row in rows.items()}
  assert communication.pop("replicated") == "none"
  assert re.fullmatch(r"all-gather \d+, all-reduce 1", communication.pop("ZeRO-1"))
  assert set(communication.values()) == {"all-reduce 1"}
