"""Imports the jax_tt that is installed, from outside the checkout, and sees that its native module loads."""

import jax_tt
from jax_tt._base.ffi import available

print("imported", jax_tt.__file__, "native CPU module:", available("cpu"))
assert available("cpu"), "the installed native module did not load"
