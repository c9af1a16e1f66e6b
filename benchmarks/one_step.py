"""A few steps of the kernels, for profilers and sanitizers.

compute-sanitizer --tool memcheck python benchmarks/one_step.py --small
ncu --launch-skip 4 --launch-count 3 -k regex:Kernel python benchmarks/one_step.py
"""

import argparse

import jax
import jax.numpy as jnp
import step_time
import trees

import optax_lowprec as olp


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--small", action="store_true", help="odd little shapes in many formats, instead of llama1b")
  args = parser.parse_args()
  shapes = trees.llama()[3:13]
  formats = [(jnp.bfloat16, dict(master="remainder16")), (jnp.float32, dict(mu="float32", nu="float32"))]
  if args.small:
    shapes = [(), (1,), (7,), (5, 3), (64, 257), (3, 3, 16, 32), (0,), (512, 128), (37, 1358), (9, 129), (3001,)]
    stochastic = dict(mu=step_time.SR_MU, nu=step_time.SR_NU)
    tensor = dict(mu=olp.StateFormat("float8_e4m3fn", "tensor"), nu=step_time.TENSOR_NU)
    formats = [
        (dtype, dict(master=master, min_quantized_size=size, **moments))
        for dtype in (jnp.bfloat16, jnp.float32, jnp.float16)
        for master in ("remainder16", "remainder8", "float16")
        for size, moments in ((0, {}), (4096, stochastic), (0, tensor), (0, dict(mu="float8_e5m2", nu="float16")))
    ]
  for dtype, kw in formats:
    params = step_time.random_tree(shapes, dtype, 0)
    grads = step_time.random_tree(shapes, dtype, 1)
    tx = olp.adamw(1e-3, weight_decay=0.1, implementation="cuda", **kw)
    state = jax.jit(tx.init)(params)
    for fused in (True, False):
      run = lambda p, s, g, tx=tx, f=fused: olp.apply_gradients(tx, g, s, p) if f else tx.update(g, s, p)
      step = jax.jit(run, donate_argnums=(0, 1) if fused else (1,))
      for _ in range(2):
        out, state = step(params, state, grads)
        params = out if fused else params
    jax.block_until_ready((params, state))
    print("done", jnp.dtype(dtype).name, {k: str(v) for k, v in kw.items()}, flush=True)


if __name__ == "__main__":
  main()
