"""Tensor-train embedding tables for JAX: compressed, differentiable, with updates fused into the backward pass."""

import importlib
import importlib.util
from typing import Any

from jax_tt import _environment, _ffi
from jax_tt import optimizers as optimizers
from jax_tt import order as order
from jax_tt._algebra.add import tt_add as tt_add
from jax_tt._algebra.approximation import TTApproximation as TTApproximation
from jax_tt._algebra.from_dense import tt_from_dense as tt_from_dense
from jax_tt._algebra.grow import tt_grow as tt_grow
from jax_tt._algebra.inner import tt_inner as tt_inner
from jax_tt._algebra.inner import tt_norm as tt_norm
from jax_tt._algebra.refine import tt_refine as tt_refine
from jax_tt._algebra.reorder import tt_reorder as tt_reorder
from jax_tt._algebra.residual_shapes import tt_residual_shapes as tt_residual_shapes
from jax_tt._algebra.residuals import TTResidual as TTResidual
from jax_tt._algebra.residuals import tt_residuals as tt_residuals
from jax_tt._algebra.round import tt_round as tt_round
from jax_tt._bags import Bags as Bags
from jax_tt._cache.cached import RowCachedTable as RowCachedTable
from jax_tt._cache.config import RowCache as RowCache
from jax_tt._cache.config import WriteBack as WriteBack
from jax_tt._cache.directory import CacheDirectory as CacheDirectory
from jax_tt._cache.fill import fill_cache as fill_cache
from jax_tt._cache.lookup import cached_tt_embed_bag as cached_tt_embed_bag
from jax_tt._cache.lookup import cached_tt_lookup as cached_tt_lookup
from jax_tt._cache.miss_ratio import MissRatioCurve as MissRatioCurve
from jax_tt._cache.miss_ratio import miss_ratio_curve as miss_ratio_curve
from jax_tt._cache.refresh import flush_cache as flush_cache
from jax_tt._cache.refresh import populate_cache as populate_cache
from jax_tt._cache.refresh import refresh_if_due as refresh_if_due
from jax_tt._cache.refresh import reset_cache as reset_cache
from jax_tt._cache.resize import resize_cache as resize_cache
from jax_tt._cache.statistics import cache_statistics as cache_statistics
from jax_tt._cache.table import CachedTable as CachedTable
from jax_tt._cache.table import init_cached_table as init_cached_table
from jax_tt._coded.encode import encode as encode
from jax_tt._coded.table import CodedTable as CodedTable
from jax_tt._collection.checkpoint import checkpoint_state as checkpoint_state
from jax_tt._collection.checkpoint import checkpoint_target as checkpoint_target
from jax_tt._collection.checkpoint import restored_state as restored_state
from jax_tt._collection.collection import Collection as Collection
from jax_tt._collection.feature import Feature as Feature
from jax_tt._collection.growth import grow_collection_if_full as grow_collection_if_full
from jax_tt._collection.host_batch import host_batch as host_batch
from jax_tt._collection.insertion import insert_collection_keys as insert_collection_keys
from jax_tt._collection.keyed_bags import KeyedBags as KeyedBags
from jax_tt._collection.lookup import embed_collection as embed_collection
from jax_tt._collection.reporter import StatisticsReporter as StatisticsReporter
from jax_tt._collection.statistics import TableStatistics as TableStatistics
from jax_tt._composite.mixed import MixedTable as MixedTable
from jax_tt._composite.residuals import residual_table as residual_table
from jax_tt._composite.sum import SumTable as SumTable
from jax_tt._composite.widths import quantize_mixed as quantize_mixed
from jax_tt._compress.compress import Compressed as Compressed
from jax_tt._compress.compress import Measured as Measured
from jax_tt._compress.compress import compress as compress
from jax_tt._describe import dense_table as dense_table
from jax_tt._describe import hash_table as hash_table
from jax_tt._describe import tt_table as tt_table
from jax_tt._export import export_checks as export_checks
from jax_tt._export import register as register
from jax_tt._files.coded import load_coded as load_coded
from jax_tt._files.coded import save_coded as save_coded
from jax_tt._files.mapped import map_arrays as map_arrays
from jax_tt._files.mapped import save_arrays as save_arrays
from jax_tt._files.mixed import load_mixed as load_mixed
from jax_tt._files.mixed import save_mixed as save_mixed
from jax_tt._files.quantized import load_quantized as load_quantized
from jax_tt._files.quantized import save_quantized as save_quantized
from jax_tt._files.stored import FileError as FileError
from jax_tt._files.tables import StoredTable as StoredTable
from jax_tt._files.tables import load_tables as load_tables
from jax_tt._files.tables import save_tables as save_tables
from jax_tt._hash.admission import AdmitAfter as AdmitAfter
from jax_tt._hash.admission import AdmitWithProbability as AdmitWithProbability
from jax_tt._hash.dump import Loaded as Loaded
from jax_tt._hash.dump import dump_keys as dump_keys
from jax_tt._hash.dump import load_keys as load_keys
from jax_tt._hash.entries import hash_statistics as hash_statistics
from jax_tt._hash.entries import table_keys as table_keys
from jax_tt._hash.grow import grow_if_full as grow_if_full
from jax_tt._hash.ids import hash_ids as hash_ids
from jax_tt._hash.initial import Constant as Constant
from jax_tt._hash.initial import InitialRows as InitialRows
from jax_tt._hash.initial import Normal as Normal
from jax_tt._hash.initial import TruncatedNormal as TruncatedNormal
from jax_tt._hash.initial import Uniform as Uniform
from jax_tt._hash.insert import Evicted as Evicted
from jax_tt._hash.insert import Inserted as Inserted
from jax_tt._hash.insert import insert_keys as insert_keys
from jax_tt._hash.keys import split_keys as split_keys
from jax_tt._hash.keys import whole_keys as whole_keys
from jax_tt._hash.located import with_slots as with_slots
from jax_tt._hash.missing import MissingKeyWarning as MissingKeyWarning
from jax_tt._hash.remove import KeyView as KeyView
from jax_tt._hash.remove import remove_keys as remove_keys
from jax_tt._hash.table import HashTable as HashTable
from jax_tt._include import get_include as get_include
from jax_tt._init import init_cores as init_cores
from jax_tt._lookup.attend import tt_attend as tt_attend
from jax_tt._lookup.calls import lookup_rows as lookup_rows
from jax_tt._lookup.calls import pooled_rows as pooled_rows
from jax_tt._lookup.dense_bag import embed_bag as embed_bag
from jax_tt._lookup.embed_bag import tt_embed_bag as tt_embed_bag
from jax_tt._lookup.fused import fused_embed_bag as fused_embed_bag
from jax_tt._lookup.fused import fused_tt_embed_bag as fused_tt_embed_bag
from jax_tt._lookup.fused import fused_tt_lookup as fused_tt_lookup
from jax_tt._lookup.lookup import tt_lookup as tt_lookup
from jax_tt._lookup.out_of_range import count_out_of_range as count_out_of_range
from jax_tt._lookup.to_dense import tt_to_dense as tt_to_dense
from jax_tt._plan.bandwidths import Bandwidths as Bandwidths
from jax_tt._plan.device_plan import DevicePlan as DevicePlan
from jax_tt._plan.device_plan import PlacedTable as PlacedTable
from jax_tt._plan.exchange import plan_exchange as plan_exchange
from jax_tt._plan.measure import measure_bandwidths as measure_bandwidths
from jax_tt._plan.placements import plan_placements as plan_placements
from jax_tt._plan.plan import plan as plan
from jax_tt._plan.table_plan import PlannedTable as PlannedTable
from jax_tt._plan.table_plan import TablePlan as TablePlan
from jax_tt._quantized.fbgemm import from_fbgemm as from_fbgemm
from jax_tt._quantized.fbgemm import to_fbgemm as to_fbgemm
from jax_tt._quantized.quantize import quantize as quantize
from jax_tt._quantized.table import QuantizedTable as QuantizedTable
from jax_tt._reports import OutOfRangeWarning as OutOfRangeWarning
from jax_tt._shape import TTCost as TTCost
from jax_tt._shape import TTShape as TTShape
from jax_tt._sharding.options import Exchange as Exchange
from jax_tt._sharding.placement import Placement as Placement
from jax_tt._sharding.table import ShardedTable as ShardedTable
from jax_tt._sharding.tables import shard_tables as shard_tables
from jax_tt._split_ids import SplitIds as SplitIds
from jax_tt._tables.dense import DenseTable as DenseTable
from jax_tt._tables.dump import LoadedRows as LoadedRows
from jax_tt._tables.dump import dump_rows as dump_rows
from jax_tt._tables.dump import load_rows as load_rows
from jax_tt._tables.fused import FusedTable as FusedTable
from jax_tt._tables.fused import init_fused_table as init_fused_table
from jax_tt._tables.options import Lookup as Lookup
from jax_tt._tables.options import StepInputs as StepInputs
from jax_tt._tables.options import Update as Update
from jax_tt._tables.table import Table as Table
from jax_tt._tables.tensor_train import TTTable as TTTable
from jax_tt._tiers.disk import StoreError as StoreError
from jax_tt._tiers.table import Tier as Tier
from jax_tt._tiers.table import TierStatistics as TierStatistics
from jax_tt._tiers.tiers import Staged as Staged
from jax_tt._tiers.tiers import Tiers as Tiers
from jax_tt.order._ordered import OrderedTable as OrderedTable

__version__ = "0.1.0"

_environment.check()
_environment.warn_of_misspelt()

# Exported programs hold native ops by name, and a process that loads one need not have run any. To look for a GPU would
# start JAX's backends: those ops wait for `register`.
_ffi.load("cpu")

# Flax is optional: these names load it when they are first used.
_LAYERS = (
    "TTEmbed",
    "TTEmbedBag",
    "Embed",
    "EmbedBag",
    "EmbedCollection",
    "TableEmbed",
    "TableEmbedBag",
    "HashEmbed",
    "HashEmbedBag",
    "FusedParam",
    "FusedOptimizer",
    "value_and_grad",
    "grad",
    "LayerTiers",
    "CacheState",
    "HashState",
    "PageTable",
    "IdOrderState",
    "LookupCounts",
    "OutOfRange",
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
