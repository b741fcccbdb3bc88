"""BLAS has one thread where several tables are tried beside each other."""

import subprocess
import sys

SCRIPT = """
import os
os.environ["OPENBLAS_NUM_THREADS"] = "2"
from threadpoolctl import threadpool_info
from jax_tt._base.threads import one_blas_thread
with one_blas_thread():
    import scipy.linalg
    found = [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]
    print(len(found), set(found))
"""


def test_numpy_and_scipy_have_one_thread_each():
    """Also where nothing has used scipy before: a library is limited only once it is loaded."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.split() in (["1", "{1}"], ["2", "{1}"])
