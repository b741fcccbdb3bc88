"""`jax.export`: native targets in a process that only runs programs, and our pytrees in serialised programs."""

from __future__ import annotations

import json

import jax
import jax.export

from jax_tt._base import ffi
from jax_tt._ids.bags import Bags
from jax_tt._ids.keyed_bags import KeyedBags
from jax_tt._ids.split_ids import SplitIds

# Programs hold native ops for no other platforms.
_EXPORTED = ("cpu", "cuda")


def register() -> tuple[str, ...]:
    """Registers all native operations that this process can run. Call it before loading an exported program.

    ``import jax_tt`` alone registers the operations for the CPU. The operations for a GPU are registered by the first
    call of one or by this function, since JAX has to start its backends to detect a GPU. Further calls have no effect.

    Returns:
        The platforms whose operations are now registered, a subset of ``"cpu"`` and ``"cuda"``.

    >>> import jax_tt
    >>> platforms = jax_tt.export.register()  # ("cpu", "cuda") beside a GPU
    >>> set(platforms) <= {"cpu", "cuda"}
    True
    """
    return tuple(platform for platform in _EXPORTED if ffi.load(platform) is not None)


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The custom calls that `jax.export.export` must be told to allow; pass them as its ``disabled_checks``.

    Returns:
        One check per native operation of the platforms for which this process can export; an empty list if only the
        reference is installed.

    >>> import jax, jax_tt
    >>> cores = jax_tt.tt.init(jax.random.key(0), jax_tt.TTShape.suggest(1000, 8, ranks=4))
    >>> lookup = jax.jit(lambda cores, ids: jax_tt.tt.lookup(cores, ids))
    >>> ids = jax.ShapeDtypeStruct((4,), "int32")
    >>> export = jax.export.export(lookup, disabled_checks=jax_tt.export.checks())
    >>> export(cores, ids).out_avals[0].shape
    (4, 8)
    """
    modules = filter(None, map(ffi.load, _EXPORTED))
    names = sorted({name for module in modules for name in module.registrations()})
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]


# Once per process, which is why it is done where the module is loaded: these types may then stand among the arguments
# and results of serialised programs.
jax.export.register_pytree_node_serialization(
    Bags,
    serialized_name="jax_tt.Bags",
    serialize_auxdata=lambda static: bytes(static),  # padded
    deserialize_auxdata=lambda stored: tuple(map(bool, stored)),
    from_children=lambda aux_data, children: Bags(*children, *aux_data),
)
jax.export.register_pytree_node_serialization(
    KeyedBags,
    serialized_name="jax_tt.KeyedBags",
    serialize_auxdata=lambda static: json.dumps(static).encode(),  # keys, batch_sizes, unweighted
    deserialize_auxdata=lambda stored: tuple(
        None if part is None else tuple(part) for part in json.loads(stored)
    ),
    from_children=lambda aux_data, children: KeyedBags(*children, *aux_data),
)
jax.export.register_pytree_node_serialization(
    SplitIds,
    serialized_name="jax_tt.SplitIds",
    serialize_auxdata=lambda static: b"",
    deserialize_auxdata=lambda stored: (),
    from_children=lambda aux_data, children: SplitIds(*children),
)
