"""Every mistake has an error that names the leaf, and changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import table

import optax_lowprec as olp
from optax_lowprec import StateFormat

CONSTRUCTION = {
    "unknown_dtype": (dict(mu="float9"), "mu.*float9"),
    "unknown_nu_dtype": (dict(nu="int4"), "nu.*int4"),
    "unknown_master": (dict(master="remainder4"), "master.*remainder4"),
    "integer_dtype": (dict(mu=jnp.int8), "mu.*int8"),
    "no_mu": (dict(mu=None), "mu=None"),
    "mu_as_remainder": (dict(mu="remainder16"), "only the master"),
    "sqrt_of_mu": (dict(mu=StateFormat("float32", None, transform="sqrt")), "mu has negative values"),
    "sqrt_of_master": (dict(master=StateFormat("float32", None, transform="sqrt")), "master has negative values"),
    "master_in_unscaled_float8": (dict(master=StateFormat("float8_e4m3fn", None)), "cannot hold a master"),
    "unknown_implementation": (dict(implementation="tpu"), "implementation.*tpu"),
    "fractional_size": (dict(min_quantized_size=1.5), "min_quantized_size"),
    "bool_size": (dict(min_quantized_size=True), "min_quantized_size"),
    "seed": (dict(seed=0.5), "seed"),
}


@pytest.mark.parametrize("case", CONSTRUCTION)
def test_refused_when_made(case):
  keywords, message = CONSTRUCTION[case]
  with pytest.raises(ValueError, match=message):
    olp.adamw(1e-3, **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (dict(dtype="float7"), "float7"),
        (dict(dtype="float32", scaling="row"), "scaling"),
        (dict(dtype="float32", block_size=0), "block_size"),
        (dict(dtype="float32", block_size=-128), "block_size"),
        (dict(dtype="float32", block_size=1.5), "block_size"),
        (dict(dtype="float32", transform="log"), "transform"),
        (dict(dtype="float32", rounding="up"), "rounding"),
    ],
)
def test_state_format_refuses(keywords, message):
  with pytest.raises(ValueError, match=message):
    StateFormat(**keywords)


def test_unavailable_implementation_says_how_to_get_it():
  missing = set(olp.implementations.NAMES) - set(olp.available_implementations())
  for name in missing:
    with pytest.raises(ValueError, match=f"{name}.*not available"):
      olp.adamw(1e-3, implementation=name)
  assert "jnp" in olp.available_implementations()


PARAMETERS = {
    "complex": (dict(w=jnp.ones((2,), jnp.complex64)), "w.*complex"),
    "float8": (dict(w=jnp.ones((2,), jnp.float8_e5m2)), "w.*float8_e5m2"),
    "python_float": (dict(w=1.0), "w.*float"),
    "function": (dict(w=jax.nn.relu), "w.*not an array"),
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_parameters_refused_by_name(case):
  params, message = PARAMETERS[case]
  with pytest.raises(TypeError, match=message):
    olp.adamw(1e-3).init({"good": jnp.ones(3), **params})


FORMATS_BY_LEAF = {
    "unknown": (lambda path, leaf: "float9", r"\['a'\].*float9"),
    "callable_of_a_callable": (lambda path, leaf: lambda *_: "float32", r"\['a'\].*callable"),
    "none": (lambda path, leaf: None, r"\['a'\].*mu=None"),
}


@pytest.mark.parametrize("case", FORMATS_BY_LEAF)
def test_bad_format_by_leaf_is_named(case):
  by_leaf, message = FORMATS_BY_LEAF[case]
  with pytest.raises(ValueError, match=message):
    olp.adamw(1e-3, mu=by_leaf).init({"a": jnp.ones((8, 8))})


def _good():
  params = {"a": jnp.ones((8, 64)), "b": {"c": jnp.ones((3,))}}
  tx = olp.adamw(1e-2, min_quantized_size=0)
  return tx, params, tx.init(params)


STEPS = {
    "no_params": (lambda p: (p, None), ValueError, "needs the parameters"),
    "missing_leaf": (lambda p: ({"a": p["a"]}, p), ValueError, r"no leaf \['b'\]\['c'\]"),
    "extra_leaf": (lambda p: ({**p, "z": p["a"]}, p), ValueError, r"leaf \['z'\]"),
    "other_container": (lambda p: ((p["a"], p["b"]), p), ValueError, r"no leaf \['a'\]"),
    "other_shape": (lambda p: ({**p, "a": jnp.ones((8, 63))}, p), ValueError, r"\['a'\].*\(8, 63\).*\(8, 64\)"),
    "broadcastable_shape": (lambda p: ({**p, "a": jnp.ones((1, 64))}, p), ValueError, r"\['a'\].*\(1, 64\)"),
    "integer_gradient": (lambda p: ({**p, "a": jnp.ones((8, 64), int)}, p), TypeError, r"\['a'\].*int32"),
    "complex_gradient": (lambda p: ({**p, "a": jnp.ones((8, 64), complex)}, p), TypeError, r"\['a'\].*complex64"),
    "parameters_of_another_shape": (
        lambda p: 2 * ({**p, "a": jnp.ones((16, 64))},), ValueError, r"\['a'\].*16, 64.*not stored in"),
    "parameters_of_another_dtype": (
        lambda p: 2 * ({**p, "a": jnp.ones((8, 64), jnp.bfloat16)},), ValueError, r"\['a'\].*bfloat16.*not stored in"),
    "more_parameters": (lambda p: 2 * ({**p, "z": p["a"]},), ValueError, "leaves"),
}  # fmt: skip


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case", STEPS)
def test_bad_step_names_the_leaf_and_changes_nothing(case, jit):
  make, error, message = STEPS[case]
  tx, params, state = _good()
  grads, given = make(params)
  before = jax.tree.map(np.array, (params, state))
  update = jax.jit(tx.update) if jit else tx.update
  with pytest.raises(error, match=message):
    update(grads, state, given)
  if given is not None:
    with pytest.raises(error, match=message):
      olp.apply_gradients(tx, grads, state, given)
  table.assert_same_bits((params, state), before)
  tx.update(params, state, params)  # still good


def test_state_of_another_optimizer():
  tx, params, state = _good()
  with pytest.raises(ValueError, match="LowPrecisionAdamState"):
    tx.update(params, optax.adamw(1e-3).init(params), params)
  with pytest.raises(ValueError, match="stored as"):
    olp.adamw(1e-3, mu="float16", min_quantized_size=0).update(params, state, params)
  with pytest.raises(ValueError, match="another optimizer"):
    olp.master_params(optax.adamw(1e-3).init(params), params)


def test_bad_mask():
  params = {"a": jnp.ones((8, 64)), "b": jnp.ones((3,))}
  tx = olp.adamw(1e-2, mask={"a": True})
  with pytest.raises(ValueError, match="mask"):
    tx.update(params, tx.init(params), params)


def test_reading_with_other_parameters():
  tx, params, state = _good()
  with pytest.raises(ValueError, match=r"\['b'\]\['c'\]"):
    olp.master_params(state, {"a": params["a"]})
  with pytest.raises(ValueError, match=r"\['a'\].*shape"):
    olp.with_master_params(state, params, {**params, "a": jnp.ones((8, 63))})
  with pytest.raises(ValueError, match=r"\['a'\].*missing"):
    olp.with_master_params(state, params, {"b": params["b"]})
