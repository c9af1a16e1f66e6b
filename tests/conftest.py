"""The ``implementation`` fixture: every behaviour test runs once for each implementation that works here."""

import os
import zlib

# Eight devices for the tests of sharding. Most time is compiling, so do it without LLVM's optimizer, but for the tests
# of bits: they ask for `table.OPTIMIZED`.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true",
)

import jax
import pytest

import optax_lowprec as olp

_PLATFORM = {"cuda": "gpu", "cpu": "cpu"}


def runnable_implementations() -> tuple[str, ...]:
  backend = jax.default_backend()
  return tuple(n for n in olp.available_implementations() if _PLATFORM.get(n, backend) == backend)


@pytest.fixture(params=runnable_implementations())
def implementation(request):
  return request.param


def pytest_addoption(parser):
  parser.addoption(
      "--rows", default="1/1", metavar="K/N",
      help="of the rows of each parametrized test the Kth of N parts, so that several environments can share them",
  )  # fmt: skip


def pytest_collection_modifyitems(config, items):
  part, parts = map(int, config.getoption("--rows").split("/"))
  rows: dict[str, list[pytest.Item]] = {}
  for item in items:
    rows.setdefault(item.nodeid.partition("[")[0], []).append(item)
  kept = set()
  for group in rows.values():
    # By a hash of the name: every other row would often be every row of one implementation.
    mine = [x for x in group if zlib.crc32(x.nodeid.encode()) % parts == part - 1]
    kept.update(mine or [group[part % len(group)]])
  config.hook.pytest_deselected(items=[x for x in items if x not in kept])
  items[:] = [x for x in items if x in kept]
