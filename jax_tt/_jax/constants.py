"""`own_constants`: scalars that eager operations of the library bring to a device."""

from functools import partial

import jax

# A context in which the constants of an operation are no transfers that `jax.transfer_guard` would refuse. Compiled
# programs hold theirs; eager JAX brings each `1` of `x + 1` to the device.
own_constants = partial(jax.transfer_guard_host_to_device, "allow")
