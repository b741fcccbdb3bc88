"""Tensor trains as tuples of cores: algebra, conversions, and lookups of arrays without a `Table`.

A train is ``d`` cores ``[p_k, r_k, q_k, r_{k+1}]``, whose sizes a `jax_tt.TTShape` describes. The operations are
differentiable in the cores and have no optimizer: `to_table` makes a table of cores that is updated in the backward
pass.

>>> import jax, jax.numpy as jnp, jax_tt
>>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
>>> cores = jax_tt.tt.init(jax.random.key(0), shape)
>>> twice = jax_tt.tt.add(cores, cores)
>>> rows = jax_tt.tt.lookup(twice, jnp.array([1, 999]))
>>> bool(jnp.allclose(rows, 2 * jax_tt.tt.to_dense(cores, 1000)[jnp.array([1, 999])], atol=1e-6))
True
"""

from jax_tt._compress.residuals import Residual as Residual
from jax_tt._compress.residuals import tt_residuals as residuals
from jax_tt._ops.trains import tt_attend as attend
from jax_tt._ops.trains import tt_embed_bag as embed_bag
from jax_tt._ops.trains import tt_lookup as lookup
from jax_tt._ops.trains import tt_to_dense as to_dense
from jax_tt._ops.trains import tt_to_table as to_table
from jax_tt._tt.approximation import Approximation as Approximation
from jax_tt._tt.from_dense import tt_from_dense as from_dense
from jax_tt._tt.grow import tt_grow as grow
from jax_tt._tt.initial_cores import init_cores as init
from jax_tt._tt.refine import tt_refine as refine
from jax_tt._tt.reorder import tt_reorder as reorder
from jax_tt._tt.residual_shapes import tt_residual_shapes as residual_shapes
from jax_tt._tt.round import tt_round as round
from jax_tt._tt.shape import Cost as Cost
from jax_tt._tt.sums import tt_add as add
from jax_tt._tt.sums import tt_inner as inner
from jax_tt._tt.sums import tt_norm as norm

__all__ = [
    "Approximation",
    "Cost",
    "Residual",
    "add",
    "attend",
    "embed_bag",
    "from_dense",
    "grow",
    "init",
    "inner",
    "lookup",
    "norm",
    "refine",
    "reorder",
    "residual_shapes",
    "residuals",
    "round",
    "to_dense",
    "to_table",
]
