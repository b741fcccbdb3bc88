"""Exported programs: the checks that `jax.export.export` must skip, and the operations that a process needs to run one.

>>> import jax, jax_tt
>>> cores = jax_tt.tt.init(jax.random.key(0), jax_tt.TTShape.suggest(1000, 8, ranks=4))
>>> lookup = jax.jit(lambda cores, ids: jax_tt.tt.lookup(cores, ids))
>>> ids = jax.ShapeDtypeStruct((4,), "int32")
>>> program = jax.export.export(lookup, disabled_checks=jax_tt.export.checks())(cores, ids)
>>> platforms = jax_tt.export.register()  # in the process that runs the program
>>> program.call(cores, jax.numpy.arange(4)).shape
(4, 8)
"""

from jax_tt._files.export import export_checks as checks
from jax_tt._files.export import register as register

__all__ = [
    "checks",
    "register",
]
