"""The native ops. Table classes use them as methods, with the signatures in `jax_tt._tables.native`.

`tt`, `dense`, `cache` and `cache_forward` call the FFI targets; `partition` lets XLA partition these calls over the
devices of a sharded batch, and adds rules for `jax.vmap`.
"""

from jax_tt import _ffi
from jax_tt._native.cache import cache_observe, cache_populate, cache_probe
from jax_tt._native.cache_forward import cache_forward
from jax_tt._native.dense import dense_backward, dense_forward, dense_update
from jax_tt._native.tt import tt_backward, tt_forward, tt_plan, tt_update

__all__ = [
    "available",
    "cache_forward",
    "cache_observe",
    "cache_populate",
    "cache_probe",
    "dense_backward",
    "dense_forward",
    "dense_update",
    "tt_backward",
    "tt_forward",
    "tt_plan",
    "tt_update",
]


def available(platform: str) -> bool:
    """Whether this process has native ops for ``"cpu"``, ``"cuda"`` or ``"cuda_emulated"``."""
    return _ffi.load(platform) is not None
