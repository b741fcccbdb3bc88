"""The native ops. `jax_tt._tables.native` calls those of a kind of tables.

`tt`, `dense`, `cache`, `cache_forward`, `hash` and `route` call the FFI targets; `partition` lets XLA
partition these calls over the devices of a sharded batch, and adds rules for `jax.vmap`.
"""

from jax_tt import _ffi
from jax_tt._native._table_call import Calls
from jax_tt._native.cache import cache_observe, cache_populate, cache_probe
from jax_tt._native.cache_forward import cache_forward
from jax_tt._native.dense import DENSE
from jax_tt._native.hash import (
    hash_double,
    hash_exchange,
    hash_find,
    hash_initial,
    hash_insert,
    hash_reset,
)
from jax_tt._native.route import route_bags, route_distinct
from jax_tt._native.tt import TT, tt_plan

__all__ = [
    "DENSE",
    "TT",
    "Calls",
    "available",
    "cache_forward",
    "cache_observe",
    "cache_populate",
    "cache_probe",
    "hash_double",
    "hash_exchange",
    "hash_find",
    "hash_initial",
    "hash_insert",
    "hash_reset",
    "route_bags",
    "route_distinct",
    "tt_plan",
]


def available(platform: str) -> bool:
    """Whether this process has native ops for ``"cpu"``, ``"cuda"`` or ``"cuda_emulated"``."""
    return _ffi.load(platform) is not None
