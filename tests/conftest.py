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
