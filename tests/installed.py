"""Whether an installation works: ``python installed.py cpu,jnp`` where those implementations are to be available.

For continuous integration, in environments that hold no more than the package and what it requires.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import optax_lowprec as olp

SHAPES = {"matrix": (64, 256), "ragged": (33, 257), "scalar": (), "empty": (0, 3)}
FORMATS = [
    (jnp.bfloat16, dict(master="remainder8", mu=olp.StateFormat("float8_e4m3fn", rounding="stochastic"))),
    (jnp.float32, dict(mu="float8_e5m2", nu="float16")),
]


def bits_after_steps(implementation: str | None, dtype: jnp.dtype, formats: dict[str, object]) -> list[bytes]:
  tx = olp.adamw(1e-2, min_quantized_size=0, implementation=implementation, **formats)
  rng = np.random.default_rng(0)
  random = lambda: {k: jnp.asarray(rng.normal(size=s) * 0.1).astype(dtype) for k, s in SHAPES.items()}
  params = random()
  state = tx.init(params)
  step = jax.jit(lambda p, s, g: olp.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
  for _ in range(5):
    params, state = step(params, state, random())
  return [np.asarray(x).tobytes() for x in jax.tree.leaves((params, state))]


def main() -> None:
  expected = tuple(sys.argv[1].split(","))
  where = pathlib.Path(olp.__file__).resolve()
  assert where.is_relative_to(pathlib.Path(sys.prefix).resolve()), f"not the installed package: {where}"
  assert olp.available_implementations() == expected, olp.implementations.explain()
  for dtype, formats in FORMATS:
    reference = bits_after_steps("jnp", dtype, formats)
    for name in (*expected, None):
      assert bits_after_steps(name, dtype, formats) == reference, (name, dtype, formats)
  if expected == ("jnp",):
    for name in ("cpu", "cuda"):
      assert olp.implementations.explain()[name].startswith("not built: install "), olp.implementations.explain()
  print(f"jax {jax.__version__}: {', '.join(expected)} give the same bits, in {where.parent}")


if __name__ == "__main__":
  main()
