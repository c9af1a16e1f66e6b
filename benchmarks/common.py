"""What every benchmark needs: the record of where it ran, timing, and writing its result."""

import argparse
from collections.abc import Callable
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import time
from typing import Any

import jax

RESULTS = pathlib.Path(__file__).parent / "results"
DOCS = pathlib.Path(__file__).parent.parent / "docs"


def environment() -> dict[str, Any]:
  """The commit, the machine and the versions that a figure belongs to."""
  folder = pathlib.Path(__file__).parent
  commit = os.environ.get("GIT_COMMIT", "")
  if not commit:
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    commit = git.stdout.strip() or "unknown"
  driver = subprocess.run(
      ["sh", "-c", "nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true"],
      capture_output=True, text=True, check=False,
  ).stdout.strip()  # fmt: skip
  return {
      "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
      "commit": commit,
      "device": jax.devices()[0].device_kind,
      "devices": jax.device_count(),
      "driver": driver,
      "cores": os.cpu_count(),
      "python": platform.python_version(),
      "jax": jax.__version__,
      "jaxlib": jax.lib.__version__,
  }


def write(name: str, rows: Any, out: str | None = None) -> pathlib.Path:
  """Writes ``name.json`` into ``out`` (benchmarks/results where None)."""
  folder = pathlib.Path(out) if out else RESULTS
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f"{name}.json"
  path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
  return path


def median_time(run: Callable[[], Any], repeats: int = 5) -> tuple[float, float]:
  """Median and spread (max - min) of the seconds that ``run`` takes; it has to be warm."""
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - start)
  return statistics.median(times), max(times) - min(times)


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
  text = [[c if r is None else str(r.get(c, "")) for c in columns] for r in [None, *rows]]
  widths = [max(len(line[i]) for line in text) for i in range(len(columns))]
  lines = ["  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() for line in text]
  return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown(rows: list[dict[str, str]]) -> str:
  """A Markdown table; columns whose values are all numbers are aligned to the right."""
  number = re.compile(r"<?[-+.e\d]+")
  right = [all(number.fullmatch(r[c].strip("*")) for r in rows) for c in rows[0]]
  lines = [list(rows[0]), *([r[c] for c in rows[0]] for r in rows)]
  text = ["| " + " | ".join(line) + " |" for line in lines]
  return "\n".join([text[0], "|" + "|".join("---:" if r else "---" for r in right) + "|", *text[1:]])


def parse_or_rewrite(
    parser: argparse.ArgumentParser, rewrite_docs: Callable[[str | None], None]
) -> argparse.Namespace | None:
  """The arguments, ``--out`` among them; None with ``--markdown``, after rewriting the documentation's tables."""
  parser.add_argument("--out", default=None, help="folder of the result file")
  parser.add_argument(
      "--markdown", action="store_true", help="run nothing, but rewrite the tables of docs/numerics.md from the results"
  )
  args = parser.parse_args()
  if args.markdown:
    rewrite_docs(args.out)
    return None
  return args


def rewrite(name: str, tables: dict[str, str]) -> None:
  """Puts each table between its ``<!-- table: KEY begin -->`` and ``end`` in docs/``name``, and prints it."""
  path = DOCS / name
  text = path.read_text()
  for key, table_text in tables.items():
    begin, end = (f"<!-- table: {key} {edge} -->" for edge in ("begin", "end"))
    if text.count(begin) != 1 or text.count(end) != 1:
      raise SystemExit(f"{path.name}: {begin} and {end} have to be there once")
    text = text.split(begin)[0] + f"{begin}\n{table_text}\n{end}" + text.split(end)[1]
    print(f"{key}\n\n{table_text}\n")
  path.write_text(text)
