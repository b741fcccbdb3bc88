"""Imports the jax_tt that is installed, from outside the checkout, and sees that its native module loads."""

import jax_tt
from jax_tt import _native

print("imported", jax_tt.__file__, "native CPU module:", _native.available("cpu"))
assert _native.available("cpu"), "the installed native module did not load"
