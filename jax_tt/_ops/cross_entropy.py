"""`softmax_cross_entropy`: the loss of a language model whose logits are scores of all rows of a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._base.arguments import as_array, as_positive, mismatch, type_of
from jax_tt._base.dtypes import accumulator, resolve_precision, widest
from jax_tt._ids.explicit import over_explicit_axes, spec_of
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._lookup.rows import lookup_rows
from jax_tt._ops.lookup import as_vectors, constant_if_fused
from jax_tt._table.check import check_table, check_whole_table
from jax_tt._table.options import Lookup
from jax_tt._table.state import State
from jax_tt._table.table import Table
from jax_tt._table.whole import RowSlices, row_slices

_BLOCK = 2048
# In place of ids, so that no row is the one of a target that is no id.
_NO_ROW, _NO_ID = -1, -2


def softmax_cross_entropy(
    table: Table,
    state: State,
    hidden: Any,
    targets: Any,
    *,
    block: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Cross entropy between ids and the softmax of ``hidden @ rows.T``, without the logits of all rows in memory.

    It equals ``optax.softmax_cross_entropy_with_integer_labels(attend(table, state, hidden), targets)``. Forward and
    backward pass take ``block`` rows at a time, so that a temporary array has ``block`` logits for every target; the
    backward pass computes them again. A dense table may be sharded over its rows, and ``hidden`` over another axis of
    the mesh: each device takes the rows that it has, and the maxima and sums of the logits are combined at the end.

    Args:
        table: of any kind, except one of keys.
        state: its arrays by name. It is differentiable as in `lookup`, except that of a fused table.
        hidden: floats ``[..., D]``, differentiable.
        targets: integer ids ``[...]``.
        block: rows whose logits are computed together, 2,048 by default; of a tensor train, at least the rows that
            share a slice of the first core.
        precision: of the products.

    Returns:
        ``[...]``, a loss for each target, float32 or float64. It is NaN for a target that is no id; give these no
        weight, ``jnp.where(targets >= 0, losses, 0)``, which makes their gradients 0 as well.

    Raises:
        ValueError: a shape or type does not fit.
        TypeError: the table has keys; or the loss is differentiated with respect to a fused table.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table = jax_tt.dense_table(1000, 8)
    >>> state = table.init(jax.random.key(0))
    >>> losses = jax_tt.softmax_cross_entropy(table, state, jnp.zeros((2, 3, 8)), jnp.ones((2, 3), int))
    >>> losses.shape, bool(jnp.allclose(losses, jnp.log(1000)))
    ((2, 3), True)
    """
    check_table(table, state)
    check_whole_table(table, state)
    label = table.ids.label
    if table.ids.takes_keys:
        got = f"{type_of(table)}, whose keys have no logits in an order"
        expected = "a table of ids, such as a dense_table"
        raise mismatch(f"{label}table", got, expected, error=TypeError)
    if table.num_embeddings >= 2**30:
        raise mismatch(f"{label}table", f"{table.num_embeddings} rows", "fewer than 2**30")
    block = _BLOCK if block is None else as_positive("block", block)
    hidden = as_vectors("hidden", hidden, table.features)
    targets = as_array("targets", targets)
    if targets.shape != hidden.shape[:-1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        expected = f"integers of shape {hidden.shape[:-1]}, one for each vector of hidden"
        raise mismatch("targets", targets, expected)
    state = constant_if_fused(table, state, table.spec.trained_names, "softmax_cross_entropy")
    blocks = _Blocks.of(table, block, resolve_precision(precision))

    def losses(inputs: tuple[State, jax.Array, jax.Array]) -> jax.Array:
        state, hidden, targets = inputs
        flat = hidden.reshape(math.prod(targets.shape), table.features)
        ids = _ids(jnp.asarray(targets).reshape(-1), table.num_embeddings)
        state, flat, ids = vary_over((state, flat, ids), varying_axes(state, flat, ids))
        names = () if table.update else table.spec.param_names
        params = {name: state[name] for name in names if name not in table.spec.buffers}
        rest = {name: value for name, value in state.items() if name not in params}
        losses = _losses(blocks, params, rest, flat, ids)
        return losses.reshape(targets.shape)

    return over_explicit_axes(
        losses,
        (dict(state), hidden, targets),
        lambda: jax.sharding.PartitionSpec(*spec_of(hidden)[:-1]),
    )


def _ids(targets: jax.Array, rows: int) -> jax.Array:
    """The targets as int32, `_NO_ID` for those that are no ids."""
    last = min(rows - 1, int(jnp.iinfo(targets.dtype).max))
    return jnp.where((targets >= 0) & (targets <= last), targets, _NO_ID).astype(jnp.int32)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The rows of a table in blocks, one for each step of a scan.

    A block takes as many slices from each of several places, whose number is divisible by any number of devices that
    the rows may be sharded over, so that every device always takes rows that it has.

    Attributes:
        table: the table.
        places: see above.
        slices: of one place.
        size: slices of a block from one place.
        rows_each: rows that are made of a slice.
        precision: of products.
    """

    table: Any
    places: int
    slices: int
    size: int
    rows_each: int
    precision: Any

    @classmethod
    def of(cls, table: Table, block: int, precision: Any) -> _Blocks:
        made_of = row_slices(table)
        rows_each = 1 if made_of is None else made_of.rows_each
        slices = -(-table.num_embeddings // rows_each)
        places = 1 if made_of is None or rows_each > 1 else math.gcd(slices, jax.device_count())
        slices //= places
        size = min(max(block // (places * rows_each), 1), slices)
        return cls(table, places, slices, size, rows_each, precision)

    @property
    def steps(self) -> Any:
        return jnp.arange(-(-self.slices // self.size), dtype=jnp.int32)

    @property
    def _made_of(self) -> RowSlices | None:
        return row_slices(self.table)

    def start(self, step: jax.Array) -> jax.Array:
        """The first slice of a block; the last block begins with slices of the one before it."""
        return jnp.minimum(step * self.size, self.slices - self.size)

    def ids(self, step: jax.Array) -> jax.Array:
        """Ids ``[places, rows]`` of a block; `_NO_ROW` for rows of another block and beyond the table."""
        place, part, row = (
            lax.broadcasted_iota(jnp.int32, (self.places, self.size, self.rows_each), axis)
            for axis in range(3)
        )
        part = part + self.start(step)
        ids = (place * self.slices + part) * self.rows_each + row
        here = (part >= step * self.size) & (ids < self.table.num_embeddings)
        return jnp.where(here, ids, _NO_ROW).reshape(self.places, -1)

    def by_place(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays, that with the slices as ``[places, slices, ...]``."""
        return self._changed(arrays, lambda x: x.reshape(self.places, self.slices, *x.shape[1:]))

    def cut(self, arrays: Mapping[str, jax.Array], step: jax.Array) -> dict[str, jax.Array]:
        """The arrays, that with the slices cut to those of a block."""
        return self._changed(
            arrays, lambda x: lax.dynamic_slice_in_dim(x, self.start(step), self.size, 1)
        )

    def _changed(
        self, arrays: Mapping[str, jax.Array], change: Callable[[jax.Array], jax.Array]
    ) -> dict[str, jax.Array]:
        name = self._made_of.name if self._made_of else None
        return {key: change(x) if key == name else x for key, x in arrays.items()}

    def added(
        self, total: Mapping[str, jax.Array], part: Mapping[str, jax.Array], step: jax.Array
    ) -> dict[str, jax.Array]:
        """Gradients of the parameters, to which those of a block are added."""
        before = self.cut(total, step)
        after = {name: before[name] + part[name].astype(before[name].dtype) for name in part}
        for name, array in total.items():
            if array.shape != after[name].shape:
                start = self.start(step)
                after[name] = lax.dynamic_update_slice_in_dim(array, after[name], start, 1)
        return after

    def rows(self, params: Mapping[str, jax.Array], rest: State, ids: jax.Array) -> jax.Array:
        """Rows ``[places, rows, D]`` of a block."""
        if self._made_of is not None:
            return self._made_of.rows({**rest, **params})
        options = Lookup(bounds="clip", precision=self.precision, train=False)
        return lookup_rows(self.table, {**rest, **params}, ids, options)[0]

    def logits(self, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        """``[places, T, rows]`` in the accumulator type."""
        return self.product("td,snd->stn", hidden, rows)

    def product(self, of: str, left: jax.Array, right: jax.Array) -> jax.Array:
        """A product in the wider type of its factors, accumulated in the accumulator type."""
        dtype = widest(left.dtype, right.dtype)
        return jnp.einsum(
            of,
            left.astype(dtype),
            right.astype(dtype),
            precision=self.precision,
            preferred_element_type=accumulator(dtype),
        )


@jax.custom_vjp
def _losses(
    blocks: _Blocks,
    params: Mapping[str, jax.Array],
    rest: State,
    hidden: jax.Array,
    ids: jax.Array,
) -> jax.Array:
    return _fwd(blocks, params, rest, hidden, ids)[0]


def _fwd(
    blocks: _Blocks,
    params: Mapping[str, jax.Array],
    rest: State,
    hidden: jax.Array,
    ids: jax.Array,
) -> tuple[jax.Array, Any]:
    saved = blocks, params, rest, hidden, ids
    params, rest = blocks.by_place(params), blocks.by_place(rest)

    def add_block(sums: Any, step: jax.Array) -> tuple[Any, None]:
        most, total, of_targets = sums
        of_block = blocks.ids(step)
        cut, fixed = blocks.cut(params, step), blocks.cut(rest, step)
        logits = blocks.logits(hidden, blocks.rows(cut, fixed, of_block))
        of_block = of_block[:, None]
        logits = jnp.where(of_block != _NO_ROW, logits, -jnp.inf)
        larger = jnp.maximum(most, logits.max(2))
        # Nothing was added yet to a sum with the maximum -inf.
        finite = jnp.where(larger > -jnp.inf, larger, 0)
        total = total * jnp.exp(most - finite) + jnp.exp(logits - finite[..., None]).sum(2)
        hit = of_block == ids[None, :, None]
        of_targets = of_targets + jnp.where(hit, logits, 0).sum(2)
        return (larger, total, of_targets), None

    accum = accumulator(widest(hidden.dtype, blocks.table.spec.storage({**rest, **params})))
    zeros = jnp.zeros((blocks.places, len(ids)), accum)
    start = vary_over((zeros - jnp.inf, zeros, zeros), varying_axes(hidden, ids))
    (most, total, of_targets), _ = lax.scan(add_block, start, blocks.steps)
    # Maxima and sums of all places, which are on several devices if the rows are.
    largest = most.max(0)
    total = (total * jnp.exp(most - largest[None])).sum(0)
    log_sum = largest + jnp.log(total)
    losses = jnp.where(ids != _NO_ID, log_sum - of_targets.sum(0), jnp.nan)
    return losses, (*saved, log_sum)


def _bwd(saved: Any, g: jax.Array) -> Any:
    blocks, given, constants, hidden, ids, log_sum = saved
    params, rest = blocks.by_place(given), blocks.by_place(constants)

    def add_block(sums: Any, step: jax.Array) -> tuple[Any, None]:
        dparams, dhidden = sums
        of_block = blocks.ids(step)
        cut, fixed = blocks.cut(params, step), blocks.cut(rest, step)
        rows, pullback = jax.vjp(lambda cut: blocks.rows(cut, fixed, blocks.ids(step)), cut)
        of_block = of_block[:, None]
        shares = jnp.exp(blocks.logits(hidden, rows) - log_sum[None, :, None])
        shares = jnp.where(of_block != _NO_ROW, shares, 0)
        hit = (of_block == ids[None, :, None]).astype(shares.dtype)
        dlogits = ((shares - hit) * g[None, :, None]).astype(widest(hidden.dtype, rows.dtype))
        dhidden = dhidden + blocks.product("stn,snd->std", dlogits, rows)
        drows = blocks.product("stn,td->snd", dlogits, hidden).astype(rows.dtype)
        (dcut,) = pullback(drows)
        return (blocks.added(dparams, dcut, step), dhidden), None

    dparams = {name: jnp.zeros_like(x, accumulator(x.dtype)) for name, x in params.items()}
    dhidden = jnp.zeros((blocks.places, *hidden.shape), g.dtype)
    start = vary_over((dparams, dhidden), varying_axes(hidden, ids))
    (dparams, dhidden), _ = lax.scan(add_block, start, blocks.steps)
    dparams = {name: dparams[name].reshape(x.shape).astype(x.dtype) for name, x in given.items()}
    # Zeros instead of None, which would not reach what refuses a gradient of a fused table.
    drest = {
        name: jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None
        for name, x in constants.items()
    }
    return None, dparams, drest, dhidden.sum(0).astype(hidden.dtype), None


_losses.defvjp(_fwd, _bwd)
