"""The devices that a run divides its tables and batches over."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.dlrm.batch import Batch
from examples.dlrm.config import Config

AXIS = "devices"


def use(config: Config) -> None:
    """Lets JAX have as many devices as asked for where it runs on the CPU. Call it before JAX starts."""
    if config.devices > 1:
        jax.config.update("jax_num_cpu_devices", config.devices // config.processes)


def join(config: Config, process: int, port: int) -> None:
    """Makes this process one of several of this machine. Call it before JAX starts."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", config.processes, process)


def mesh_of(config: Config) -> Mesh | None:
    """The mesh of a run, or None for a single device."""
    if config.devices == 1:
        return None
    if jax.device_count() < config.devices:
        raise SystemExit(
            f"--devices: got {config.devices}, but JAX has {jax.device_count()} of {jax.default_backend()}"
        )
    return jax.make_mesh((config.devices,), (AXIS,))


def on_all(values: list[jax.Array], mesh: Mesh | None) -> list[jax.Array]:
    """The values with a copy on every device of those that are not divided."""
    if mesh is None:
        return values
    everywhere = NamedSharding(mesh, P())

    def placed(value: jax.Array) -> jax.Array:
        if len(value.sharding.device_set) > 1:
            return value
        if jax.process_count() == 1 or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return jax.device_put(value, everywhere)
        return jax.device_put(np.asarray(value), everywhere)  # all processes have made the same

    return [placed(value) for value in values]


def divided(batch: Batch, mesh: Mesh | None) -> Batch:
    """The batch with an equal part on every device; each process has read the whole batch."""
    if mesh is None:
        return batch
    places = NamedSharding(mesh, P(AXIS))
    if jax.process_count() == 1:
        return jax.device_put(batch, places)
    return jax.tree.map(
        lambda array: jax.make_array_from_callback(array.shape, places, array.__getitem__), batch
    )
