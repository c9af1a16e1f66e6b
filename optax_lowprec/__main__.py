"""``python -m optax_lowprec``: what is built, what is found, what will be used, and why not."""

import importlib.metadata
import platform
import sys

import jax

import optax_lowprec as olp


def main() -> int:
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
  sys.exit(main())
