"""Rules of extensions in C++: the example takes the steps of the reference everywhere, and nothing else is accepted."""

import ctypes
import dataclasses
import functools
import re
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import optimizers
from jax_tt._base import ffi
from tests.conftest import native_available
from tests.helpers import SHAPES, f64, fused, make_case
from tests.optimizers.extension_build import lion_rule

CAPSULE = b"jax_tt.rule"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def extension() -> ModuleType:
    return lion_rule()


@pytest.fixture(scope="module")
def rule(extension) -> Any:
    return extension.Lion(learning_rate=0.05, weight_decay=0.1)


def stepped(rule, method, dtype, shape, **options):
    case = make_case(SHAPES[shape], dtype, True)
    table, state = fused(case.cores, rule, **options)
    g = jnp.asarray(case.g, jnp.float64 if dtype == "float64" else jnp.float32)

    @jax.jit
    @jax.grad
    def step(state):
        out, _ = jax_tt.lookup_bags(table, state, case.bags(), method=method)
        return jnp.sum(out.astype(g.dtype) * g)

    return step(step(state))


@pytest.mark.parametrize("skip_nonfinite", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_storage_type(dtype, skip_nonfinite, rule):
    with jax.enable_x64(dtype == "float64"):
        options = {"skip_nonfinite": skip_nonfinite, "stochastic_rounding": False}
        got, want = (
            stepped(rule, method, dtype, "d3-odd", **options) for method in ("native", "reference")
        )
        tolerance = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(f64(a), f64(b), rtol=tolerance, atol=tolerance)


def test_16_bit_rows_are_rounded_stochastically(extension):
    rule = extension.Lion(learning_rate=1e-3)
    table, state = fused(jnp.ones((2000, 8), jnp.bfloat16), rule)
    ids = jnp.arange(2000)[:, None]

    def loss(state):
        return jnp.sum(jax_tt.lookup_bags(table, state, ids)[0].astype(jnp.float32))

    moved = f64(jax.jit(jax.grad(loss))(state)["embedding"])
    assert len(np.unique(moved)) == 2
    assert abs(np.mean(moved) - (1 - 1e-3)) < 1e-4


BATCH = {
    name: np.random.default_rng(k).integers(0, 60, (4, 30)).astype(np.int32)
    for k, name in enumerate(("own", "ours", "train"))
}


def collection(rule):
    tables = {
        "own": jax_tt.dense_table(1009, 16, optimizer=rule),
        "ours": jax_tt.dense_table(1009, 16, optimizer=optimizers.SGD(0.1)),
        "train": jax_tt.tt_table(60, 8, tt_ranks=3, optimizer=rule),
    }
    collection = jax_tt.Collection(tables, {name: jax_tt.Feature(name) for name in tables})

    def step(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(rows))

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    return jax.jit(collection.init)(jax.random.key(0)), jax.jit(step, donate_argnums=0)


def test_in_one_call_with_other_rules_and_in_place(rule, monkeypatch):
    state, step = collection(rule)
    want, in_jax = collection(rule)
    with monkeypatch.context() as patch:
        patch.setenv("JAX_TT_METHOD", "reference")
        in_jax = in_jax.lower(want, BATCH).compile()
    program = step.lower(state, BATCH)
    assert program.as_text().count("@jax_tt_dense_update_v1") == 1
    step = program.compile()
    assert not re.findall(r"= f32\[1009,16\][^ ]* copy", str(step.as_text()))
    address = state["own"]["embedding"].unsafe_buffer_pointer()
    for _ in range(3):
        state, want = step(state, BATCH), in_jax(want, BATCH)
    assert state["own"]["embedding"].unsafe_buffer_pointer() == address
    assert np.any(f64(state["own"]["slot_momentum_0"]) != 0)
    for name in BATCH:
        for array, value in want[name].items():
            np.testing.assert_allclose(state[name][array], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ids", [[[]], [[5, 5, 5]], [[-1, 7, 2**30]]], ids=str)
@pytest.mark.parametrize("width", [1, 5])
def test_odd_batches_and_widths(ids, width, rule):
    bags = jax_tt.Bags.from_ragged(ids)

    def step(method):
        table, state = fused(jnp.ones((9, width)), rule)

        def loss(state):
            return jnp.sum(jax_tt.lookup_bags(table, state, bags, method=method, bounds="zero")[0])

        return jax.jit(jax.grad(loss))(state)

    got, want = step("native"), step("reference")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert np.any(f64(got["embedding"]) != 1) == (ids != [[]])


def test_programs_have_the_name(rule):
    table, state = fused(jnp.ones((9, 4)), rule)

    def loss(state):
        return jnp.sum(jax_tt.lookup_bags(table, state, jnp.array([[1]]), method="native")[0])

    assert 'optimizer = "lion_rule.lion"' in jax.jit(jax.grad(loss)).lower(state).as_text()


# Registration


class Traits(ctypes.Structure):
    """`jax_tt::OptimizerTraits`."""

    _fields_: ClassVar = [
        ("names", ctypes.c_char_p),
        ("hyperparameters", ctypes.c_int),
        ("element_slots", ctypes.c_int),
        ("row_slots", ctypes.c_int),
    ]


class Exported(ctypes.Structure):
    """`jax_tt::ExportedRule`."""

    _anonymous_ = ("traits",)
    _fields_: ClassVar = [
        ("abi", ctypes.c_uint32),
        ("traits", Traits),
        ("name", ctypes.c_char_p),
        ("update_float", ctypes.c_void_p),
        ("update_double", ctypes.c_void_p),
        ("launches", ctypes.c_void_p),
    ]


ALIVE = []  # a capsule is the address of one of these


def changed(capsule, **fields):
    """The capsule of the same rule with other fields."""
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    own = Exported.from_buffer_copy(
        ctypes.string_at(api.PyCapsule_GetPointer(capsule, CAPSULE), ctypes.sizeof(Exported))
    )
    for name, value in fields.items():
        setattr(own, name, value)
    ALIVE.append(own)
    return api.PyCapsule_New(ctypes.addressof(own), CAPSULE, None)


def test_a_rule_may_be_registered_again(extension):
    assert (
        optimizers.register(extension._lion.rule) == extension.Lion.native_kind == "lion_rule.lion"
    )


def test_what_is_no_new_rule_is_refused(extension):
    old = rf"\(ABI 0, expected 6\); rebuild .* jax_tt {re.escape(jax_tt.__version__)}"
    for fields, message in (
        ({"update_float": 8}, "another rule of the name 'lion_rule.lion'"),
        ({"abi": 0}, old),
        ({"name": None}, "it has no name"),
        ({"name": b""}, "it has no name"),
        ({"name": b"a", "element_slots": 3}, "3 slots per element and 0 per row"),
        ({"name": b"b", "row_slots": -1}, "1 slots per element and -1 per row"),
        ({"name": b"c", "hyperparameters": 3}, "3 hyper-parameters and other names"),
        ({"name": b"e", "names": None}, "4 hyper-parameters and other names"),
        ({"name": b"d", "update_double": None}, "'d' has no step for float or for double"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizers.register(changed(extension._lion.rule, **fields))
    for name in "abcde":
        assert ffi.rule("cpu", name) is None
    for given in (None, "lion", 3):
        with pytest.raises(ValueError, match=r"a capsule of the name 'jax_tt\.rule'"):
            optimizers.register(given)


def test_rules_may_be_registered_by_many_threads_and_in_any_order(extension, rule):
    names = [f"lion_{k}" for k in range(40)]
    capsules = [changed(extension._lion.rule, name=name.encode()) for name in names]
    start = threading.Barrier(4)

    def work(order):
        start.wait()
        for capsule in order:
            optimizers.register(capsule)

    orders = (capsules, capsules[::-1], capsules[1::2], capsules[::3])
    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ffi.rule("cpu", name) is not None for name in names)
    other = dataclasses.make_dataclass(
        "Other", [], bases=(type(rule),), namespace={"native_kind": "lion_7"}, frozen=True
    )(**dataclasses.asdict(rule))
    tables = [stepped(one, "native", "float32", "d3") for one in (rule, other)]
    for a, b in zip(*map(jax.tree.leaves, tables), strict=True):
        np.testing.assert_array_equal(a, b)


def one_step(rule, method="native", **inputs):
    table, state = fused(jnp.ones((9, 4)), rule)
    ids = jnp.array([[1, 2]])
    call = functools.partial(jax_tt.lookup_bags, method=method, **inputs)
    grad = jax.grad(lambda s: jnp.sum(call(table, s, ids)[0]))
    return jax.block_until_ready(jax.jit(grad)(state))


def variant(rule, **namespace):
    made = dataclasses.make_dataclass(
        "Variant", [], bases=(type(rule),), namespace=namespace, frozen=True
    )
    return made(**dataclasses.asdict(rule))


def test_every_name_has_its_own_rule(extension, rule):
    """The same code twice; the second one has two hyper-parameters in the other order, and so takes other steps."""
    names = b"learning_rate, b2, b1, weight_decay"
    optimizers.register(changed(extension._lion.rule, name=b"lion_exchanged", names=names))
    exchanged = dataclasses.replace(rule, b1=rule.b2, b2=rule.b1)
    got, want, other = (
        stepped(one, "native", "float32", "d3")
        for one in (variant(rule, native_kind="lion_exchanged"), exchanged, rule)
    )
    for name in ("core_0", "slot_momentum_0"):
        np.testing.assert_array_equal(got[name], want[name])
        assert np.any(f64(got[name]) != f64(other[name]))


def test_a_class_that_does_not_fit_its_native_rule_is_refused(rule):
    slots, label = (optimizers.Slot("a", True, 0.0),), r"Variant\.hyperparameters"

    def returning(change):
        """A class whose hyper-parameters are changed; its steps in JAX do not need them."""
        return {
            "hyperparameters": lambda self, step: change(type(rule).hyperparameters(self, step))
        }

    for namespace, message in (
        ({"native_kind": "nobody"}, "the native rule 'nobody', which this process has not"),
        ({"slots": slots}, "0 slots per entry and 1 per row.*: 1 per entry, then 0 per row"),
        ({"slots": ()}, "0 slots per entry and 0 per row"),
        (returning(lambda given: jnp.zeros(4)), rf"{label}: got float32 of shape \(4,\)"),
        (
            returning(lambda given: {0: given["b1"]}),
            rf"{label}: 0: got .* of float32; expected a scalar of type float32 by name",
        ),
        (
            returning(lambda given: {"learning_rate": given["b1"]}),
            rf"{label}: got learning_rate; .* also b1, b2, weight_decay",
        ),
        (
            returning(lambda given: {**given, "learning_rate": jnp.zeros(3)}),
            rf"{label}: 'learning_rate': got float32 of shape \(3,\); expected a scalar",
        ),
        (returning(lambda given: {**given, "b2": jnp.int32(1)}), rf"{label}: 'b2': got int32"),
        (returning(lambda given: {**given, "b2": 0.9}), rf"{label}: 'b2': got 0.9; .*at_step"),
    ):
        with pytest.raises(ValueError, match=message):
            one_step(variant(rule, **namespace))


def test_hyperparameters_may_be_arrays(rule):
    """They are operands of the program, which the static rule does not have."""
    want = one_step(rule)
    given = {"learning_rate": jnp.float32(rule.learning_rate)}
    schedule = dataclasses.replace(rule, learning_rate=lambda step: 0.05 + 0 * step)
    for got in (one_step(rule, hyperparameters=given), one_step(schedule)):
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("kind", ["dense", "tensor train"])
@pytest.mark.parametrize("method", ["native", "cuda_emulated"])
def test_a_program_whose_rule_is_missing_says_so(kind, method, rule, monkeypatch):
    """As a program that another process has compiled or exported."""
    if method != "native" and not native_available(method):
        pytest.skip("the emulated module is not built")
    found = functools.partial(ffi.rule, name="lion_rule.lion")
    monkeypatch.setattr(ffi, "rule", lambda platform, name: found(platform))
    with pytest.raises(jax.errors.JaxRuntimeError, match="this process has no rule 'elsewhere'"):
        missing = variant(rule, native_kind="elsewhere")
        if kind == "dense":
            one_step(missing, method)
        else:
            jax.block_until_ready(stepped(missing, method, "float32", "d3"))


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="needs the emulated module")
@pytest.mark.parametrize("kind", ["dense", "tensor train"])
def test_a_rule_without_cuda_kernels_says_so(kind, rule):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"'lion_rule\.lion' was compiled without"):
        if kind == "dense":
            one_step(rule, "cuda_emulated")
        else:
            jax.block_until_ready(stepped(rule, "cuda_emulated", "float32", "d3"))


# Headers


def test_headers_are_complete_and_no_others_are_installed(extension):
    include = Path(jax_tt.extension.get_include())
    headers = {str(path.relative_to(include)) for path in include.rglob("*.h")}
    used = {"jax_tt/rule.h", "jax_tt/cuda_rule.h"}
    assert used <= headers
    left = list(used)
    while left:
        text = (include / left.pop()).read_text()
        for name in set(re.findall(r'^#include "(.+)"', text, re.MULTILINE)) - used:
            if name.startswith("ffi/emulation/"):
                continue  # of test builds
            assert name in headers
            used.add(name)
            left.append(name)
    assert headers == used
