"""`from_pretrained`: layers with the table of an array, of cores, of a result or of a file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_tt._base.arguments import as_array, expect, instance_of, mismatch, type_of
from jax_tt._base.keywords import no_such
from jax_tt._base.rows_of_arrays import exactly_one
from jax_tt._collection.states import check_replacements
from jax_tt._compress.compress import Compressed
from jax_tt._files import trains
from jax_tt._files.kinds import train_of
from jax_tt._files.tables import (
    load_one,
    open_tables,
    read_table,
    table_kinds,
    train_shapes,
    warn_of_lost_bits,
)
from jax_tt._files.trains import Train
from jax_tt._formats.stored import FileError, StoredArrays
from jax_tt._ids.id_order import IdOrder, OrderedRows
from jax_tt._kinds.dense.table import DenseTable, GivenRows
from jax_tt._kinds.ordered.table import check_id_order
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._layers.call import GivenState
from jax_tt._ops.trains import tt_to_table
from jax_tt._table.check import check_state
from jax_tt._table.copies import with_update
from jax_tt._table.options import DEFAULT_LOOKUP, Lookup, Update
from jax_tt._table.table import Table
from jax_tt._tt.approximation import Approximation
from jax_tt._tt.from_dense import tt_from_dense
from jax_tt._tt.initial_cores import CoreInit, GivenCores

_EVERY_KIND = (
    "jax_tt.TableEmbed.from_pretrained and jax_tt.TableEmbedBag.from_pretrained read every kind."
)


class AnyFromPretrained:
    """`from_pretrained` of the layers of any table."""

    @classmethod
    def from_pretrained(
        cls,
        source: Any,
        *,
        table: str | None = None,
        update: Update | None = None,
        lookup: Lookup = DEFAULT_LOOKUP,
        **options: Any,
    ) -> Self:
        """A layer with a given table of any kind, without a random initialisation.

        An NNX layer holds copies of the arrays. A linen module returns copies from ``init``.

        Args:
            source: one of

                - the result of `compress`, or of `tt.from_dense`,
                - a table with its state, as `quantize`, `encode`, `tt.to_table` and `files.load` return them,
                - the path of what `files.save` or ``jax-tt compress`` wrote, or of any file or checkpoint that
                  `Embed.from_pretrained` and `TTEmbed.from_pretrained` read; dense tables stay dense,
                - cores or dense rows, as they take them.
            table: name of the table in a file with several.
            update: `Update` of the kinds that can be trained so, whose optimizer state then starts anew; None leaves
                the table as it is.
            lookup: options of the calls.
            **options: the other arguments of the layer, except ``rngs``.

        Returns:
            The layer.

        Raises:
            FileError: the file cannot be read, or holds no such table.

        Example:
            >>> import jax.numpy as jnp, jax_tt, numpy as np, os, tempfile
            >>> rows = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
            >>> result = jax_tt.compress(rows, kind="quantized", max_bytes=12_000, progress=False)
            >>> layer = jax_tt.TableEmbed.from_pretrained(result)
            >>> path = os.path.join(tempfile.mkdtemp(), "items.safetensors")
            >>> jax_tt.files.save(path, {"items": (result.table, result.state)})
            >>> again = jax_tt.TableEmbed.from_pretrained(path)
            >>> ids = jnp.array([3, 999])
            >>> again.table.bits, bool((layer(ids) == again(ids)).all())
            (4, True)
        """
        described, state = pretrained_table(source, table, update)
        options |= {"lookup": lookup}
        return _constructed(cls, options, table=described, given=GivenState(state))


class DenseFromPretrained:
    """`from_pretrained` of the layers of a dense table."""

    @classmethod
    def from_pretrained(
        cls, source: Any, *, table: str | None = None, param_dtype: Any = None, **options: Any
    ) -> Self:
        """A layer with a given dense table, without a random initialisation.

        The layer holds a copy of the table.

        Args:
            source: floats ``[num_embeddings, features]``, as a numpy or JAX array or a torch tensor on the CPU; or
                the path of a ``.npy``, ``.npz``, ``.safetensors``, ``.pt`` or ``.pth`` file or of an orbax checkpoint.
            table: name of the array in a file with several.
            param_dtype: type of the table; default the type of the source.
            **options: the other arguments of the layer, except ``num_embeddings``, ``features``, ``embedding_init`` and
                ``rngs``.

        Returns:
            The layer. Its table is trained like any other; ``jax.lax.stop_gradient`` of its rows leaves it as it is.

        Raises:
            FileError: the file cannot be read, or holds no such table.

        Example:
            >>> import jax_tt, numpy as np
            >>> rows = np.arange(6.0, dtype=np.float32).reshape(3, 2)
            >>> layer = jax_tt.EmbedBag.from_pretrained(rows, combiner="max")
            >>> layer(np.array([[0, 2], [1, 1]])).tolist()
            [[4.0, 5.0], [2.0, 3.0]]
        """
        array = _dense(source, table)
        n, features = array.shape
        given = {"num_embeddings": n, "features": features, "embedding_init": GivenRows(array)}
        if param_dtype is None:
            param_dtype = array.dtype
            _warn_of_rounding(source, table, array)
        dtype = jax.dtypes.canonicalize_dtype(param_dtype)
        return _constructed(cls, {"param_dtype": dtype, **options}, **given)


class TTFromPretrained:
    """`from_pretrained` of the layers of a tensor-train table."""

    @classmethod
    def from_pretrained(
        cls,
        source: Any,
        *,
        table: str | None = None,
        num_embeddings: int | None = None,
        id_order: IdOrder | None = None,
        tt_ranks: Any = None,
        tolerance: float | None = None,
        max_bytes: int | None = None,
        row_factors: Any = None,
        col_factors: Any = None,
        param_dtype: Any = None,
        core_init: CoreInit = "approx-normal",
        **options: Any,
    ) -> Self:
        """A layer with the table of given cores, of a dense table or of a file; see `jax_tt.Embed.from_pretrained`.

        Args:
            source: one of

                - cores ``[p_k, r_k, q_k, r_{k+1}]``, a tuple,
                - the result of `tt.from_dense`, one of `compress` that is a tensor train, or a table with its state, as
                  `tt.to_table` returns them,
                - a dense table ``[num_embeddings, features]``, as a numpy or JAX array or a torch tensor on the CPU,
                  which is compressed by `tt.from_dense`,
                - the path of a file or checkpoint with tensor trains, as `files.load` reads them, or with a dense
                  table, including ``.npy``, ``.pt`` and ``.pth`` files.
            table: name of the table in a file with several.
            num_embeddings: number of rows, if the cores address more.
            id_order: `IdOrder` from ids to rows of the cores. A dense table is given in the order of ids. Must be None
                if the file or table has an order, which the layer then uses.
            tt_ranks, tolerance, max_bytes: for dense tables only; one of the three, as ``ranks``, ``tolerance`` and
                ``max_bytes`` of `tt.from_dense`.
            row_factors, col_factors: for dense tables only, as in `tt.from_dense`.
            param_dtype: type of the cores; default the type of the source.
            core_init: initialiser of the slices that `grow` appends.
            **options: the other arguments of the layer, except ``features`` and ``rngs``.

        Raises:
            FileError: the file cannot be read, or holds no such table.

        Example:
            >>> import jax_tt, numpy as np
            >>> rows = np.sin(np.arange(8000.0, dtype=np.float32)).reshape(1000, 8)
            >>> layer = jax_tt.TTEmbedBag.from_pretrained(rows, tolerance=1e-3, combiner="mean")
            >>> layer.tt_shape.ranks, bool(abs(layer(np.array([[17, 17]])) - rows[17]).max() < 1e-2)
            ((2, 2), True)
        """
        compression = {
            "tt_ranks": tt_ranks,
            "tolerance": tolerance,
            "max_bytes": max_bytes,
            "row_factors": row_factors,
            "col_factors": col_factors,
        }
        train = _tensor_train(source, table, num_embeddings)
        if train is None:
            array = _dense(source, table)
            got = f"{num_embeddings} for a dense table of {array.shape[0]} rows"
            expect(num_embeddings in (None, array.shape[0]), "num_embeddings", got, "None")
            train = _compressed(array, id_order, param_dtype, **compression)
        else:
            train = _in_order(train, id_order)
            _refuse(compression)
        if param_dtype is None:
            param_dtype = train.cores[0].dtype
            _warn_of_rounding(source, table, train.cores[0])
        given = {
            **train.shape.layer_arguments(),
            "id_order": train.id_order,
            "core_init": GivenCores(train.cores, core_init),
        }
        dtype = jax.dtypes.canonicalize_dtype(param_dtype)
        return _constructed(cls, {"param_dtype": dtype, **options}, **given)


def pretrained_table(
    source: Any, name: str | None = None, update: Update | None = None
) -> tuple[Table, dict[str, Any]]:
    """The table of any source that layers take, and its state."""
    table, state = _any_table(source, name)
    if update is not None:
        table = with_update(table, update)
        state = {**table.init_rest(state), **state}
    check_state(table, state)
    return table, state


def replacements(
    tables: Mapping[str, Table], sources: Any
) -> dict[str, tuple[Table, dict[str, Any]]]:
    """The tables with their states that replace some of a collection, from any sources by name."""
    expected = "results of compress, tables with their states, or paths by name of the table"
    instance_of("tables", sources, Mapping, expected)
    pairs = {
        name: pretrained_table(source, _in_several(source, name))
        for name, source in sources.items()
    }
    check_replacements(tables, pairs)
    return pairs


def _in_several(source: Any, name: str) -> str | None:
    """The name, if the source is a file with several tables; the only table of a file may have any name."""
    path = isinstance(source, str | os.PathLike)
    return name if path and len(table_kinds(open_tables(source))) > 1 else None


def _any_table(source: Any, name: str | None) -> tuple[Table, dict[str, Any]]:
    if isinstance(source, str | os.PathLike):
        pair = load_one(source, name, "table=")
        if pair is not None:
            return pair
    elif isinstance(source, Compressed):
        source = source.table, source.state
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], Table):
        _check_one(source, name)
        return source
    if source is None or isinstance(source, Table | nnx.Module):
        expected = "the result of jax_tt.compress, a tuple of a table and its state, a path, cores, or an array"
        raise mismatch("source", type_of(source), expected, error=TypeError)
    train = _tensor_train(source, name, None)
    if train is not None:
        rows = train.shape.num_embeddings
        return tt_to_table(train.cores, train.id_order, num_embeddings=rows)
    array = _dense(source, name)
    _warn_of_rounding(source, name, array)
    table, rows = DenseTable.of(array)
    return table, {"embedding": rows}


def _constructed(layer: Any, options: dict[str, Any], **given: Any) -> Any:
    """The layer built from the arguments that the source determines and the other options."""
    twice = [name for name in options if name in given or name == "rngs"]
    got = f"{', '.join(twice)}, which the source determines"
    expect(not twice, "from_pretrained", got, "the other options alone", error=TypeError)
    arguments = {**given, **options}
    if issubclass(layer, nnx.Module):
        arguments["rngs"] = nnx.Rngs(0)  # required; nothing is drawn from it
    return layer(**arguments)


def _warn_of_rounding(source: Any, table: str | None, array: Any) -> None:
    """Warns of an array that JAX rounds, if it is in a file: numpy makes float64 by default."""
    if isinstance(source, str | os.PathLike):
        warn_of_lost_bits(source, table, [array])


def _dense(source: Any, table: str | None) -> Any:
    """An array ``[N, D]`` of floats."""
    if isinstance(source, str | os.PathLike):
        _refuse_kinds(open_tables(source), table, "dense tables")
        return np.asarray(read_table(source, table, "table=")[1])
    _check_one(source, table)
    array = as_array("source", source)
    if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        raise mismatch("source", array, "floats [num_embeddings, features]")
    return array


def _tensor_train(source: Any, table: str | None, num_embeddings: int | None) -> Train | None:
    """The tensor train of the source, or None if the source is dense."""
    given: Any = source
    if isinstance(source, str | os.PathLike):
        given = _in_file(source, table)
    else:
        _check_one(source, table)
    if isinstance(given, Compressed):
        given = given.table, given.state
    if isinstance(given, Approximation):
        given = Train(given.cores, given.shape, None)
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Table):
        given = train_of(*given)
    if isinstance(given, Train):
        if num_embeddings is None:
            return given
        shape = dataclasses.replace(given.shape, num_embeddings=num_embeddings)
        return given._replace(shape=shape)
    if not isinstance(given, tuple | list) or not all(np.ndim(core) == 4 for core in given):
        return None
    train, cores = TTTable.of(given, num_embeddings)
    shape = train.shape
    if shape.full_ranks != train.ranks:
        expected = f"at most {shape.ranks}, which their factors have use for"
        fix = f"Lower them with jax_tt.tt.round(cores, {shape.ranks})."
        raise mismatch("source", f"cores of ranks {train.ranks[1:-1]}", expected, fix)
    return Train(cores, shape, None)


def _in_file(path: Any, table: str | None) -> Train | None:
    stored = open_tables(path)
    shapes = train_shapes(stored)
    if table is None and len(shapes) > 1:
        raise FileError(
            f"{stored.path}: holds {len(shapes)} tensor trains; say which by table=: {', '.join(shapes)}."
        )
    name = next(iter(shapes), None) if table is None else table
    if name not in shapes:
        _refuse_kinds(stored, name, "tensor trains and dense tables")
        return None
    return trains.read(stored, name, shapes[name])


def _refuse_kinds(stored: StoredArrays, name: str | None, taken: str) -> None:
    """Raises for a file without a table of this name, or where it, or all that the file holds, is of another kind."""
    kinds = table_kinds(stored)
    dense = [
        key
        for key, array in stored.arrays.items()
        if len(array.shape) == 2 and not any(key.startswith(f"{table}.") for table in kinds)
    ]
    if name is None:
        name = None if dense else next(iter(kinds), None)
    elif name not in kinds and name not in stored.arrays and (kinds or dense):
        raise FileError(f"{stored.path}: {no_such('table', name, [*kinds, *dense])}")
    if name in kinds:
        kind = "tensor train" if kinds[name] == trains.KIND else kinds[name]
        raise FileError(
            f"{stored.path}: the table {name!r} is of the kind {kind!r}; this layer reads {taken}. {_EVERY_KIND}"
        )


def _in_order(train: Train, id_order: IdOrder | None) -> Train:
    check_id_order(id_order, train.shape.num_embeddings)
    if id_order is None:
        return train
    expect(train.id_order is None, "id_order", "one for a source that has an order of ids", "None")
    return train._replace(id_order=id_order)


def _compressed(
    array: Any, id_order: IdOrder | None, dtype: Any, *, tt_ranks: Any, **compression: Any
) -> Train:
    check_id_order(id_order, array.shape[0])
    sizes = {name: compression[name] for name in ("tolerance", "max_bytes")}
    exactly_one(tt_ranks=tt_ranks, **sizes)
    rows = array if id_order is None else OrderedRows(array, id_order)
    made = tt_from_dense(rows, tt_ranks, dtype=dtype, **compression)
    return Train(made.cores, made.shape, id_order)


def _check_one(source: Any, table: str | None) -> None:
    """Raises for a source that is no path and has several tables, or of which one is named."""
    if table is not None:
        got = f"{table!r}, the name of a table in a file, with a source that is no path"
        raise mismatch("table", got, "None")
    if isinstance(source, Mapping):
        got = f"{type_of(source)} with {', '.join(map(repr, source)) or 'nothing'}"
        raise mismatch("source", got, "one of them", error=TypeError)


def _refuse(compression: dict[str, Any]) -> None:
    given = [name for name, value in compression.items() if value is not None]
    if given:
        got = "a value for a source that is a tensor train already"
        fix = "To lower the ranks of cores use jax_tt.tt.round."
        raise mismatch(", ".join(given), got, "None", fix)
