"""`StackedTable`: a table of an `EmbedCollection` whose rows are in variables that several tables share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.nn import dtypes

from jax_tt._base.arguments import instance_of, mismatch
from jax_tt._collection.by_table import Layout, entries_of, parts_of_stacks
from jax_tt._collection.frozen import Frozen
from jax_tt._collection.training_state import Described
from jax_tt._jax.reverse_only import refuse_gradient
from jax_tt._kinds.hashed.table import unsharded_hash_table
from jax_tt._layers.call import ScoreCalls
from jax_tt._layers.nnx.module import TableOptions
from jax_tt._layers.variables import WHERE_FLAX_ALLOWS
from jax_tt._lookup.pooled_sums import OUT_OF_RANGE
from jax_tt._lookup.rows import lookup_rows
from jax_tt._ops.insert import insert_keys
from jax_tt._ops.inserting import Evicted, Inserted
from jax_tt._ops.remove import KeyView, remove_keys
from jax_tt._table.copies import with_update
from jax_tt._table.options import Lookup
from jax_tt._table.table import Table


class RowsOfVariable:
    """The rows of a table in a variable of its stack, read and written as a variable is, by ``[...]``."""

    __slots__ = ("_at", "_variable")
    __hash__: None = None  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, variable: Any, at: Any) -> None:
        self._variable, self._at = variable, at

    def __repr__(self) -> str:
        return f"RowsOfVariable({self._variable!r}, {self._at!r})"

    def __getitem__(self, index: Any) -> jax.Array:
        return self._variable[...][self._at][index]

    def __setitem__(self, index: Any, value: Any) -> None:
        rows = self[...].at[index].set(value)
        self._variable[...] = self._variable[...].at[self._at].set(rows)

    def get_value(self) -> jax.Array:
        """All rows."""
        return self[...]

    def set_value(self, value: Any) -> None:
        """Overwrites all rows."""
        if jnp.shape(value) != self.shape:
            got = f"shape {jnp.shape(value)}"
            raise mismatch("value", got, f"{self.shape}, the rows of one table of the stack")
        self[...] = value

    __jax_array__ = get_value

    def __getattr__(self, name: str) -> Any:
        # What copies and pickles an object asks for methods before it has attributes.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self[...], name)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        return np.asarray(self[...], dtype)


def _of_value(name: str) -> Any:
    return lambda rows, *others: getattr(rows[...], name)(*others)


_SIDES = ["add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or"]
_OTHERS = ["eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "round", "invert"]
_OTHERS += ["bool", "int", "index", "float", "complex", "format", "iter", "len"]
for _name in (*_SIDES, *(f"r{name}" for name in _SIDES), *_OTHERS):
    setattr(RowsOfVariable, f"__{_name}__", _of_value(f"__{_name}__"))

# As variables are, so that functions of JAX take them.
jax.tree_util.register_pytree_node(
    RowsOfVariable,
    lambda rows: ((rows[...],), None),
    lambda _, children: RowsOfVariable(*children, at=...),
)


class StackedTable(TableOptions, ScoreCalls):
    """A table of an `EmbedCollection` whose rows are in the variables of a stack.

    It is made anew by every ``embed.tables[name]``, and has no variables. What is set on it is set for this table of
    the layer: ``bounds``, ``method``, ``precision``, ``axis_name``, and what its optimizer does. Its arrays are read
    and written by name, e.g. ``embed.tables["item"].embedding[...]``, which copies these rows. A call of it returns
    rows outside of losses; only calls of the layer update a table with an optimizer.

    Example:
        >>> import jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> tables = {name: jax_tt.dense_table(rows, 8) for name, rows in [("user", 100), ("ad", 50)]}
        >>> features = {name: jax_tt.Feature(name) for name in tables}
        >>> embed = jax_tt.EmbedCollection(tables, features, stack=True, rngs=nnx.Rngs(0))
        >>> table = embed.tables["ad"]
        >>> table(jnp.array([3, 4])).shape, table.embedding[...].shape
        ((2, 8), (50, 8))
        >>> table.embedding[3] = 0.0
        >>> [stack] = embed.stacks.values()
        >>> stack["embedding"][3]  # tables share in the order of their names
        Array([0., 0., 0., 0., 0., 0., 0., 0.], dtype=float32)
    """

    def __init__(self, embed: Any, name: str) -> None:
        self._embed, self._name = embed, name

    def __getattr__(self, name: str) -> Any:
        # Of names that the class does not have, as the arrays of the table.
        if name.startswith("_"):
            raise AttributeError(name)
        embed, stack = self._embed, self._embed.collection.stack_of[self._name]
        if name not in stack.arrays:
            raise AttributeError(self._has_no(name))
        first, count = stack.places[name][self._name]
        at = first if count is None else slice(first, first + count)
        return RowsOfVariable(embed.stacks[stack.name][name], at)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._embed.collection.stack_of[self._name].arrays]

    def __setattr__(self, name: str, value: Any) -> None:
        # An attribute of this object would be lost with it.
        if not name.startswith("_") and not hasattr(getattr(type(self), name, None), "__set__"):
            raise AttributeError(self._has_no(name))
        super().__setattr__(name, value)

    def _has_no(self, name: str) -> str:
        arrays = self._embed.collection.stack_of[self._name].arrays
        return (
            f"{self._name}: a table in a stack has no {name!r} to read or set; it has the arrays {', '.join(arrays)}, "
            "which table.embedding[...] = rows writes, and the options of its calls and updates. Its layer has the "
            "rest, such as eval and train. Methods that grow or reorder a dense table need a layer with stack=False."
        )

    def __repr__(self) -> str:
        return f"StackedTable({self._name!r}, {self.table!r})"

    @property
    def dtype(self) -> Any:
        """Type of the rows returned."""
        return jnp.dtype(self.lookup.dtype or self.embedding.dtype)

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The variables that are fields of the optimizer."""
        return self._embed.hyperparameters.get(self._name, {})

    @property
    def out_of_range(self) -> RowsOfVariable:
        """The count of `OutOfRange`."""
        return RowsOfVariable(
            self._embed.out_of_range, list(self._embed._in_stacks).index(self._name)
        )

    @property
    def deterministic(self) -> bool:
        """Whether the layer is in evaluation, which counts nothing."""
        return self._embed.deterministic

    @property
    def table(self) -> Table:
        """The description of the table."""
        return self._embed._in_stacks[self._name][0]

    @table.setter
    def table(self, table: Table) -> None:
        self._embed._set_in_stack(self._name, table, self.lookup)

    @property
    def lookup(self) -> Lookup:
        """The options of its calls."""
        return self._embed._in_stacks[self._name][1]

    @lookup.setter
    def lookup(self, lookup: Lookup) -> None:
        instance_of("lookup", lookup, Lookup, "a jax_tt.Lookup")
        self._embed._set_in_stack(self._name, self.table, lookup)

    cache = None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.table.nbytes

    @property
    def optimizer_nbytes(self) -> int:
        """Bytes of the optimizer state."""
        return self._embed.collection.sizes(self._embed.arrays())[self._name][1]

    def state(self) -> dict[str, Any]:
        """The arrays of the table by name, which are copied."""
        return self._embed.collection.of(self._embed.arrays(), self._name)

    def __call__(self, inputs: Any) -> jax.Array:
        """Rows ``[*inputs.shape, features]``, outside of losses if the table has an optimizer.

        Raises:
            ValueError: the call is differentiated with respect to a table with an optimizer.
        """
        table, state, lookup = self._bound()
        if table.update is not None:
            params = {name: state[name] for name in table.spec.param_names}
            message = (
                f"{table.ids.label}this table of a collection was called on its own in a loss; only calls of the "
                "collection update it."
            )
            state |= dict(refuse_gradient(message, params))
        counts = lookup.bounds == "warn" and not self.deterministic
        state |= {OUT_OF_RANGE: self.out_of_range[...]} if counts else {}
        rows, after = lookup_rows(with_update(table, None), state, inputs, lookup)
        if counts:
            with WHERE_FLAX_ALLOWS:
                self.out_of_range.set_value(after[OUT_OF_RANGE])
        (rows,) = self._promote(rows, inexact=False)
        return rows

    def insert(
        self, ids: Any, *, scores: Any = None, epoch: Any = None, return_evicted: bool = False
    ) -> Inserted:
        """Finds or inserts the keys of a batch; see `jax_tt.TableEmbed.insert`."""
        options = {"scores": scores, "epoch": epoch, "return_evicted": return_evicted}
        options |= {"bounds": self.lookup.bounds}
        return self._change_keys("insert", insert_keys, ids, **options)

    def remove(
        self,
        keys: Any = None,
        *,
        where: Callable[[KeyView], Any] | None = None,
        size: int | None = None,
        opt: Any = None,
        model: Any = None,
    ) -> Evicted:
        """Takes keys out of the table; see `jax_tt.TableEmbed.remove`.

        ``opt`` and ``model`` change nothing: optax has no state of a table with a fused rule, and one without, of which
        the stack is one parameter of optax, takes a layer with ``stack=False``, except after ``eval()``.
        """
        del opt, model
        if self.table.update is None and not self.deterministic:
            got = "a table without a fused rule in a stack"
            expected = "arrays of its own, as new keys would get the moments of those that leave"
            fix = "Build the layer with stack=False; or call layer.eval() before, if nothing trains the table."
            raise mismatch(f"{self.table.ids.label}table", got, expected, fix, TypeError)
        return self._change_keys("remove", remove_keys, keys, where=where, size=size)

    def grow_if_full(self, *, max_load: float = 0.75, opt: Any = None, model: Any = None) -> bool:
        """Doubles the capacity where the load exceeds ``max_load``, and copies the stack then.

        See `jax_tt.TableEmbed.grow_if_full`; ``opt`` and ``model`` are as in `remove`.
        """
        del opt, model
        unsharded_hash_table(self.table, f"{type(self).__name__}.grow_if_full: ")
        return bool(self._embed._grow_in_stacks([self._name], max_load))

    def _change_keys(self, name: str, function: Any, keys: Any, **options: Any) -> Any:
        unsharded_hash_table(self.table, f"{type(self).__name__}.{name}: ")
        embed = self._embed
        result, after = function(
            self.table, self.state(), keys, method=self.lookup.method, **options
        )
        own = {array: after[array] for array in embed.collection.stack_of[self._name].arrays}
        before = embed.arrays()
        changed = embed.collection.replaced(before, {self._name: own})
        embed._write_stacks(before, changed, self._name)
        return result

    def _bound(self) -> tuple[Table, dict[str, Any], Lookup]:
        return self.table, self.state(), self.lookup

    def _promote(self, *arrays: jax.Array, **options: Any) -> Any:
        return dtypes.promote_dtype(arrays, dtype=self.dtype, **options)


class TablesOfStacks:
    """The attribute ``tables`` of an `EmbedCollection` with stacks, which has no such variables."""

    def __get__(self, embed: Any, owner: Any = None) -> Any:
        if embed is None:
            return self
        alone = embed.alone
        tables = {n: alone[n] if n in alone else StackedTable(embed, n) for n in embed._names}
        return Frozen(tables, "table")


def described_stacks(embed: Any) -> Described:
    """What an `EmbedCollection` says about its arrays in checkpoints, which are as those of a layer without stacks."""
    held, tables = embed._in_stacks or {}, "tables"
    parts = parts_of_stacks(embed.collection, stacks=("stacks",), tables=(tables,))
    if embed._counted:
        paths = [(tables, n, "out_of_range") if n in embed._counted else None for n in held]
        parts["out_of_range",] = entries_of(paths)
    moved = {("hyperparameters", name): (tables, name, "hyperparameters") for name in held}
    if held:
        moved |= {("alone", name): (tables, name) for name in embed.alone}
    return Described(
        {(tables, name): table for name, (table, _) in held.items()}, {}, Layout(parts, moved)
    )
