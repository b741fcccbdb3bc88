"""Hash tables of 64-bit keys: rows are given to keys as they arrive, and taken away again.

`insert` and `grow_if_full` take a table or a collection. Results come first, then the state.

>>> import jax, jax.numpy as jnp, jax_tt, numpy as np
>>> table = jax_tt.hash_table(1024, 8)
>>> inserted, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.array([2**60, 7]))
>>> rows, state = jax_tt.lookup(table, state, np.array([7]))
>>> removed, state = jax_tt.dynamic.remove(table, state, np.array([7]))
>>> jax_tt.dynamic.statistics(table, state)["keys"]
1
"""

from jax_tt._collection import insertion as _insertion  # noqa: F401, registers collections
from jax_tt._directories.admission import AdmitAfter as AdmitAfter
from jax_tt._directories.admission import AdmitWithProbability as AdmitWithProbability
from jax_tt._directories.hash_directory import MissingKeyWarning as MissingKeyWarning
from jax_tt._directories.initial import Constant as Constant
from jax_tt._directories.initial import InitialRows as InitialRows
from jax_tt._directories.initial import Normal as Normal
from jax_tt._directories.initial import TruncatedNormal as TruncatedNormal
from jax_tt._directories.initial import Uniform as Uniform
from jax_tt._ids.keys import hash_ids as hash_ids
from jax_tt._ids.keys import join_keys as join_keys
from jax_tt._ids.keys import split_keys as split_keys
from jax_tt._ids.keys import whole_keys as whole_keys
from jax_tt._kinds.hashed.change import grow_if_full as grow_if_full
from jax_tt._ops.entries import hash_statistics as statistics
from jax_tt._ops.entries import table_keys as keys_of
from jax_tt._ops.insert import insert_keys as insert
from jax_tt._ops.insert import with_slots as with_slots
from jax_tt._ops.inserting import Evicted as Evicted
from jax_tt._ops.inserting import Inserted as Inserted
from jax_tt._ops.remove import KeyView as KeyView
from jax_tt._ops.remove import remove_keys as remove

__all__ = [
    "AdmitAfter",
    "AdmitWithProbability",
    "Constant",
    "Evicted",
    "InitialRows",
    "Inserted",
    "KeyView",
    "MissingKeyWarning",
    "Normal",
    "TruncatedNormal",
    "Uniform",
    "grow_if_full",
    "hash_ids",
    "insert",
    "join_keys",
    "keys_of",
    "remove",
    "split_keys",
    "statistics",
    "whole_keys",
    "with_slots",
]
