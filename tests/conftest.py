"""The ``implementation`` fixture: every behaviour test runs once for each implementation that works here."""

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
