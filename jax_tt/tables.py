"""The kinds of tables as classes, for ``isinstance``, for kinds in wrappers, and for tables of given arrays.

`jax_tt.dense_table`, `jax_tt.tt_table` and the other factories make most tables. `grow` and `reorder` change a table of
any kind, with its wrappers and its state, between two steps.

>>> import jax, jax_tt
>>> table = jax_tt.tt_table(1000, 8, tt_ranks=4, cache=jax_tt.RowCache(50, ways=5))
>>> type(table) is jax_tt.tables.RowCachedTable, type(table.table) is jax_tt.tables.TTTable
(True, True)
>>> table, state = jax_tt.tables.grow(table, table.init(jax.random.key(0)), 1200, key=jax.random.key(1))
>>> table.num_embeddings
1200
"""

from jax_tt._kinds.cached.table import RowCachedTable as RowCachedTable
from jax_tt._kinds.coded.table import CodedTable as CodedTable
from jax_tt._kinds.composite.mixed import MixedTable as MixedTable
from jax_tt._kinds.composite.sum import SumTable as SumTable
from jax_tt._kinds.dense.table import DenseTable as DenseTable
from jax_tt._kinds.hashed.table import HashTable as HashTable
from jax_tt._kinds.ordered.table import OrderedTable as OrderedTable
from jax_tt._kinds.quantized.table import QuantizedTable as QuantizedTable
from jax_tt._kinds.sharded.table import ShardedTable as ShardedTable
from jax_tt._kinds.tensor_train.table import TTTable as TTTable
from jax_tt._ops.change_tables import grow_table as grow
from jax_tt._ops.change_tables import reorder_table as reorder
from jax_tt._ops.lookup import attend as attend
from jax_tt._table.whole import to_dense as to_dense
from jax_tt._table.wrapper import find as find
from jax_tt._table.wrapper import innermost as innermost

__all__ = [
    "CodedTable",
    "DenseTable",
    "HashTable",
    "MixedTable",
    "OrderedTable",
    "QuantizedTable",
    "RowCachedTable",
    "ShardedTable",
    "SumTable",
    "TTTable",
    "attend",
    "find",
    "grow",
    "innermost",
    "reorder",
    "to_dense",
]
