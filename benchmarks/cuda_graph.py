"""The step inside a captured CUDA graph: replays give what eager calls give.

XLA captures a program into command buffers where ``xla_gpu_graph_min_graph_size`` allows it and every call in it is
marked compatible. This runs the step with capture forced and with it off, in one process each, and compares the bits.
"""

import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile


def child() -> None:
  import jax  # pylint: disable=import-outside-toplevel
  import jax.numpy as jnp  # pylint: disable=import-outside-toplevel
  import step_time  # pylint: disable=import-outside-toplevel

  import optax_lowprec as olp  # pylint: disable=import-outside-toplevel

  shapes = [(512, 256), (256, 384), (33, 257), (1024,)]
  params = step_time.random_tree(shapes, jnp.bfloat16, 0)
  grads = step_time.random_tree(shapes, jnp.bfloat16, 1)
  tx = olp.adamw(1e-3, implementation="cuda", min_quantized_size=0)
  state = jax.jit(tx.init)(params)
  step = jax.jit(lambda p, s, g: olp.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
  compiled = step.lower(params, state, grads).compile()
  for _ in range(8):
    params, state = compiled(params, state, grads)
  digest = hashlib.sha256()
  for x in jax.tree.leaves((params, state)):
    digest.update(jax.device_get(x).tobytes())
  print(digest.hexdigest())


def main() -> None:
  results = {}
  for name, flags in (
      ("off", "--xla_gpu_enable_command_buffer="),
      ("on", "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"),
  ):
    with tempfile.TemporaryDirectory() as dump:
      env = {**os.environ, "XLA_FLAGS": f"{flags} --xla_dump_to={dump} --xla_dump_hlo_as_text"}
      out = subprocess.run([sys.executable, __file__, "child"], env=env, capture_output=True, text=True, check=False)
      if out.returncode:
        print(out.stderr[-3000:])
        raise SystemExit(f"capture {name}: exit {out.returncode}")
      results[name] = out.stdout.strip()
      # The thunks that run a module are dumped as text too; the module of the step holds the kernel's name.
      commands = 0
      for path in pathlib.Path(dump).iterdir():
        text = path.read_text(errors="replace") if path.suffix == ".txt" else ""
        if "optax_lowprec_cuda_step" in text or "thunk" in path.name:
          commands += len(re.findall(r"kCommandBuffer|command_buffer|CommandBuffer", text))
    print(f"capture {name}: {results[name][:16]}, command buffers are named {commands} times in the compiled programs")
    if name == "on" and not commands:
      raise SystemExit("nothing was captured: the comparison would prove nothing")
  if results["on"] != results["off"]:
    raise SystemExit("a captured step differs from an eager one")
  print("replay equals eager")


if __name__ == "__main__":
  child() if sys.argv[1:] == ["child"] else main()
