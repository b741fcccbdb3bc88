"""What Python and the native modules call by name: rules, modes, and lists whose order both know."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import optimizers
from jax_tt._base import ffi
from jax_tt._directories import cache_directory, hash_directory
from jax_tt._native.operands import hyper_operand
from jax_tt._table.options import BOUNDS
from jax_tt.optimizers import counted_adagrad
from tests.conftest import native_available

MODULES = [
    pytest.param(
        platform,
        marks=pytest.mark.skipif(not native_available(platform), reason="the module is not built"),
    )
    for platform in ("cpu", "cuda_emulated")
]


@pytest.mark.parametrize("platform", MODULES)
def test_modules_have_the_same_names(platform):
    module: Any = ffi.load(platform)
    assert set(module.rules()) == set(optimizers.RULES)
    lists = module.lists()
    assert set(lists.pop("bounds")) == {*BOUNDS, "poison"}
    assert set(lists.pop("hash checks")) == set(hash_directory.SAFE_CHECKS)
    assert set(lists.pop("cache policies")) == set(cache_directory.POLICIES)
    assert set(lists.pop("hash policies")) == set(hash_directory.POLICIES)
    assert lists == {
        "hash counts": list(hash_directory.COUNTERS),
        "cache observed": list(cache_directory.OBSERVED),
        "cache populated": list(cache_directory.POPULATED),
        "counter rates": list(counted_adagrad._RATES),
        "counter decays": list(counted_adagrad._DECAYS),
    }


# Options with which a rule of the library has another native rule.
OPTIONS: dict[str, Any] = {
    "RegularizedRowWiseAdagrad": {"max_norm": 1.0},
    "DecayedAdam": {"weight_decay": 0.1},
    "RowWiseCorrectedAdam": {"rowwise_bias_correction": True},
}


@pytest.mark.parametrize("platform", MODULES)
def test_hyperparameters_have_the_names_of_the_fields_in_cpp(platform):
    for kind, owner in optimizers.RULES.items():
        made: Any = owner
        rule = made(0.1, **OPTIONS.get(kind, {}))
        assert rule.kind == kind
        found = ffi.rule(platform, kind)
        assert found is not None and len(set(found.hyperparameters)) == len(found.hyperparameters)
        given = rule.hyperparameters(jnp.float32(3))
        array = hyper_operand(platform, rule, dict(reversed(given.items())))
        np.testing.assert_array_equal(array, [given[name] for name in found.hyperparameters])


@dataclasses.dataclass(frozen=True)
class Mine(optimizers.Optimizer):
    """Steps by the sign of the gradient; not what any native rule does."""

    learning_rate: float
    native_kind = "LarsSgd"

    @property
    def slots(self):
        return (optimizers.Slot("momentum", False, 0.0),)

    def update_rows(self, rows, grads, slots, hyper):
        return rows - hyper["learning_rate"] * jnp.sign(grads), slots


class Twice(optimizers.SGD):
    """A rule of the library with another step."""

    def update_rows(self, rows, grads, slots, hyper):
        return rows - 2 * hyper["learning_rate"] * grads, slots


class Faster(optimizers.SGD):
    """A rule of the library with another hyper-parameter."""

    def hyperparameters(self, step):
        return {"learning_rate": 2 * super().hyperparameters(step)["learning_rate"]}


def stepped(rule, method, train=False):
    train_table = jax_tt.tt_table(40, 4, tt_ranks=2, optimizer=rule)
    table = train_table if train else jax_tt.dense_table(4, 2, optimizer=rule)

    def loss(state):
        return jnp.sum(jax_tt.lookup_bags(table, state, jnp.array([[1]]), method=method)[0])

    after = jax.jit(jax.grad(loss))(table.init(jax.random.key(0)))
    return after[table.spec.param_names[0]]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("platform", MODULES)
def test_a_native_rule_of_another_class_is_refused(platform, train):
    method = "native" if platform == "cpu" else platform
    for rule, owner in ((Mine(0.1), "LARSSGD"), (Twice(0.1), "SGD")):
        with pytest.raises(ValueError, match=r"not those of .*\.update_rows") as caught:
            stepped(rule, method, train)
        assert owner in str(caught.value)
        assert np.all(np.isfinite(stepped(rule, "reference", train)))
    np.testing.assert_array_equal(
        stepped(Faster(0.1), method, train), stepped(optimizers.SGD(0.2), method, train)
    )


@pytest.mark.parametrize("platform", MODULES)
def test_a_rule_that_the_module_does_not_have_is_refused(platform, monkeypatch):
    method = "native" if platform == "cpu" else platform
    nobody = type("Nobody", (optimizers.SGD,), {"native_kind": "Nobody"})(0.1)
    with pytest.raises(ValueError, match="'Nobody', which this process has not registered"):
        stepped(nobody, method)
    monkeypatch.setattr(ffi, "rule", lambda platform, name: None)
    with pytest.raises(RuntimeError, match=r"does not have the rule 'Sgd' of SGD.*`make native`"):
        stepped(optimizers.SGD(0.1), method)
