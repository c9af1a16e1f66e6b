"""Hardware counters of the CUDA kernels by Nsight Compute: bytes moved, bandwidth, registers, issue slots, occupancy.

The program under the profiler is the driver (xla_ffi/driver), which steps leaves of 16.8M elements in place and needs
no JAX. Times beside the counters are CUDA events of a run without the profiler.

    python benchmarks/kernel_profile.py --driver build/gpu/driver --library build/gpu/liboptax_lowprec_cuda.so
"""

import argparse
import csv
import json
import pathlib
import subprocess
from typing import Any

import common

KERNELS = [
    ("bf16_remainder16_fp8_fp8_default", "fused"),
    ("bf16_remainder8_fp8_fp8_default", "fused"),
    ("f32_fp8_fp8_default_g32", "fused"),
    ("bf16_remainder16_fp8_fp8", "fused"),  # mu and nu rounded to nearest
    ("f32_f32_f32_g32", "fused"),
    ("bf16_remainder16_e5m2_fp8", "fused"),  # formats read at run time
    ("bf16_remainder16_fp8_fp8_default", "chain"),
]
METRICS = {
    "time_ns": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "of_peak_bandwidth_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
    "issue_slots_busy_percent": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "warp_instructions": "smsp__inst_executed.sum",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_limit_percent": "sm__maximum_warps_per_active_cycle_pct",
}
# Launches before those that are profiled, and how many are.
SKIP, COUNT = 2, 3


def run(command: list[str], log: pathlib.Path) -> str:
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  log.write_text(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}\nexit {done.returncode}\n")
  if done.returncode:
    raise SystemExit(f"exit {done.returncode}, see {log}: {(done.stdout + done.stderr)[-1500:]}")
  return done.stdout


def counters(report: str) -> list[dict[str, str]]:
  """The launches of a raw report: below the names is a line of units."""
  lines = [line for line in report.splitlines() if line.startswith('"')]
  return list(csv.DictReader(lines))[1:]


def number(row: dict[str, str], metric: str) -> float | None:
  text = row.get(metric, "").replace(",", "")
  try:
    return float(text)
  except ValueError:
    return None


def measure(args: argparse.Namespace, name: str, path: str, out: pathlib.Path) -> dict[str, Any]:
  driver = [args.driver, args.library, "profile", name, *(["chain"] if path == "chain" else []), str(args.leaves)]
  label = f"{name}_{path}"
  plain = json.loads(run(driver, out / f"driver_{label}.log"))
  ncu = [args.ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "-k", "regex:Kernel",
         "--launch-skip", str(SKIP), "--launch-count", str(COUNT)]  # fmt: skip
  report = out / f"ncu_{label}.csv"
  for choice in (["--metrics", ",".join(METRICS.values())], ["--set", "full"]):
    report.unlink(missing_ok=True)
    command = [*ncu, *choice, "--log-file", str(report), *driver]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = counters(report.read_text()) if report.exists() else []
    if done.returncode == 0 and len(rows) == COUNT and number(rows[0], METRICS["dram_read_bytes"]) is not None:
      break
  else:
    said = (report.read_text() if report.exists() else "") + done.stdout + done.stderr
    raise SystemExit(f"no counters of {label}: exit {done.returncode}\n{said[-2000:]}")
  middle = sorted(rows, key=lambda r: number(r, METRICS["time_ns"]) or 0.0)[COUNT // 2]
  values = {key: number(middle, metric) for key, metric in METRICS.items()}
  n = plain["elements"]
  read, written, ns = (values[k] or 0.0 for k in ("dram_read_bytes", "dram_write_bytes", "time_ns"))
  return {
      "combination": name,
      "path": path,
      "kernel": middle.get("Kernel Name", "").partition("(const")[0],
      "elements": n,
      **values,
      "dram_bytes_per_element": round((read + written) / n, 3),
      "needed_bytes_per_element": round(plain["bytes"] / n, 3),
      "GB/s": round((read + written) / ns, 1) if ns else None,
      "thread_instructions_per_element": round((values["warp_instructions"] or 0.0) * 32 / n, 1),
      "event_ms": plain["event_ms"],
      "event_GB/s": round(plain["bytes"] / plain["event_ms"] / 1e6, 1),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--driver", required=True)
  parser.add_argument("--library", required=True)
  parser.add_argument("--ncu", default="ncu")
  parser.add_argument("--leaves", type=int, default=20, help="of 16.8M elements each")
  parser.add_argument("--only", default="", help="only combinations whose name contains this")
  parser.add_argument("--out", default=None, help="folder of the result file and of the profiler's reports")
  args = parser.parse_args()
  out = pathlib.Path(args.out) if args.out else common.RESULTS
  logs = out / "ncu"
  logs.mkdir(parents=True, exist_ok=True)
  results: list[dict[str, Any]] = []
  for name, path in KERNELS:
    if args.only in name:
      results.append(measure(args, name, path, logs))
      print(results[-1], flush=True)
  # JAX takes the GPU's memory: only now.
  file = common.write("ncu_kernels", {"leaves": args.leaves, "metrics": METRICS, "results": results}, args.out)
  columns = ["combination", "path", "event_ms", "GB/s", "of_peak_bandwidth_percent", "dram_bytes_per_element",
             "needed_bytes_per_element", "registers", "issue_slots_busy_percent", "occupancy_percent",
             "thread_instructions_per_element"]  # fmt: skip
  print(common.table(results, columns))
  print(f"written to {file.name}")


if __name__ == "__main__":
  main()
