"""``python -m optax_lowprec``: what is built, what is found, what will be used, and why not.

``python -m optax_lowprec inspect PATH``: what a saved state holds.
"""

import argparse
from collections.abc import Sequence
import importlib.metadata
import importlib.util
import platform
import sys

import jax

import optax_lowprec as olp


def main(arguments: Sequence[str] = ()) -> int:
  parser = argparse.ArgumentParser(
      prog="python -m optax_lowprec", description="Without a command: what is installed and what will be used."
  )
  commands = parser.add_subparsers(dest="command")
  command = commands.add_parser("inspect", help="what a checkpoint holds: formats, sizes, ranges, leaf by leaf")
  command.add_argument("path", help="a directory that optax_lowprec.checkpoint.save or save_args wrote")
  options = parser.parse_args(arguments)
  return inspect(options.path) if options.command == "inspect" else explain()


def inspect(path: str) -> int:
  from optax_lowprec import inspection

  progress = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
  try:
    print(inspection.inspect(path, progress=progress))
  except (ValueError, ImportError) as e:
    print(f"optax_lowprec: {e}", file=sys.stderr)
    return 1
  return 0


def explain() -> int:
  print(
      f"optax_lowprec {olp.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
  )
  for name in ("jax", "jaxlib", "optax", "flax", "orbax-checkpoint"):
    try:
      print(f"  {name:<18}{importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
      print(f"  {name:<18}not installed")
  devices = ", ".join(f"{d.device_kind} ({d.platform})" for d in jax.devices())
  print(f"  devices           {devices}")
  print("implementations")
  for name, why in olp.implementations.explain().items():
    print(f"  {name:<6}{why}")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
