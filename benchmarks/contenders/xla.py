"""A lookup in plain JAX, without a library: gather the slices, contract them, sum the bags."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders.ours import cores_of
from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE, Work


def _lookup(work: Work):
    segments = jnp.repeat(jnp.arange(work.bags), work.bag_size)

    def lookup(cores, ids):
        digits = jnp.unravel_index(ids, work.shape.row_factors)
        out = cores[0][digits[0]][:, 0]  # [n, q_0, r_1]
        for core, digit in zip(cores[1:], digits[1:], strict=True):
            out = jnp.einsum("nqr,nrps->nqps", out, core[digit])
            out = out.reshape(out.shape[0], -1, out.shape[-1])
        rows = out.reshape(out.shape[0], -1)
        return jax.ops.segment_sum(rows, segments, work.bags, indices_are_sorted=True)

    return lookup


def _device_ids(work: Work) -> list[jax.Array]:
    return [jnp.asarray(ids, np.int32) for ids in work.batches]


def tt_forward(work: Work) -> Call:
    """Pooled rows."""
    cores, ids, forward = cores_of(work), _device_ids(work), jax.jit(_lookup(work))
    return lambda i: forward(cores, ids[i % len(ids)]).block_until_ready()


def tt_step(work: Work) -> Call:
    """Forward, backward and SGD on the cores."""
    lookup, gradient, ids = _lookup(work), jnp.asarray(work.gradient), _device_ids(work)
    cores = cores_of(work)

    def step(cores, ids):
        value, gradients = jax.value_and_grad(lambda c: jnp.vdot(lookup(c, ids), gradient))(cores)
        return value, jax.tree.map(lambda c, g: c - LEARNING_RATE * g, cores, gradients)

    step = jax.jit(step, donate_argnums=0)

    def call(i: int) -> object:
        nonlocal cores
        value, cores = step(cores, ids[i % len(ids)])
        return jax.block_until_ready((value, cores))

    return call
