"""`own_constants`: what eager operations of the library bring to devices by themselves."""

from functools import partial

import jax

# A context in which the constants of an operation are no transfers that `jax.transfer_guard` would refuse. Compiled
# programs hold theirs; outside of them, JAX brings the `1` of `x + 1` to one device, and from there to those of `x`.
own_constants = partial(jax.transfer_guard, "allow")
