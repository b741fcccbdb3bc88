"""Tables in front of tables: what they delegate, and that their state is what their members say."""

import dataclasses
import functools
import inspect
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_tt
from jax_tt._table.checkpoint import VIEWS
from jax_tt._table.sharding import can_be_sharded
from jax_tt._table.table import Table
from jax_tt._table.wrapper import Wrapper

N, D = 16, 8
ADAGRAD = jax_tt.optimizers.Adagrad(0.1)

UPDATE = jax_tt.Update(ADAGRAD)
SHAPE = jax_tt.TTShape.suggest(N, D, ranks=2)
ORDER = jax_tt.order.from_counts(np.arange(N))


KINDS: dict[str, Table] = {
    "dense": jax_tt.tables.DenseTable(N, D),
    "tt": jax_tt.tables.TTTable.of_shape(SHAPE),
    "quantized": jax_tt.tables.QuantizedTable(N, D),
    "quantized, 4 bits": jax_tt.tables.QuantizedTable(N, D, bits=4, rotated=True),
    "sum": jax_tt.tables.SumTable(
        (jax_tt.tables.TTTable.of_shape(SHAPE), jax_tt.tables.DenseTable(N, D))
    ),
}


def cached(table: Any, gradients: str) -> Any:
    return jax_tt.tables.RowCachedTable(table, jax_tt.RowCache(4, ways=2, gradients=gradients))


def sharded(table: Any) -> Any:
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    place = jax_tt.Placement
    placement = place.hashed() if table.ids.takes_keys else place.round_robin(page_size=3)
    return jax_tt.tables.ShardedTable(table, mesh, "model", placement)


def wrappers() -> dict[str, Any]:
    found = {}
    for update in (None, UPDATE):
        names = KINDS if update else ("dense", "tt")
        kinds = {name: jax_tt.extension.with_update(KINDS[name], update) for name in names}
        kind = "" if update is None else ", fused"
        found |= {
            f"ordered {name}{kind}": jax_tt.tables.OrderedTable(table, ORDER)
            for name, table in kinds.items()
        }
        for gradients in ("rows", "cores"):
            found[f"cached {gradients}{kind}"] = cached(kinds["tt"], gradients)
        found[f"ordered cached{kind}"] = jax_tt.tables.OrderedTable(
            cached(kinds["tt"], "rows"), ORDER
        )
        found |= {
            f"hashed {name}{kind}": jax_tt.tables.HashTable(table)
            for name, table in kinds.items()
            if "quantized" not in name
        }
    fused = {name: jax_tt.extension.with_update(table, UPDATE) for name, table in KINDS.items()}
    found["sharded quantized, fused"] = sharded(fused["quantized"])
    found["sharded hashed, fused"] = sharded(jax_tt.tables.HashTable(fused["dense"]))
    return found


WRAPPERS = wrappers()
EACH = pytest.mark.parametrize("name", WRAPPERS)


@functools.cache
def state_of(name: str) -> Any:
    return jax.jit(WRAPPERS[name].init)(jax.random.key(1))


def shapes(state: Any) -> dict[str, Any]:
    return {name: (array.shape, array.dtype) for name, array in state.items()}


def subclasses(kind: type) -> set[type]:
    return {kind, *(below for sub in kind.__subclasses__() for below in subclasses(sub))}


MEMBERS = {name for name in (*vars(Table), *Table.__annotations__) if name[0] != "_"}
# What a table that can be wrapped does not define, so that wrappers need not delegate it.
DEFAULTS = {"init"}


def test_a_table_has_few_members() -> None:
    assert len(MEMBERS) <= 14, sorted(MEMBERS)


def test_wrappers_delegate_every_member() -> None:
    assert MEMBERS - vars(Wrapper).keys() == DEFAULTS
    plain = KINDS["dense"]
    methods = {
        name for name in MEMBERS - DEFAULTS if inspect.isfunction(getattr(Table, name, None))
    }
    for name in MEMBERS - DEFAULTS - methods - {"spec"}:
        assert getattr(Forgetful(plain), name) == getattr(plain, name), name
    for name in methods:
        table = mock.create_autospec(plain)
        values = [object() for _ in inspect.signature(getattr(plain, name)).parameters]
        assert getattr(Forgetful(table), name)(*values) is getattr(table, name).return_value
        getattr(table, name).assert_called_once_with(*values)


def test_what_a_table_wraps() -> None:
    tables, train = jax_tt.tables, KINDS["tt"]
    cache = cached(train, "rows")
    ordered = tables.OrderedTable(cache, ORDER)
    assert tables.innermost(ordered) is tables.innermost(train) is train
    assert tables.find(ordered, tables.RowCachedTable) is cache
    assert tables.find(ordered, tables.OrderedTable) is ordered
    assert tables.find(ordered, Table) is ordered
    assert tables.find(train, tables.RowCachedTable) is None
    has_cache = jax_tt.extension.has_cache
    assert has_cache(ordered) and has_cache(cache) and not has_cache(train)


@dataclasses.dataclass(frozen=True)
class Undescribed(jax_tt.extension.ReferenceTable):
    """A kind that does not say which arrays its states have."""

    num_embeddings: int = 4
    features: int = 2
    update: jax_tt.Update | None = None
    name: str | None = None

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        return {"rows": jax.random.normal(key, (4, 2))}

    def rows(self, params: Any, digits: Any, precision: Any) -> jax.Array:
        return params[0][digits[0]]


def test_a_kind_without_a_spec() -> None:
    with pytest.raises(
        NotImplementedError, match=r"Undescribed does not say which arrays .* `spec`"
    ):
        jax_tt.lookup(Undescribed(), {}, jnp.array([1]))


@dataclasses.dataclass(frozen=True)
class Forgetful(Wrapper):
    """A wrapper that registers nothing."""


DISPATCHED = [
    getattr(jax_tt.extension, name)
    for name in (
        "attend",
        "check_state",
        "freeze",
        "grow",
        "has_cache",
        "maintain",
        "reorder",
        "to_dense",
        "with_cache",
        "with_name",
        "with_update",
    )
]
DISPATCHED += [jax_tt.extension.without_values, *VIEWS]


def test_wrappers_register_every_function() -> None:
    """None of them is done to the wrapped table alone, which would lose the wrapper without a word."""
    for function in DISPATCHED:
        name, wrapper = function.__name__, Forgetful(KINDS["dense"])
        message = rf"Forgetful wraps a table .* @jax_tt\.extension\.{name}\.register\(Forgetful\)"
        with pytest.raises(NotImplementedError, match=message):
            function(wrapper)
        kinds = {kind for kind in subclasses(Wrapper) if kind.__module__.startswith("jax_tt.")}
        forgotten = function.dispatch(Wrapper)
        assert {kind for kind in kinds if function.dispatch(kind) is forgotten} == {Wrapper}
        assert function.dispatch(jax_tt.tables.DenseTable) is not forgotten


@dataclasses.dataclass(frozen=True)
class OfRows(Wrapper):
    """A wrapper whose rows are entries of its arrays, which does not say what its shards are."""

    @functools.cached_property
    def spec(self) -> jax_tt.extension.StateSpec:
        return self.table.spec


def test_shards_of_a_wrapper_are_not_those_of_its_table() -> None:
    with pytest.raises(TypeError, match="table: got an OfRows; expected a DenseTable"):
        sharded(OfRows(KINDS["dense"]))
    assert not can_be_sharded(OfRows(KINDS["dense"]))


def test_tables_that_can_be_wrapped_do_not_define_what_wrappers_leave() -> None:
    kinds = {kind for kind in subclasses(Table) if kind.__module__.startswith("jax_tt.")}
    kinds -= {Table, *subclasses(jax_tt.tables.ShardedTable)}
    assert len(kinds) >= 10
    assert not [(kind, name) for kind in kinds for name in DEFAULTS & vars(kind).keys()]


@EACH
def test_members_say_what_the_state_has(name: str) -> None:
    table, state = WRAPPERS[name], state_of(name)
    jax_tt.extension.check_state(table, state)
    arrays = {array.name: array for array in table.spec.arrays}
    assert arrays.keys() == state.keys()
    for key, array in arrays.items():
        assert array.shape in (None, state[key].shape), key
        assert array.dtype in (None, state[key].dtype), key
        assert (array.unit is None) == (key not in table.spec.trained_names), key
    assert {key: state[key].shape for key in table.spec.param_shapes} == table.spec.param_shapes
    for array in (array for array in arrays.values() if array.role == "slot"):
        assert array.of in table.spec.param_names
        assert array.dtype is None and state[array.name].dtype == jnp.float32
    assert table.spec.stepped_shapes.keys() == table.spec.param_shapes.keys()
    assert len(table.spec.slot_names) == len(table.spec.param_names)
    slots = [slot for slots in table.spec.slots(state) for slot in slots]
    assert len(slots) == len(table.spec.param_names) * (table.update is not None)


def test_stepped_shapes_are_those_of_the_rows() -> None:
    for name, table in WRAPPERS.items():
        want, got = dict(table.table.spec.stepped_shapes), dict(table.spec.stepped_shapes)
        if name.startswith("sharded"):
            want = {key: (table.stored.num_embeddings, *shape[1:]) for key, shape in want.items()}
        if name.startswith("cached"):
            got.pop("cache_rows", None)
        assert got == want, name


@EACH
def test_frozen(name: str) -> None:
    table, state = WRAPPERS[name], state_of(name)
    frozen, arrays = jax_tt.extension.freeze(table, state)
    assert type(frozen) is type(table) and frozen.update is None
    if table.update is None and not table.ids.takes_keys:
        assert frozen == table and arrays.keys() == state.keys()
        assert all(arrays[key] is array for key, array in state.items())
        return
    jax_tt.extension.check_state(frozen, arrays)
    expected = jax.eval_shape(frozen.init, jax.random.key(0))
    assert shapes(arrays) == shapes(expected)
    lookup = jax_tt.Lookup(train=False)
    ids = (
        jax_tt.dynamic.split_keys(np.array([3, 2**40]))
        if table.ids.takes_keys
        else jnp.array([3, 7])
    )

    @jax.jit
    def both(state: Any, arrays: Any) -> tuple[jax.Array, jax.Array]:
        rows, _ = jax_tt.lookup(table, state, ids, lookup)
        return rows, jax_tt.lookup(frozen, arrays, ids, lookup)[0]

    want, got = both(state, arrays)
    np.testing.assert_array_equal(got, want)


@dataclasses.dataclass(frozen=True)
class Logged(Wrapper):
    """A wrapper that changes no lookup."""


@jax_tt.extension.check_state.register
def _(table: Logged, state: Any) -> None:
    jax_tt.extension.check_state(table.table, state)


def test_missing_keys_read_their_initial_rows_through_a_wrapper() -> None:
    table = jax_tt.hash_table(64, 4, missing="initial", optimizer=ADAGRAD, safe_check="ignore")
    state, keys = table.init(jax.random.key(0)), np.array([3, 5])

    def rows(table: Table) -> jax.Array:
        return jax_tt.lookup(table, state, keys)[0]

    assert np.any(rows(table))
    np.testing.assert_array_equal(rows(Logged(table)), rows(table))


def test_a_divided_table_is_not_wrapped() -> None:
    with pytest.raises(TypeError, match=r"table: got a ShardedTable; .* order\.apply\(ids\)"):
        jax_tt.tables.OrderedTable(sharded(KINDS["dense"]), ORDER)
