"""scikit-build-core for a Python that is new enough.

To an older one, an older pip would say that jaxlib has no release, and nothing of the Python that it needs.
"""

import platform
import sys

if sys.version_info < (3, 11):  # noqa: UP036 -- this is what tells them
    sys.exit(f"jax_tt needs Python 3.11 or newer; this is Python {platform.python_version()}.")

from scikit_build_core.build import *  # noqa: F403
