"""Saving, restoring and converting: nothing lost, nothing misread, never two whole copies."""

import dataclasses
import functools
import gc
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

from flax import serialization
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import kill_during_save
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import table
from test_kernels import SPECIALISED

import optax_lowprec as olp
from optax_lowprec import __main__ as cli
from optax_lowprec import checkpoint
from optax_lowprec import conversions
from optax_lowprec import formats as fmts
from optax_lowprec import inspection
from optax_lowprec import pieces
from optax_lowprec import StateFormat
from optax_lowprec.checkpoint import CheckpointError

SHAPES = {"w": (4, 257), "v": (3, 3, 16, 4), "b": (7,), "s": (), "e": (0,)}
NOT_EMPTY = {k: s for k, s in SHAPES.items() if k != "e"}


def optimizer(name, **keywords):
  return olp.adamw(1e-2, **{"min_quantized_size": 0, **SPECIALISED[name][1], **keywords})


@functools.cache
def stepper(name):
  gradients = table.Gradients(SHAPES)
  return jax.jit(lambda p, s, t: olp.apply_gradients(optimizer(name), gradients.at(t, p), s, p))


@functools.cache
def trained(name):
  """Parameters and state of a specialised combination after three steps."""
  params = table.tree(SHAPES, SPECIALISED[name][0])
  state = optimizer(name).init(params)
  for t in range(3):
    params, state = stepper(name)(params, state, t)
  return params, state


def structs(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def next_step(name, params, state):
  return stepper(name)(params, state, 3)


def not_empty(tree):
  """Plain Orbax refuses empty arrays."""
  return jax.tree.map(lambda x: None if x.size == 0 else x, tree)


# --- bit for bit ----------------------------------------------------------------------------------------------------

_CHILD = """
import pathlib, sys
import jax, numpy as np
import table, test_checkpoint as t
root = pathlib.Path(sys.argv[1])
for name in t.SPECIALISED:
  like = table.tree(t.SHAPES, t.SPECIALISED[name][0])
  params, state = t.checkpoint.restore(root / name, t.optimizer(name), t.structs(like))
  out = jax.tree.leaves(t.next_step(name, params, state))
  np.savez(root / f"{name}.npz", *[table.bits(x) for x in out])
"""


def in_a_process(*arguments, check=True):
  tests = pathlib.Path(__file__).parent
  path = os.pathsep.join([str(tests.parent), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
  return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=check,
                        env={**os.environ, "PYTHONPATH": path})  # fmt: skip


@pytest.fixture(scope="module")
def stepped_elsewhere(tmp_path_factory):
  """Every combination, saved here, restored and stepped in another process."""
  root = tmp_path_factory.mktemp("elsewhere")
  for name in SPECIALISED:
    checkpoint.save(root / name, *trained(name))
  done = in_a_process("-c", _CHILD, str(root), check=False)
  assert done.returncode == 0, done.stderr
  return root


@pytest.mark.parametrize("name", SPECIALISED)
def test_the_next_step_in_a_new_process(name, stepped_elsewhere):
  right = jax.tree.leaves(next_step(name, *trained(name)))
  with np.load(stepped_elsewhere / f"{name}.npz", allow_pickle=False) as got:
    assert len(got.files) == len(right)
    for i, x in enumerate(right):
      np.testing.assert_array_equal(got[f"arr_{i}"], table.bits(x))


def by_save(path, name, params, state):
  checkpoint.save(path, params, state)
  return checkpoint.restore(path, optimizer(name), structs(params))


def by_standard_checkpointer(path, name, params, state):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, not_empty((params, state)))
    checkpointer.wait_until_finished()
    checkpoint.check(checkpointer.metadata(path).item_metadata.tree[1], optimizer(name), params)
    restored = checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, not_empty((params, state))))
  return jax.tree.map(lambda x, y: y if x is None else x, restored, (params, state), is_leaf=lambda x: x is None)


def by_manager(path, name, params, state):
  """In the background, a second save at its heels; the next step donates what is being saved."""
  with ocp.CheckpointManager(path) as manager:
    manager.save(1, args=checkpoint.save_args(params, state))
    manager.save(2, args=checkpoint.save_args(params, state))
    manager.wait_until_finished()
    return checkpoint.restore(path / str(manager.latest_step()), optimizer(name), structs(params))


def by_flax(path, name, params, state):
  record = json.dumps(checkpoint.record(state, params))
  path.write_bytes(serialization.to_bytes({"params": params, "opt": state, "record": record}))
  data = path.read_bytes()
  checkpoint.check(json.loads(serialization.msgpack_restore(data)["record"]), optimizer(name), params)
  target = {"params": structs(params), "opt": jax.eval_shape(optimizer(name).init, params), "record": ""}
  restored = serialization.from_bytes(target, data)
  return restored["params"], restored["opt"]


WAYS = {"save": by_save, "StandardCheckpointer": by_standard_checkpointer, "CheckpointManager": by_manager,
        "flax.serialization": by_flax}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPECIALISED)
def test_round_trip(name, way, tmp_path):
  params, state = trained(name)
  restored = WAYS[way](tmp_path / "c", name, params, state)
  table.assert_same_bits(restored, (params, state))
  assert jax.tree.structure(restored[1]) == jax.tree.structure(state)


def test_save_in_the_background_while_training_goes_on(tmp_path):
  """The step donates what is being saved."""
  name = "stochastic"
  params, state = jax.tree.map(jnp.copy, trained(name))
  step = jax.jit(functools.partial(olp.apply_gradients, optimizer(name)), donate_argnums=(1, 2))
  grads = table.Gradients(SHAPES).at(3, params)
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(3, args=checkpoint.save_args(params, state))
    step(grads, state, params)
    manager.wait_until_finished()
  table.assert_same_bits(checkpoint.restore(tmp_path / "3", optimizer(name), structs(params)), trained(name))


def test_where_things_are_restored(tmp_path):
  """Onto a mesh, to pinned host memory, or as numpy arrays: the state goes where its parameter is."""
  params, state = trained("tensor")
  tx = optax.chain(optax.clip(1.0), optax.ema(0.9), optimizer("tensor"))
  state = (optax.EmptyState(), optax.ema(0.9).init(params), state)
  checkpoint.save(tmp_path / "c", params, state)
  mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
  for kind in (None, "pinned_host"):
    spec = lambda p: NamedSharding(mesh, P(*["x"][: len(p.shape)]), memory_kind=kind)
    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=spec(p)), params)
    restored = checkpoint.restore(tmp_path / "c", tx, like)
    table.assert_same_bits(restored, (params, state))
    for x in jax.tree.leaves(restored):
      assert isinstance(x.sharding, NamedSharding) and (kind is None or x.size == 0 or x.sharding.memory_kind == kind)
    for x in (restored[0], restored[1][1].ema, restored[1][2].mu, restored[1][2].master):
      assert x["w"].sharding.spec == P("x")
  restored = checkpoint.restore(tmp_path / "c", tx, jax.tree.map(np.asarray, params))
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(restored[1][2].mu))
  table.assert_same_bits(restored, (params, state))


def test_boxed_parameters(tmp_path):
  params = {"w": nn.Partitioned(jnp.ones((8, 256), jnp.bfloat16), names=("x", "y")), "b": jnp.ones((7,))}
  tx = olp.adamw(1e-2, min_quantized_size=0)
  params, state = table.run_steps(tx, params, lambda t, p: p, 2)
  checkpoint.save(tmp_path / "c", params, state)
  table.assert_same_bits(checkpoint.restore(tmp_path / "c", tx, structs(params)), (params, state))
  assert len(inspection.inspect(tmp_path / "c").rows) == 6


# --- refusals -------------------------------------------------------------------------------------------------------

_BASE = dict(mu=StateFormat("float8_e4m3fn"), nu=StateFormat("float8_e4m3fn", transform="sqrt"), master="remainder16")
_TREE = {"w": (4, 257), "b": (7,)}


def _base(**keywords):
  return olp.adamw(1e-2, **{"min_quantized_size": 0, **_BASE, **keywords})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  params = table.tree(_TREE, jnp.bfloat16)
  state = _base().init(params)
  path = tmp_path_factory.mktemp("saved") / "c"
  checkpoint.save(path, params, state)
  return path, params, state


OTHERS = {
    "another dtype": (_base(mu="bfloat16"), None, r"\['b'\]: mu is saved as 'float8_e4m3fn block 128'.*'bfloat16'"),
    "the other float8": (_base(mu=StateFormat("float8_e5m2")), None, r"\['b'\]: mu .*e4m3fn block 128.*e5m2 block 128"),
    "another block size": (_base(nu=StateFormat("float8_e4m3fn", block_size=64, transform="sqrt")), None,
                           r"\['b'\]: nu .*block 128 sqrt.*block 64 sqrt"),
    "no square root": (_base(nu=StateFormat("float8_e4m3fn")), None, r"\['b'\]: nu .*block 128 sqrt.*block 128'"),
    "another scaling": (_base(mu=StateFormat("float8_e4m3fn", "tensor")), None, r"mu .*block 128.*tensor"),
    "another remainder": (_base(master="remainder8"), None, r"master .*remainder16.*remainder8"),
    "no master": (_base(master=None), None, r"master .*remainder16.*None"),
    "small leaves": (_base(min_quantized_size=None), None, r"\['b'\]: mu .*float8_e4m3fn block 128.*'float32'"),
    "one leaf": (_base(mu=lambda path, leaf: "float16" if leaf.ndim == 2 else _BASE["mu"]), None,
                 r"\['w'\]: mu .*float8_e4m3fn block 128.*float16 block 128"),
    "another optimizer": (optax.chain(optax.clip(1.0), _base()), None, "the root, this optimizer at 1"),
    "another shape": (_base(), {"w": (4, 256), "b": (7,)}, r"\['w'\] was saved with shape \(4, 257\).*\(4, 256\)"),
    "a leaf more": (_base(), {"w": (4, 257), "b": (7,), "c": (1,)}, r"\['c'\] is in the given tree"),
    "a leaf less": (_base(), {"w": (4, 257)}, r"\['b'\] is in the saved tree"),
}  # fmt: skip


def _hash(path):
  files = sorted(p for p in pathlib.Path(path).rglob("*") if p.is_file())
  return hashlib.sha256(b"".join(str(p).encode() + p.read_bytes() for p in files)).hexdigest()


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_are_refused(name, saved):
  """Before anything is read; the message names leaf and formats, and what to do."""
  tx, shapes, message = OTHERS[name]
  path, params, state = saved
  like = structs(table.tree(shapes or _TREE, jnp.bfloat16))
  before = _hash(path)
  with pytest.raises(CheckpointError, match=message) as error:
    checkpoint.restore(path, tx, like)
  assert shapes or "optimizer" in name or "checkpoint.convert(" in str(error.value)
  with pytest.raises(CheckpointError, match=message):
    checkpoint.check(json.loads(json.dumps(checkpoint.record(state, params))), tx, like)
  assert _hash(path) == before


def test_another_parameter_dtype_is_refused(saved):
  with pytest.raises(CheckpointError, match=r"\['b'\] was saved as a bfloat16 parameter, this one is float32"):
    checkpoint.restore(saved[0], _base(), structs(table.tree(_TREE, jnp.float32)))


def test_another_rounding_is_welcome(saved):
  """How the next step rounds says nothing of what is stored."""
  tx = _base(mu=StateFormat("float8_e4m3fn", rounding="stochastic"))
  restored = checkpoint.restore(saved[0], tx, structs(saved[1]))
  assert jax.tree.structure(restored[1]) == jax.tree.structure(tx.init(saved[1]))


def test_what_orbax_casts_is_caught_by_its_metadata(tmp_path):
  """Orbax casts to the target's dtype without a word; ``check`` before it."""
  params = table.tree(_TREE, jnp.bfloat16)
  state, other = _base().init(params), _base(mu="bfloat16")
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "c", state)
    checkpointer.wait_until_finished()
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    cast = target._replace(mu=jax.tree.map(lambda x: x.update(dtype=jnp.bfloat16), target.mu))
    assert checkpointer.restore(tmp_path / "c", cast).mu["w"].dtype == jnp.bfloat16
    metadata = checkpointer.metadata(tmp_path / "c")
  checkpoint.check(metadata, _base(), params)
  with pytest.raises(CheckpointError, match=r"mu/b is saved as float8_e4m3fn\[7\], expected is bfloat16\[7\].*convert"):
    checkpoint.check(metadata, other, params)
  with pytest.raises(CheckpointError, match="has no array 1/count"):
    checkpoint.check(metadata, optax.chain(optax.clip(1.0), _base()), params)
  with pytest.raises(CheckpointError, match="array master/b that has no place"):
    checkpoint.check(metadata, _base(master=None), params)


def test_record_is_json_and_complete(saved):
  path, params, state = saved
  record = checkpoint.record(state, params)
  assert json.loads(json.dumps(record)) == record == checkpoint.read_record(path)
  assert record == checkpoint.record(jax.eval_shape(_base().init, params), structs(params))
  leaf = record["states"][0]["leaves"]["['w']"]
  assert leaf["shape"] == [4, 257] and leaf["dtype"] == "bfloat16" and leaf["mu"]["block_size"] == 128
  assert leaf["nu"]["transform"] == "sqrt" and leaf["master"]["dtype"] == "remainder16"
  checkpoint.check(record, _base(), params)


def _spoil(record, *path, value):
  record = json.loads(json.dumps(record))
  at = record
  for k in path[:-1]:
    at = at[k]
  at[path[-1]] = value
  return record


_LEAF = ("states", 0, "leaves", "['w']")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("optax_lowprec_record",), 2, "record has version 2, written by .*update optax_lowprec"),
        (("optax_lowprec_record",), "1", "damaged record"),
        (("optax_lowprec_record",), True, "damaged record"),
        (("states",), None, "damaged record"),
        (("states",), ["x"], "damaged record"),
        ((*_LEAF, "shape"), "257", "was saved with shape"),
        ((*_LEAF, "shape"), ["x"], "damaged record"),
        ((*_LEAF, "dtype"), "os.system", "damaged record"),
        ((*_LEAF, "mu"), {}, "damaged record"),
        ((*_LEAF, "mu", "dtype"), "complex64", "damaged record"),
        ((*_LEAF, "mu", "block_size"), 10**9, "block 1000000000"),
        ((*_LEAF, "mu", "scaling"), "__import__('os')", "damaged record"),
        (("states", 0, "path"), ["..", "..", "etc"], "low-precision states at ../../etc"),
    ],
)  # fmt: skip
def test_spoiled_records(path, value, message, saved):
  _, params, state = saved
  record = _spoil(checkpoint.record(state, params), *path, value=value)
  with pytest.raises(CheckpointError, match=message):
    checkpoint.check(record, _base(), params)


def test_a_newer_record_in_a_checkpoint(saved, tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint, "RECORD_VERSION", 2)
  checkpoint.save(tmp_path / "c", *saved[1:])
  monkeypatch.undo()
  for read in (
      lambda: checkpoint.restore(tmp_path / "c", _base(), saved[1]),
      lambda: inspection.inspect(tmp_path / "c"),
  ):
    with pytest.raises(CheckpointError, match="record has version 2"):
      read()


def test_there_must_be_a_whole_checkpoint(saved, tmp_path):
  path, params, state = saved
  with pytest.raises(CheckpointError, match="no such directory"):
    checkpoint.restore(tmp_path / "none", _base(), params)
  (tmp_path / "empty").mkdir()
  with pytest.raises(CheckpointError, match="no record"):
    checkpoint.restore(tmp_path / "empty", _base(), params)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "foreign", state)
  with pytest.raises(CheckpointError, match="no record"):
    checkpoint.restore(tmp_path / "foreign", _base(), params)
  before = _hash(path)
  with pytest.raises(CheckpointError, match="exists"):
    checkpoint.save(path, params, state)
  assert _hash(path) == before
  with pytest.raises(ValueError, match="no optax_lowprec state"):
    checkpoint.save(tmp_path / "new", params, optax.adam(1e-3).init(params))
  assert not (tmp_path / "new").exists()


# What Orbax's tasks had open when a read failed is closed by the garbage collector, after their event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("part", [0.5, "gone"])
def test_damaged_files(part, saved, tmp_path):
  """Files of a checkpoint in turn cut or gone: an error, or it was not needed and nothing differs.

  The record, one of Orbax's descriptions and one of each kind of its files; all with OPTAX_LOWPREC_ALL_ROWS=1.
  """
  path, params, state = saved
  files = sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file())
  kinds = {
      "record/metadata",
      "state/_METADATA",
      "state/manifest.ocdbt",
      "state/_sharding",
      "params/array_metadatas/process_0",
  }
  some = [f for f in files if f.as_posix() in kinds] + [f for f in files if "state/ocdbt" in f.as_posix()][:2]
  errors = []
  for i, name in enumerate(files if table.ALL_ROWS else some):
    copy = tmp_path / str(i)
    for p in files:
      (copy / p).parent.mkdir(parents=True, exist_ok=True)
      if p != name or part != "gone":
        data = (path / p).read_bytes()
        (copy / p).write_bytes(data[: int(len(data) * part)] if p == name else data)
    try:
      restored = checkpoint.restore(copy, _base(), structs(params))
    except CheckpointError as e:
      errors.append(str(e))
    else:
      table.assert_same_bits(restored, (params, state), str(name))
    gc.collect()
  assert len(errors) >= (5 if table.ALL_ROWS else 3)
  assert all(any(words in e for words in ("incomplete or damaged", "damaged record", "no record")) for e in errors)


def test_killed_during_a_save(tmp_path):
  """``python tests/kill_during_save.py`` does this 30 times; its result is in tests/data."""
  for seed in (100, 101):
    (tmp_path / str(seed)).mkdir()
    kill_during_save.run(seed, str(tmp_path / str(seed)))


def test_killed_during_a_save_is_on_record():
  result = json.loads(kill_during_save.RESULT.read_text())
  assert result["runs"] >= 30 and result["lost_checkpoints"] == 0
  assert result["killed_with_a_half_written_directory"] >= result["runs"] // 2


def test_no_pickle_and_no_evaluation():
  for module in (checkpoint, conversions, inspection):
    source = pathlib.Path(module.__file__).read_text()
    assert not re.search(r"\b(pickle|eval|exec|__import__|allow_pickle|import_module)\b\s*[(.=]", source)


# --- float32 and back -----------------------------------------------------------------------------------------------


def _values(state, params):
  return olp.master_params(state, params), olp.moments(state, params)


@pytest.mark.parametrize("name", SPECIALISED)
def test_export_and_import_lose_nothing(name):
  params, state = trained(name)
  leaves = list(checkpoint.export_float32(state, params))
  masters, (mu, nu) = _values(state, params)
  assert sorted(k for k, _ in leaves) == sorted(f"['{k}']" for k in SHAPES)
  for k, parts in leaves:
    for part, tree in (("master", masters), ("mu", mu), ("nu", nu)):
      x, right = parts[part], tree[k[2:-2]]
      assert isinstance(x, np.ndarray) and x.dtype == np.float32 and x.shape == right.shape and x.flags.writeable
      np.testing.assert_array_equal(x, right)
  new_params, new_state = checkpoint.import_float32(leaves[::-1], params, optimizer(name), 3)
  table.assert_same_bits(_values(new_state, new_params), _values(state, params))
  assert int(new_state.count) == 3 and jax.tree.structure(new_state) == jax.tree.structure(state)
  assert table.shapes_and_dtypes(new_state) == table.shapes_and_dtypes(state)
  again = checkpoint.import_float32(checkpoint.export_float32(new_state, new_params), params, optimizer(name), 3)
  table.assert_same_bits(again, (new_params, new_state))
  next_step(name, new_params, new_state)


@pytest.mark.parametrize("transform", [None, "sqrt"])
@pytest.mark.parametrize("dtype", table.DTYPES)
def test_encoding_what_was_decoded(dtype, transform):
  """New values get the codes that a step gives them; decoded ones come back the same, but for a scaled float32."""
  fmt = StateFormat(dtype, transform=transform)
  positive = transform == "sqrt"
  rng = np.random.default_rng(0)
  x = (rng.normal(size=(16, 300)) * 10 ** rng.uniform(-18, 5, size=(16, 1))).astype(np.float32)
  x = np.abs(x) if positive else x
  stored = jax.jit(lambda x: fmts.encode(x, fmt, positive=positive))(x)
  table.assert_same_bits(conversions._encode_jit(x, fmt, positive), stored)
  for rounding in table.ROUNDINGS:
    if rounding == "stochastic":
      noise = jnp.asarray(rng.integers(0, 2**32, size=x.shape, dtype=np.uint32))
      stored = fmts.encode(x, dataclasses.replace(fmt, rounding=rounding), positive=positive, noise32=noise)
    values = fmts.decode(*stored, fmt)
    again = fmts.decode(*conversions._encode_jit(values, fmt, positive), fmt)
    np.testing.assert_allclose(again, values, rtol=1e-6 if dtype == "float32" else 0)


def test_import_into_other_wrappers_and_formats():
  """The export of one optimizer, taken up by another; counts follow, leaves of others stay."""
  params, state = trained("f32_f32_f32")
  masked = {k: k != "b" for k in SHAPES}
  tx = optax.chain(optax.clip(1.0), optax.masked(optimizer("f32_fp8_fp8"), masked),
                   optax.scale_by_schedule(optax.constant_schedule(1.0)))  # fmt: skip
  leaves = [(k, x) for k, x in checkpoint.export_float32(state, params) if k != "['b']"]
  new_params, new_state = checkpoint.import_float32(iter(leaves), params, tx, 3)
  assert new_params["b"] is params["b"]
  assert jax.tree.structure(new_state) == jax.tree.structure(tx.init(params))
  assert int(new_state[2].count) == int(new_state[1].inner_state.count) == 3
  got, right = (olp.moments(s, params)[0]["w"] for s in (new_state, state))
  np.testing.assert_allclose(got, right, rtol=0.07, atol=1e-4)
  inject = optax.inject_hyperparams(olp.adamw)(learning_rate=0.5)
  _, injected = checkpoint.import_float32(checkpoint.export_float32(state, params), params, inject, 3)
  assert float(injected.hyperparams["learning_rate"]) == 0.5 and int(injected.count) == 3
  tx.update(params, new_state, params)


def test_import_of_wrong_leaves():
  params, state = trained("f32_f32_f32")
  tx = optimizer("f32_f32_f32")
  leaves = dict(checkpoint.export_float32(state, params))
  w = "['w']"

  def run(change):
    spoiled = {k: dict(v) for k, v in leaves.items()}
    change(spoiled)
    return checkpoint.import_float32(spoiled.items(), params, tx, 3)

  with pytest.raises(ValueError, match=r"\['w'\] is missing"):
    run(lambda x: x.pop(w))
  with pytest.raises(ValueError, match=r"\['x'\] is no leaf"):
    run(lambda x: x.update({"['x']": x[w]}))
  with pytest.raises(ValueError, match=r"\['w'\] has no 'nu'"):
    run(lambda x: x[w].pop("nu"))
  with pytest.raises(ValueError, match=r"\['w'\]: mu has shape \(2,\)"):
    run(lambda x: x[w].update(mu=np.zeros(2, np.float32)))
  with pytest.raises(ValueError, match=r"\['w'\]: nu has negative"):
    run(lambda x: x[w].update(nu=x[w]["nu"] - 1))
  with pytest.raises(ValueError, match=r"\['w'\] is there twice"):
    checkpoint.import_float32([*leaves.items(), (w, leaves[w])], params, tx, 3)


# --- optax ----------------------------------------------------------------------------------------------------------

_SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 10)
_MASK = {k: k not in ("b", "e") for k in SHAPES}
PAIRS = {
    "adamw": (optax.adamw(1e-2), olp.adamw),
    "adam": (optax.adam(1e-2), olp.adam),
    "nadamw": (optax.nadamw(1e-2), functools.partial(olp.adamw, nesterov=True)),
    "mu_dtype": (optax.adamw(1e-2, mu_dtype=jnp.bfloat16), olp.adamw),
    "schedule": (optax.adamw(_SCHEDULE), lambda lr, **k: olp.adamw(_SCHEDULE, **k)),
    "decay mask": (optax.adamw(1e-2, mask=_MASK), functools.partial(olp.adamw, mask=_MASK)),
    "clipped": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
                lambda lr, **k: optax.chain(optax.clip_by_global_norm(1.0), olp.adamw(lr, **k))),
    "clipped inside": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
                       functools.partial(olp.adamw, max_grad_norm=1.0)),
    "scale_by_adam": (optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(_SCHEDULE)),
                      lambda lr, master=None, **k: optax.chain(olp.scale_by_adam(**k),
                                                               optax.scale_by_learning_rate(_SCHEDULE))),
    "inject": (optax.inject_hyperparams(optax.adamw)(learning_rate=_SCHEDULE),
               lambda lr, **k: optax.inject_hyperparams(olp.adamw, static_args=tuple(k))(learning_rate=_SCHEDULE, **k)),
    "masked": (optax.masked(optax.adamw(1e-2), _MASK), lambda lr, **k: optax.masked(olp.adamw(lr, **k), _MASK)),
    "multi_steps": (optax.MultiSteps(optax.adamw(1e-2), 1).gradient_transformation(),
                    lambda lr, **k: optax.MultiSteps(olp.adamw(lr, **k), 1).gradient_transformation()),
    "ema behind": (optax.chain(optax.adam(1e-2), optax.ema(0.9)), lambda lr, **k: optax.chain(olp.adam(lr, **k),
                                                                                              optax.ema(0.9))),
}  # fmt: skip


@functools.cache
def _optax_run(name):
  return table.run_steps(PAIRS[name][0], table.tree(SHAPES), table.Gradients(SHAPES).at, 3, "jit")


@pytest.mark.parametrize("formats", [dict(mu="float32", nu="float32"), {}], ids=["float32", "float8"])
@pytest.mark.parametrize("name", PAIRS)
def test_from_optax_and_to_optax(name, formats):
  """At the same step, with the same moments; float32 formats lose nothing, and what others lost stays lost."""
  old, make = PAIRS[name]
  params, opt_state = _optax_run(name)
  tx = make(1e-2, min_quantized_size=0, **formats)
  state = checkpoint.from_optax(opt_state, params, tx)
  fresh = tx.init(params)
  assert jax.tree.structure(state) == jax.tree.structure(fresh)
  assert table.shapes_and_dtypes(state) == table.shapes_and_dtypes(fresh)
  assert all(int(s.count) == 3 for s in checkpoint.state_lib.find_states(state))
  back = checkpoint.to_optax(state, params, old)
  assert jax.tree.structure(back) == jax.tree.structure(opt_state)
  if formats:
    table.assert_same_bits(back, opt_state)
    new, _ = table.run_steps(tx, params, table.Gradients(SHAPES).at, 2, "jit", state=state)
    right, _ = table.run_steps(old, params, table.Gradients(SHAPES).at, 2, "jit", state=opt_state)
    for k in SHAPES:
      atol = 2e-4 if name == "mu_dtype" else 1e-5  # optax rounds to bfloat16 between these steps
      np.testing.assert_allclose(new[k], right[k], rtol=1e-4, atol=atol)
  elif name != "mu_dtype":
    table.assert_same_bits(olp.moments(checkpoint.from_optax(back, params, tx), params), olp.moments(state, params))
  else:  # A float8 code times its scale is more than a bfloat16 holds.
    mu, right = (np.asarray(x[0].mu["w"].astype(jnp.float32)) for x in (back, opt_state))
    np.testing.assert_allclose(mu, right, rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("name", SPECIALISED)
def test_to_optax_and_back_loses_nothing(name):
  """Every combination's moments, with masters carried as optax's float32 parameters."""
  params, state = trained(name)
  opt_state = checkpoint.to_optax(state, params, optax.adamw(1e-2))
  masters = olp.master_params(state, params)
  new = checkpoint.from_optax(opt_state, params, optimizer(name))
  table.assert_same_bits(olp.moments(new, params), olp.moments(state, params))
  narrow, new = olp.with_master_params(new, params, masters)
  assert int(new.count) == 3
  if name not in ("bf16_f16_fp8_fp8", "bf16_f16_fp8_f16", "tensor"):  # import_float32 keeps scaled masters exactly
    table.assert_same_bits(olp.master_params(new, narrow), masters)


def test_numpy_states_from_optax():
  """A float32 checkpoint on the host becomes our state on the device, without having been there."""
  params, opt_state = _optax_run("adamw")
  host = jax.tree.map(np.asarray, opt_state)
  tx = olp.adamw(1e-2, min_quantized_size=0)
  table.assert_same_bits(checkpoint.from_optax(host, params, tx), checkpoint.from_optax(opt_state, params, tx))


def test_from_optax_refuses():
  params, opt_state = _optax_run("adamw")
  tx = olp.adamw(1e-2)
  with pytest.raises(ValueError, match=r"no state of optax\.adam"):
    checkpoint.from_optax(optax.sgd(0.1).init(params), params, tx)
  with pytest.raises(ValueError, match="no optax_lowprec state"):
    checkpoint.from_optax(opt_state, params, optax.adamw(1e-2))
  with pytest.raises(ValueError, match=r"\['b'\] is in the old optimizer's state and not in the new"):
    checkpoint.from_optax(opt_state, {k: p for k, p in params.items() if k != "b"}, tx)
  with pytest.raises(ValueError, match=r"\['w'\]: optax's mu has shape \(4, 257\), the parameter has \(4, 256\)"):
    checkpoint.from_optax(opt_state, {**params, "w": params["w"][:, :256]}, tx)
  with pytest.raises(ValueError, match="arrays beside Adam's state that the old one has not"):
    checkpoint.from_optax(opt_state, params, optax.chain(tx, optax.ema(0.9)))
  other = (opt_state[0], *opt_state[1:-1], optax.ScaleByScheduleState(count=jnp.int32(7)))
  with pytest.raises(ValueError, match="schedule is at step 7, Adam at step 3"):
    checkpoint.from_optax(other, params, tx)
  twice = optax.multi_transform({"x": optax.adam(1e-2), "y": optax.adam(1e-2)}, {k: "xy"[k == "b"] for k in SHAPES})
  with pytest.raises(ValueError, match="2 Adam states inside, the new one 1"):
    checkpoint.from_optax(twice.init(params), params, tx)


def test_from_optax_in_the_middle_of_training():
  """A small classifier of noisy clusters: 100 steps by optax, 100 more by each; the same loss."""
  rng = np.random.default_rng(0)
  centers = rng.normal(size=(10, 64)).astype(np.float32)
  labels = rng.integers(0, 10, size=2048)
  inputs = centers[labels] + 1.5 * rng.normal(size=(2048, 64)).astype(np.float32)
  data, labels = jnp.asarray(inputs), jnp.asarray(labels)
  init = {"a": jnp.asarray(rng.normal(size=(64, 128)).astype(np.float32) / 8),
          "b": jnp.asarray(rng.normal(size=(128, 10)).astype(np.float32) / 12)}  # fmt: skip

  def loss(params, x, y):
    logits = jax.nn.relu(x @ params["a"].astype(jnp.float32)) @ params["b"].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  def train(tx, params, state, first, steps):
    def step(carry, t):
      p, s = carry
      batch = jax.random.randint(jax.random.key(t), (64,), 0, 2048)
      p, s = olp.apply_gradients(tx, jax.grad(loss)(p, data[batch], labels[batch]), s, p)
      return (p, s), None

    return jax.jit(lambda c: jax.lax.scan(step, c, first + jnp.arange(steps))[0])((params, state))

  old = optax.adamw(2e-3, weight_decay=0.01)
  params, opt_state = train(old, init, old.init(init), 0, 100)
  at_100 = float(loss(params, data, labels))
  right = float(loss(train(old, params, opt_state, 100, 100)[0], data, labels))
  other_batches = float(loss(train(old, params, opt_state, 1000, 100)[0], data, labels))
  tx = olp.adamw(2e-3, weight_decay=0.01)
  ours = train(tx, params, checkpoint.from_optax(opt_state, params, tx), 100, 100)
  narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
  narrow, state = olp.with_master_params(checkpoint.from_optax(opt_state, narrow, tx), narrow, params)
  narrow_ours = train(tx, narrow, state, 100, 100)
  noise = max(abs(other_batches - right), 0.01 * right)
  for got in (ours, narrow_ours):
    assert abs(float(loss(got[0], data, labels)) - right) < noise, (at_100, right, other_batches)
  assert right < 0.9 * at_100
  # And back: optax goes on from our state.
  masters = olp.master_params(ours[1], ours[0])
  more = train(old, masters, checkpoint.to_optax(ours[1], ours[0], old), 200, 50)
  assert float(loss(more[0], data, labels)) < right


def test_float64_parameters(tmp_path):
  """They stay float64 everywhere, and our float32 formats beside them too."""
  with table.x64():
    params = {"w": jnp.linspace(0, 1, 300, dtype=jnp.float64), "v": jnp.ones((64,), jnp.float32)}
    old, tx = optax.adamw(1e-2), olp.adamw(1e-2, min_quantized_size=0)
    _, opt_state = old.update(params, old.init(params), params)
    state = checkpoint.from_optax(opt_state, params, tx)
    assert table.shapes_and_dtypes(state) == table.shapes_and_dtypes(tx.init(params))
    back = checkpoint.to_optax(state, params, old)
    table.assert_same_bits((back[0].mu["w"], back[0].nu["w"]), (opt_state[0].mu["w"], opt_state[0].nu["w"]))
    leaves = dict(checkpoint.export_float32(state, params))
    assert leaves["['w']"]["mu"].dtype == np.float64 and leaves["['v']"]["mu"].dtype == np.float32
    table.assert_same_bits(checkpoint.import_float32(leaves.items(), params, tx, 1), (params, state))
    checkpoint.save(tmp_path / "c", params, state)
    table.assert_same_bits(checkpoint.restore(tmp_path / "c", tx, structs(params)), (params, state))
    assert len(inspection.inspect(tmp_path / "c").rows) == 6


# --- other formats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "exact"),
    [
        ("bf16_remainder16_fp8_fp8", "bf16_f32_f32_f32", True),
        ("bf16_remainder8_fp8_fp8", "bf16_remainder16_fp8_f16", False),
        ("bf16_f16_fp8_fp8", "bf16_f32_f32_f32", True),
        ("stochastic", "bf16_remainder16_fp8_fp8", True),
        ("bf16_remainder16_fp8_fp8", "tensor", False),
        ("f32_f32_f32", "f32_fp8_f16", False),
        ("tensor", "bf16_remainder8_fp8_fp8", False),
    ],
)
def test_convert(old, new, exact):
  """Into formats that hold as much nothing is lost, there and back; else what rounding allows."""
  params, state = trained(old)
  tx_old, tx_new = optimizer(old), optimizer(new)
  chained = [optax.chain(optax.ema(0.5), tx) for tx in (tx_old, tx_new)]
  ema = optax.EmaState(count=jnp.int32(3), ema=params)
  new_params, (ema_after, new_state) = checkpoint.convert((ema, state), params, *chained)
  assert ema_after.ema["w"] is params["w"]
  assert jax.tree.structure(new_state) == jax.tree.structure(tx_new.init(params))
  assert table.shapes_and_dtypes(new_state) == table.shapes_and_dtypes(tx_new.init(params))
  assert int(new_state.count) == 3
  before, after = _values(state, params), _values(new_state, new_params)
  if exact:
    table.assert_same_bits(after, before)
  else:
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
      np.testing.assert_allclose(y, x, rtol=0.15, atol=0.01 * float(np.abs(x).max(initial=0)))
  back = checkpoint.convert(new_state, new_params, tx_new, tx_old)
  if exact:
    table.assert_same_bits(_values(back[1], back[0]), before)
  next_step(new, new_params, new_state)


def test_convert_hands_on_what_stays():
  params, state = trained("bf16_remainder16_fp8_fp8")
  tx_old, tx_new = optimizer("bf16_remainder16_fp8_fp8"), optimizer("bf16_remainder16_fp8_f16")
  new_params, new = checkpoint.convert(state, params, tx_old, tx_new)
  for k in NOT_EMPTY:
    assert new.mu[k] is state.mu[k] and new.master[k] is state.master[k] and new_params[k] is params[k]
    assert new.nu[k].dtype == jnp.float16


def test_convert_from_the_host(tmp_path):
  """Restored as numpy arrays, converted onto the device leaf by leaf."""
  params, state = trained("tensor")
  checkpoint.save(tmp_path / "c", params, state)
  host = checkpoint.restore(tmp_path / "c", optimizer("tensor"), jax.tree.map(np.asarray, params))
  names = ("tensor", "bf16_remainder16_fp8_fp8")
  got = checkpoint.convert(host[1], params, *map(optimizer, names))
  table.assert_same_bits(got, checkpoint.convert(state, params, *map(optimizer, names)))


def test_convert_refuses():
  params, state = trained("tensor")
  with pytest.raises(ValueError, match="not one of tx_old"):
    checkpoint.convert(state, params, optimizer("stochastic"), optimizer("tensor"))
  with pytest.raises(ValueError, match="wrap both alike"):
    checkpoint.convert(state, params, optimizer("tensor"), optax.chain(optimizer("tensor"), optax.ema(0.9)))


# --- in pieces ------------------------------------------------------------------------------------------------------


def _converted(name):
  """Everything that can be made of a combination's state."""
  params, state = trained(name)
  leaves = list(checkpoint.export_float32(state, params))
  opt_state = checkpoint.to_optax(state, params, optax.adamw(1e-2, mu_dtype=jnp.bfloat16))
  raw = table.tree(SHAPES)  # as no format holds it
  values = lambda k: np.asarray(raw[k])
  moments = {k: dict(master=values(k), mu=values(k), nu=np.square(values(k))) for k in SHAPES}
  imported = checkpoint.import_float32(((f"['{k}']", x) for k, x in moments.items()), params, optimizer(name), 3)
  new = "tensor" if name != "tensor" else "bf16_f32_f32_f32"
  others = checkpoint.convert(state, params, optimizer(name), optimizer(new))
  back = [checkpoint.import_float32(leaves, params, optimizer(name), 3),
          checkpoint.from_optax(opt_state, params, optimizer(name)),
          checkpoint.from_optax(jax.tree.map(np.asarray, opt_state), params, optimizer(name))]  # fmt: skip
  return jax.tree.map(np.array, (dict(leaves), opt_state, imported, others, back))


@pytest.mark.parametrize("name", ["bf16_remainder16_fp8_fp8", "tensor"])
def test_pieces_have_the_bits_of_the_whole(name, monkeypatch):
  whole = _converted(name)
  monkeypatch.setattr(pieces, "PIECE", 200)
  assert len(pieces.pieces(SHAPES["w"], None, [StateFormat("float8_e4m3fn")])) == 8
  table.assert_same_bits(_converted(name), whole)


_LONG = [(5000,), (1, 5000), (3, 5, 300), (2, 3, 4, 40), (64, 5), (40, 3, 3, 7), (3, 1, 700), (1000, 1), (7, 2001)]


@pytest.mark.parametrize("shape", _LONG, ids=str)
def test_pieces_of_every_geometry(shape, monkeypatch):
  """Between blocks, each element once, and with the leaf's blocks."""
  monkeypatch.setattr(pieces, "PIECE", 256)
  rng = np.random.default_rng(0)
  x = (rng.normal(size=shape) * 10 ** rng.uniform(-3, 3, size=shape)).astype(np.float32)
  for size in (1, 7, 100, 128, 4096):
    fmt = StateFormat("float8_e4m3fn", block_size=size)
    cut = pieces.pieces(shape, x, [fmt, StateFormat("float16", block_size=24)])
    seen = np.zeros(shape, int)
    scales = np.zeros(fmts.scale_shape(shape, fmt), int)
    for index in cut:
      seen[... if index is None else index] += 1
      scales[... if index is None else pieces.scale_index(index, shape, fmt)] += 1
    assert (seen == 1).all() and (scales == 1).all()
    if size <= 128:
      assert len(cut) >= x.size // (3 * 256)
  fmt = StateFormat("float8_e4m3fn", block_size=100)
  table.assert_same_bits(conversions._encode(x, fmt, x), conversions._encode_jit(x, fmt, False))


def test_conversions_on_a_mesh():
  """Of leaves that are cut over devices, which are not taken apart: the bits of one device, cut as the parameters."""
  mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  params = table.tree({"w": (8, 1024)}, jnp.bfloat16)
  sharded = jax.device_put(params, NamedSharding(mesh, P("x", "y")))
  opt_state = optax.adamw(1e-2).init(table.tree({"w": (8, 1024)}))
  opt_state = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) ** 2, opt_state)
  tx, wide = olp.adamw(1e-2), olp.adamw(1e-2, mu="float32", nu=StateFormat("float8_e4m3fn", "tensor", transform="sqrt"))

  def run(p):
    state = checkpoint.from_optax(opt_state, p, tx)
    wider = checkpoint.convert(state, p, tx, wide)
    return state, wider, checkpoint.import_float32(checkpoint.export_float32(state, p), p, tx, 1)

  got = run(sharded)
  table.assert_same_bits(got, run(params))
  for x in (got[0].mu["w"], got[1][1].mu["w"], got[2][0]["w"], got[2][1].master["w"]):
    assert x.sharding.spec == P("x", "y")


def test_scratch_of_a_piece():
  """What the compiler sets aside for encoding a piece, in bytes an element: the reason for pieces."""
  for fmt in (StateFormat("float8_e4m3fn"), StateFormat("float8_e4m3fn", "tensor", transform="sqrt")):
    x = jax.ShapeDtypeStruct((pieces.PIECE // 2048, 2048), jnp.float32)
    compiled = conversions._encode_jit.lower(x, fmt, True).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 16 * pieces.PIECE
  assert len(pieces.pieces((1024, 2048), None, [])) == 1 and len(pieces.pieces((32000, 2048), None, [])) == 31
  for dtype in ("float8_e4m3fn", "bfloat16", "float32"):
    big, small = (jax.ShapeDtypeStruct((n, 2048), dtype) for n in (32000, 1024))
    compiled = pieces._update_jit.lower(big, small, np.zeros(2, np.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 2**16  # in place


# --- memory ---------------------------------------------------------------------------------------------------------

_MANY = {f"w{i}": (64, 512) for i in range(8)}
_LEAF_BYTES = 4 * 64 * 512


def _live():
  return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


@pytest.fixture
def peak(monkeypatch):
  """The most bytes in live arrays whenever a leaf was read or written."""
  seen = []
  for name in ("_write", "_values"):
    original = getattr(conversions, name)

    def spy(*args, original=original):
      out = original(*args)
      seen.append(_live())
      return out

    monkeypatch.setattr(conversions, name, spy)
  return seen


def _conversions():
  params = table.tree(_MANY)
  old = optax.adamw(1e-2)
  tx = olp.adamw(1e-2, min_quantized_size=0)
  wide = olp.adamw(1e-2, mu="float32", nu="float32")
  yield "from_optax", old.init(params), lambda s: checkpoint.from_optax(s, params, tx, donate=True)
  yield "to_optax", tx.init(params), lambda s: checkpoint.to_optax(s, params, old, donate=True)
  yield "narrower", wide.init(params), lambda s: checkpoint.convert(s, params, wide, tx, donate=True)[1]
  yield "wider", tx.init(params), lambda s: checkpoint.convert(s, params, tx, wide, donate=True)[1]


@pytest.mark.parametrize("index", range(4), ids=["from_optax", "to_optax", "narrower", "wider"])
def test_donated_conversions_hold_no_second_state(index, peak):
  """Never more than the larger of the two states and a leaf's worth besides; all of the old one is freed."""
  _, state, run = list(_conversions())[index]
  before, size = _live(), sum(x.nbytes for x in jax.tree.leaves(state))
  new = run(state)
  new_size = sum(x.nbytes for x in jax.tree.leaves(new))
  assert max(peak) <= before - size + max(size, new_size) + 3 * _LEAF_BYTES
  kept = {id(x) for x in jax.tree.leaves(new)}
  for x in jax.tree.leaves(state):
    assert x.is_deleted() or id(x) in kept or x.nbytes <= _LEAF_BYTES // 128
  jax.block_until_ready(new)


def test_nothing_is_freed_without_donation_or_after_an_error():
  params, opt_state = _optax_run("adamw")
  checkpoint.from_optax(opt_state, params, olp.adamw(1e-2))
  with pytest.raises(ValueError, match="beside"):
    checkpoint.from_optax(opt_state, params, optax.chain(olp.adamw(1e-2), optax.ema(0.9)), donate=True)
  assert not any(x.is_deleted() for x in jax.tree.leaves(opt_state))


@pytest.mark.parametrize("name", ["f32_fp8_fp8", "bf16_remainder16_fp8_fp8"])
def test_no_buffer_is_twice_in_what_was_converted(name):
  """Else the next step could not donate it. Small leaves have several parts of the same shape that nothing reads."""
  params, state = trained(name)
  tx, small = optimizer(name), optimizer(name, min_quantized_size=4096)
  optax_state = checkpoint.to_optax(state, params, optax.adamw(1e-2))
  leaves = dict(checkpoint.export_float32(state, params))
  for new in (
      checkpoint.from_optax(optax_state, params, small),
      checkpoint.convert(state, params, tx, small),
      checkpoint.import_float32(leaves.items(), params, small, 3),
      olp.with_master_params(small.init(params), params, olp.master_params(state, params)),
  ):
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(new) if x.size]
    assert len(set(pointers)) == len(pointers)


def test_export_and_import_hold_one_leaf(peak):
  params = table.tree(_MANY)
  tx = olp.adamw(1e-2, min_quantized_size=0)
  state = tx.init(params)
  before = _live()
  for _ in checkpoint.export_float32(state, params):
    pass
  assert max(peak) <= before + 2 * _LEAF_BYTES
  leaves = ((f"['{k}']", {part: np.ones(s, np.float32) for part in ("master", "mu", "nu")}) for k, s in _MANY.items())
  peak.clear()
  new = checkpoint.import_float32(leaves, params, tx, 1)
  assert max(peak) <= before + sum(x.nbytes for x in jax.tree.leaves(new)) + 3 * _LEAF_BYTES


def test_host_memory():
  """Between steps the state may be in pinned host memory; the next step is the same."""
  name = "stochastic"
  params, state = jax.tree.map(jnp.copy, trained(name))
  kinds = [m.kind for m in jax.devices()[0].addressable_memories()]
  if "pinned_host" not in kinds:
    with pytest.raises(ValueError, match="have no pinned_host memory"):
      checkpoint.to_host(state)
    return
  host = checkpoint.to_host(state, donate=True)
  for x, old in zip(jax.tree.leaves(host), jax.tree.leaves(state), strict=True):
    assert x.sharding.memory_kind == "pinned_host" and old.is_deleted()
  back = checkpoint.to_device(host)
  assert {x.sharding.memory_kind for x in jax.tree.leaves(back)} == {jax.devices()[0].default_memory().kind}
  assert checkpoint.to_device(back).mu["w"] is back.mu["w"]
  table.assert_same_bits(back, trained(name)[1])
  table.assert_same_bits(next_step(name, params, back), next_step(name, *trained(name)))


def _memory_kinds():
  return [m.kind for m in jax.devices()[0].addressable_memories()]


@pytest.mark.skipif(
    "pinned_host" not in _memory_kinds(), reason="no pinned_host memory: test_host_memory has the error"
)
@pytest.mark.skipif(jax.default_backend() == "cpu", reason="the CPU's pinned_host is the memory that it computes in")
@pytest.mark.parametrize("name", ["bf16_remainder16_fp8_fp8", "f32_fp8_fp8", "stochastic"])
def test_a_run_with_its_state_in_host_memory(name, implementation):
  """The step of docs/checkpoints.md, which fetches the state and puts it back, has the bits of one that does not."""
  tx = optimizer(name, implementation=implementation)
  params = {"w": table.tree({"w": (64, 1024)}, SPECIALISED[name][0])["w"]}
  grads = [table.Gradients({"w": (64, 1024)}).at(t, params) for t in range(4)]
  plain = jax.jit(lambda g, s, p: olp.apply_gradients(tx, g, s, p))
  right_params, right = params, tx.init(params)
  state = tx.init(params)
  host = jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), state)
  device = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), state)

  @functools.partial(
      jax.jit, donate_argnums=(1, 2), in_shardings=(None, host, None),
      out_shardings=(jax.tree.map(lambda p: p.sharding, params), host),
  )  # fmt: skip
  def step(grads, state, params):
    return olp.apply_gradients(tx, grads, jax.device_put(state, device), params)

  params, state = jax.tree.map(jnp.copy, params), checkpoint.to_host(state, donate=True)
  for g in grads:
    right_params, right = plain(g, right, right_params)
    params, state = step(g, state, params)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(params)} == {"device"}
    # Of a copy: NumPy would look at the host memory itself, and what is looked at cannot be donated.
    table.assert_same_bits((params, jax.device_put(state, device)), (right_params, right))


def test_memory_that_is_not_there():
  state = trained("stochastic")[1]
  with pytest.raises(ValueError, match="devices have no moon memory"):
    checkpoint._move(state, "moon", True)
  assert not any(x.is_deleted() for x in jax.tree.leaves(state))


# --- the command and bars -------------------------------------------------------------------------------------------


def test_inspect(tmp_path, capsys):
  name = "bf16_f16_fp8_f16"
  params, state = trained(name)
  checkpoint.save(tmp_path / "c", params, (optax.EmptyState(), state))
  assert cli.main(["inspect", str(tmp_path / "c")]) == 0
  text = capsys.readouterr().out
  for word in ("step 3", "['w']", "float8_e4m3fn block 128", "float16 block 128", "4x257", "saturated"):
    assert word in text
  found = inspection.inspect(tmp_path / "c")
  assert found.counts == (3,) and found.parameter_bytes == sum(p.nbytes for p in params.values())
  masters, (mu, nu) = _values(state, params)
  rows = {(r.leaf, r.part): r for r in found.rows}
  assert len(rows) == 3 * len(SHAPES)
  for part, tree in (("master", masters), ("mu", mu), ("nu", nu)):
    r, x, q = rows["['w']", part], np.asarray(tree["w"]), np.asarray(getattr(state, part)["w"])
    assert (r.low, r.high) == (x.min(), x.max())
    assert r.bytes == q.nbytes + 4 * 4 * 3
    assert r.zero == np.mean(x == 0)
    assert r.saturated == np.mean(np.abs(q.astype(np.float32)) == float(jnp.finfo(q.dtype).max))
  assert rows["['w']", "mu"].saturated > 0


@pytest.mark.parametrize("name", ["f32_fp8_fp8", "bf16_remainder8_fp8_fp8", "tensor", "f32_f32_f32"])
def test_inspect_finds_every_kind_of_master(name, tmp_path):
  params, state = trained(name)
  checkpoint.save(tmp_path / "c", params, state)
  masters = olp.master_params(state, params)
  for r in inspection.inspect(tmp_path / "c").rows:
    if r.part == "master" and r.leaf == "['w']":
      assert (r.low, r.high) == (masters["w"].min(), masters["w"].max())


def test_inspect_says_what_is_wrong(tmp_path, capsys):
  assert cli.main(["inspect", str(tmp_path / "none")]) == 1
  assert "no such directory" in capsys.readouterr().err


def test_inspect_as_a_command(saved):
  done = in_a_process("-m", "optax_lowprec", "inspect", str(saved[0]))
  assert "remainder16" in done.stdout and "step 0" in done.stdout and done.stderr == ""


def test_bars(capsys, monkeypatch):
  params, state = trained("f32_fp8_fp8")
  list(checkpoint.export_float32(state, params))
  assert capsys.readouterr().err == ""
  list(checkpoint.export_float32(state, params, progress=True))
  assert "export" in capsys.readouterr().err
  monkeypatch.setitem(sys.modules, "tqdm", None)
  with pytest.raises(ImportError, match=r"needs tqdm: pip install 'optax-lowprec\[checkpoint\]'"):
    checkpoint.export_float32(state, params, progress=True)


def test_without_orbax(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
  params, state = trained("f32_fp8_fp8")
  with pytest.raises(ImportError, match=r"pip install 'optax-lowprec\[checkpoint\]'"):
    checkpoint.save(tmp_path / "c", params, state)
  checkpoint.check(checkpoint.record(state, params), optimizer("f32_fp8_fp8"), params)
