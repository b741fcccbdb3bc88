"""Tensor-train embedding tables for JAX: compressed, differentiable, with updates fused into the backward pass."""

import importlib
import importlib.util
import sys
import typing

from jax_tt import cache as cache
from jax_tt import checkpoint as checkpoint
from jax_tt import compression as compression
from jax_tt import dynamic as dynamic
from jax_tt import export as export
from jax_tt import extension as extension
from jax_tt import files as files
from jax_tt import functional as functional
from jax_tt import optimizers as optimizers
from jax_tt import order as order
from jax_tt import pipeline as pipeline
from jax_tt import planning as planning
from jax_tt import tables as tables
from jax_tt import tt as tt
from jax_tt._base import environment as _environment
from jax_tt._base import ffi as _ffi
from jax_tt._base.reports import OutOfRangeWarning as OutOfRangeWarning
from jax_tt._base.version import __version__ as __version__
from jax_tt._collection.collection import Collection as Collection
from jax_tt._collection.feature import Feature as Feature
from jax_tt._collection.lookup_features import lookup_features as lookup_features
from jax_tt._compress.compress import compress as compress
from jax_tt._compress.encode import encode as encode
from jax_tt._compress.quantize import quantize as quantize
from jax_tt._directories.row_cache import RowCache as RowCache
from jax_tt._formats.stored import FileError as FileError
from jax_tt._ids.bags import Bags as Bags
from jax_tt._ids.keyed_bags import KeyedBags as KeyedBags
from jax_tt._ids.placement import Placement as Placement
from jax_tt._ids.split_ids import SplitIds as SplitIds
from jax_tt._ops.cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from jax_tt._ops.describe import coded_table as coded_table
from jax_tt._ops.describe import dense_table as dense_table
from jax_tt._ops.describe import hash_table as hash_table
from jax_tt._ops.describe import quantized_table as quantized_table
from jax_tt._ops.describe import tt_table as tt_table
from jax_tt._ops.lookup import lookup as lookup
from jax_tt._ops.lookup import lookup_bags as lookup_bags
from jax_tt._ops.top_k import top_k as top_k
from jax_tt._planning.plan import plan as plan
from jax_tt._planning.shard_tables import shard_tables as shard_tables
from jax_tt._table.options import Lookup as Lookup
from jax_tt._table.options import Update as Update
from jax_tt._table.table import Table as Table
from jax_tt._tiers.table import Tier as Tier
from jax_tt._tiers.tiers import Tiers as Tiers
from jax_tt._tt.shape import TTShape as TTShape

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
    "FusedParam",
    "FusedOptimizer",
    "value_and_grad",
    "grad",
    "refresh_caches",
)
_MODULES = ("nnx", "linen")


def __getattr__(name: str) -> typing.Any:
    if name not in _LAYERS + _MODULES:
        raise AttributeError(f"module 'jax_tt' has no attribute {name!r}")
    if not _has_flax():
        # In "from jax_tt import ...", Python replaces an AttributeError by one that does not say what to install.
        imported = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise (ImportError if imported else AttributeError)(
            f"jax_tt.{name} needs flax, which is not installed: pip install 'jax-tt[flax]'."
        )
    if name in _MODULES:
        return importlib.import_module(f"jax_tt.{name}")
    value = globals()[name] = getattr(importlib.import_module("jax_tt.nnx"), name)
    return value


def __dir__() -> list[str]:
    ours = globals().keys() - {"importlib", "sys", "typing"}
    return sorted({*ours, *(_LAYERS + _MODULES if _has_flax() else ())})


def _has_flax() -> bool:
    return importlib.util.find_spec("flax") is not None
