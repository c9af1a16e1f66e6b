"""The ``implementation`` fixture: every behaviour test runs once for each implementation that works here."""

import os

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
      "--thin", type=int, default=1, metavar="N",
      help="of the rows of each parametrized test run every Nth: for a second Python or jax",
  )  # fmt: skip


def pytest_collection_modifyitems(config, items):
  thin = config.getoption("--thin")
  if thin <= 1:
    return
  seen: dict[str, int] = {}
  kept, left_out = [], []
  for item in items:
    name = item.nodeid.partition("[")[0]
    position = seen[name] = seen.get(name, -1) + 1
    (left_out if position % thin else kept).append(item)
  config.hook.pytest_deselected(items=left_out)
  items[:] = kept
