"""The devices that a run divides its tables and batches over."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.dlrm.batch import Batch
from examples.dlrm.config import Config

AXIS = "devices"


def use(config: Config) -> None:
    """Lets JAX have as many devices as asked for where it runs on the CPU. Call it before JAX starts."""
    if config.devices > 1:
        jax.config.update("jax_num_cpu_devices", config.devices)


def mesh_of(config: Config) -> Mesh | None:
    """The mesh of a run, or None for a single device."""
    if config.devices == 1:
        return None
    if jax.device_count() < config.devices:
        raise SystemExit(
            f"--devices: got {config.devices}, but JAX has {jax.device_count()} of {jax.default_backend()}"
        )
    return jax.make_mesh((config.devices,), (AXIS,), axis_types=(AxisType.Auto,))


def on_all(values: list[jax.Array], mesh: Mesh | None) -> list[jax.Array]:
    """The values with a copy on every device of those that are not divided."""
    if mesh is None:
        return values
    everywhere = NamedSharding(mesh, P())
    return [
        value if len(value.sharding.device_set) > 1 else jax.device_put(value, everywhere)
        for value in values
    ]


def divided(batch: Batch, mesh: Mesh | None) -> Batch:
    """The batch with an equal part on every device."""
    return batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, P(AXIS)))
