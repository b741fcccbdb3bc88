"""Tensor-train embedding tables for JAX: compressed, differentiable, with updates fused into the backward pass."""

import importlib
import importlib.util
from typing import Any

from jax_tt import cache as cache
from jax_tt import checkpoint as checkpoint
from jax_tt import extension as extension
from jax_tt import files as files
from jax_tt import optimizers as optimizers
from jax_tt import order as order
from jax_tt import tt as tt
from jax_tt._base import environment, ffi
from jax_tt._base.include import get_include as get_include
from jax_tt._base.reports import OutOfRangeWarning as OutOfRangeWarning
from jax_tt._base.version import __version__ as __version__
from jax_tt._collection.collection import Collection as Collection
from jax_tt._collection.feature import Feature as Feature
from jax_tt._collection.growth import grow_collection_if_full as grow_collection_if_full
from jax_tt._collection.host_batch import host_batch as host_batch
from jax_tt._collection.insertion import insert_collection_keys as insert_collection_keys
from jax_tt._collection.lookup import embed_collection as embed_collection
from jax_tt._collection.reporter import StatisticsReporter as StatisticsReporter
from jax_tt._collection.statistics import TableStatistics as TableStatistics
from jax_tt._compress.compress import Compressed as Compressed
from jax_tt._compress.compress import Measured as Measured
from jax_tt._compress.compress import compress as compress
from jax_tt._compress.encode import encode as encode
from jax_tt._compress.fbgemm import from_fbgemm as from_fbgemm
from jax_tt._compress.fbgemm import to_fbgemm as to_fbgemm
from jax_tt._compress.mixed_widths import quantize_mixed as quantize_mixed
from jax_tt._compress.quantize import quantize as quantize
from jax_tt._compress.residuals import residual_table as residual_table
from jax_tt._files.export import export_checks as export_checks
from jax_tt._files.export import register as register
from jax_tt._formats.stored import FileError as FileError
from jax_tt._ids.bags import Bags as Bags
from jax_tt._ids.hash_ids import hash_ids as hash_ids
from jax_tt._ids.keyed_bags import KeyedBags as KeyedBags
from jax_tt._ids.keys import split_keys as split_keys
from jax_tt._ids.keys import whole_keys as whole_keys
from jax_tt._ids.placement import Placement as Placement
from jax_tt._ids.split_ids import SplitIds as SplitIds
from jax_tt._kinds.cached.table import RowCachedTable as RowCachedTable
from jax_tt._kinds.coded.table import CodedTable as CodedTable
from jax_tt._kinds.composite.mixed import MixedTable as MixedTable
from jax_tt._kinds.composite.sum import SumTable as SumTable
from jax_tt._kinds.dense.table import DenseTable as DenseTable
from jax_tt._kinds.hashed.change import grow_if_full as grow_if_full
from jax_tt._kinds.hashed.table import HashTable as HashTable
from jax_tt._kinds.ordered.table import OrderedTable as OrderedTable
from jax_tt._kinds.quantized.table import QuantizedTable as QuantizedTable
from jax_tt._kinds.sharded.options import Exchange as Exchange
from jax_tt._kinds.sharded.table import ShardedTable as ShardedTable
from jax_tt._kinds.tensor_train.table import TTTable as TTTable
from jax_tt._lookup.calls import lookup_rows as lookup_rows
from jax_tt._lookup.calls import pooled_rows as pooled_rows
from jax_tt._ops import registered as _registered  # noqa: F401
from jax_tt._ops.change_tables import grow_table as grow_table
from jax_tt._ops.change_tables import reorder_table as reorder_table
from jax_tt._ops.coded_table import coded_table as coded_table
from jax_tt._ops.dense_bag import embed_bag as embed_bag
from jax_tt._ops.describe import dense_table as dense_table
from jax_tt._ops.describe import hash_table as hash_table
from jax_tt._ops.describe import quantized_table as quantized_table
from jax_tt._ops.describe import tt_table as tt_table
from jax_tt._ops.entries import hash_statistics as hash_statistics
from jax_tt._ops.entries import table_keys as table_keys
from jax_tt._ops.fused import fused_embed_bag as fused_embed_bag
from jax_tt._ops.fused_table import FusedTable as FusedTable
from jax_tt._ops.fused_table import init_fused_table as init_fused_table
from jax_tt._ops.insert import insert_keys as insert_keys
from jax_tt._ops.inserting import Evicted as Evicted
from jax_tt._ops.inserting import Inserted as Inserted
from jax_tt._ops.located import with_slots as with_slots
from jax_tt._ops.out_of_range import count_out_of_range as count_out_of_range
from jax_tt._ops.remove import KeyView as KeyView
from jax_tt._ops.remove import remove_keys as remove_keys
from jax_tt._planning.bandwidths import Bandwidths as Bandwidths
from jax_tt._planning.device_plan import DevicePlan as DevicePlan
from jax_tt._planning.device_plan import PlacedTable as PlacedTable
from jax_tt._planning.exchange import plan_exchange as plan_exchange
from jax_tt._planning.measure import measure_bandwidths as measure_bandwidths
from jax_tt._planning.placements import plan_placements as plan_placements
from jax_tt._planning.plan import plan as plan
from jax_tt._planning.shard_tables import shard_tables as shard_tables
from jax_tt._planning.table_plan import PlannedTable as PlannedTable
from jax_tt._planning.table_plan import TablePlan as TablePlan
from jax_tt._sets.admission import AdmitAfter as AdmitAfter
from jax_tt._sets.admission import AdmitWithProbability as AdmitWithProbability
from jax_tt._sets.initial import Constant as Constant
from jax_tt._sets.initial import InitialRows as InitialRows
from jax_tt._sets.initial import Normal as Normal
from jax_tt._sets.initial import TruncatedNormal as TruncatedNormal
from jax_tt._sets.initial import Uniform as Uniform
from jax_tt._sets.missing import MissingKeyWarning as MissingKeyWarning
from jax_tt._sets.row_cache import RowCache as RowCache
from jax_tt._table.options import Lookup as Lookup
from jax_tt._table.options import StepInputs as StepInputs
from jax_tt._table.options import Update as Update
from jax_tt._table.table import Table as Table
from jax_tt._tiers.table import Tier as Tier
from jax_tt._tiers.table import TierStatistics as TierStatistics
from jax_tt._tiers.tiers import Staged as Staged
from jax_tt._tiers.tiers import Tiers as Tiers
from jax_tt._tt.shape import TTShape as TTShape

environment.check()
environment.warn_of_misspelt()

# Exported programs hold native ops by name, and a process that loads one need not have run any. To look for a GPU would
# start JAX's backends: those ops wait for `register`.
ffi.load("cpu")

# Flax is optional: these names load it when they are first used.
_LAYERS = (
    "TTEmbed",
    "TTEmbedBag",
    "Embed",
    "EmbedBag",
    "EmbedCollection",
    "TableEmbed",
    "TableEmbedBag",
    "FusedParam",
    "FusedOptimizer",
    "value_and_grad",
    "grad",
    "refresh_caches",
)
_MODULES = ("nnx", "linen")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"jax_tt.{name}")
    if name not in _LAYERS:
        raise AttributeError(f"module 'jax_tt' has no attribute {name!r}")
    if not _has_flax():  # an AttributeError, so that hasattr says no
        raise AttributeError(
            f"jax_tt.{name} needs flax, which is not installed: pip install 'jax-tt[flax]'."
        )
    return getattr(importlib.import_module("jax_tt.nnx"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *(_LAYERS + _MODULES if _has_flax() else ())})


def _has_flax() -> bool:
    return importlib.util.find_spec("flax") is not None
