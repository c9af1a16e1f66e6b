"""Proves the remainder formats by trying every case, with the very functions that the CPU and CUDA kernels call.

``python tests/exhaustive_remainder.py`` sees 2e10 cases in minutes and writes tests/data/exhaustive_remainder.json.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from typing import Any

FOLDER = pathlib.Path(__file__).parent
RESULT = FOLDER / "data" / "exhaustive_remainder.json"
# As xla_ffi/CMakeLists.txt builds the kernels.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread")


def compiler() -> str | None:
  return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def run(stride: int, threads: int, folder: str) -> list[dict[str, Any]]:
  """Compiles the program into ``folder`` and runs it over every ``stride``-th case.

  Returns:
    For each check how many cases it saw, how many failed and the largest error.

  Raises:
    CalledProcessError: if it does not compile or crashes (it exits with 1, and no exception, if a case fails).
  """
  cxx = compiler()
  assert cxx is not None, "no C++ compiler"
  program = os.path.join(folder, "exhaustive_remainder")
  include = f"-I{FOLDER.parent / 'xla_ffi'}"
  subprocess.run([cxx, *FLAGS, include, str(FOLDER / "exhaustive_remainder.cc"), "-o", program], check=True)
  result = subprocess.run([program, str(stride), str(threads)], stdout=subprocess.PIPE, text=True, check=False)
  if result.returncode not in (0, 1):
    result.check_returncode()
  return json.loads(result.stdout)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--stride", type=int, default=1, help="every how manieth case; nothing is written unless it is 1")
  parser.add_argument("--threads", type=int, default=os.cpu_count())
  args = parser.parse_args()
  cxx = compiler()
  if cxx is None:
    raise SystemExit("no C++ compiler found: set CXX")
  start = datetime.datetime.now(datetime.UTC)
  with tempfile.TemporaryDirectory() as folder:
    checks = run(args.stride, args.threads, folder)
  for check in checks:
    print(f"{check['check']:<90}{check['cases']:>14,} cases{check['failures']:>12,} failures")
  if args.stride == 1:
    version = subprocess.run([cxx, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[0]
    result = dict(
        date=start.strftime("%Y-%m-%d"),
        system=f"{platform.system()} {platform.machine()}, {version}",
        minutes=round((datetime.datetime.now(datetime.UTC) - start).total_seconds() / 60, 1),
        checks=checks,
    )
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {RESULT.name}")
  if any(check["failures"] for check in checks):
    raise SystemExit(1)


if __name__ == "__main__":
  main()
