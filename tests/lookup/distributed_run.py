"""One process of a data-parallel run: ``python -m tests.lookup.distributed_run PROCESS COUNT PORT OUT.npz``.

With a count of 1 it is the single process that the others must equal. Writes the parameters after a few steps.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from tests.helpers import SHAPES, make_case

SHAPE = SHAPES["d3"]
RULE = jax_tt.optimizers.Adagrad(0.1)
STEPS, BATCH, LENGTH = 3, 8, 5
ROWS, COLUMNS = 120, 8


def _plain_loss(cores: Any, ids: Any, weights: Any) -> Any:
    bags = jax_tt.Bags(ids, None, weights, True)
    return jnp.sum(jnp.sin(jax_tt.tt.embed_bag(cores, bags, combiner="mean")))


def _fused_loss(table: Any, ids: Any, weights: Any) -> Any:
    op = jax_tt.functional.fused_embed_bag if len(table.cores) == 1 else jax_tt.tt.fused_embed_bag
    return jnp.sum(jnp.sin(op(table, jax_tt.Bags(ids, None, weights, True), RULE)))


def _step(fused: bool, parameters: Any, ids: Any, weights: Any) -> Any:
    loss = _fused_loss if fused else _plain_loss
    value, gradient = jax.value_and_grad(loss)(parameters, ids, weights)
    return value, gradient if fused else jax.tree.map(
        lambda p, g: p - 0.1 * g, parameters, gradient
    )


def _shard_mapped(mesh: Any, parameters: Any, ids: Any, weights: Any) -> Any:
    """The same fused step with the shards in the program's own hands."""

    def local(parameters: Any, ids: Any, weights: Any) -> Any:
        value, new = jax.value_and_grad(_fused_loss)(parameters, ids, weights)
        return jax.lax.psum(value, "data"), new

    specs = (P(), P("data"), P("data"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), P()))(
        parameters, ids, weights
    )


def main(process: int, count: int, port: str, path: str) -> None:
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    assert jax.device_count() == count and jax.local_device_count() == 1
    cores = make_case(SHAPE, "float32", False).cores
    dense = np.random.default_rng(5).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    kinds = {
        "tt": (functools.partial(_step, False), cores),
        "tt fused": (functools.partial(_step, True), jax_tt.functional.init_fused(cores, RULE)),
        "dense fused": (
            functools.partial(_step, True),
            jax_tt.functional.init_fused(jnp.asarray(dense), RULE),
        ),
        "tt fused shard_map": (
            functools.partial(_shard_mapped, mesh),
            jax_tt.functional.init_fused(cores, RULE),
        ),
    }
    share = slice(process * BATCH // count, (process + 1) * BATCH // count)
    place = functools.partial(
        jax.make_array_from_process_local_data, NamedSharding(mesh, P("data"))
    )
    results: dict[str, np.ndarray] = {}
    for name, (step, parameters) in kinds.items():
        parameters = jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(
                NamedSharding(mesh, P()), np.asarray(leaf)
            ),
            parameters,
        )
        rng = np.random.default_rng(9)
        compiled = None
        losses = []
        for _ in range(STEPS):
            # Duplicates within and across shards, padding, and rows that only one shard touches.
            ids = rng.integers(0, 60, (BATCH, LENGTH)).astype(np.int32)
            ids[:4] %= 20
            ids[rng.random(ids.shape) < 0.2] = -1
            weights = rng.uniform(0.5, 1.5, ids.shape).astype(np.float32)
            batch = place(ids[share]), place(weights[share])
            if compiled is None:
                compiled = jax.jit(step, donate_argnums=0).lower(parameters, *batch).compile()
                _check_program(name, compiled.as_text(), parameters)
            value, parameters = compiled(parameters, *batch)
            losses.append(float(value))
        for k, leaf in enumerate(jax.tree.leaves(parameters)):
            results[f"{name} {k}"] = np.asarray(leaf)
        results[f"{name} losses"] = np.array(losses)
    np.savez(path, **results)


def _check_program(name: str, program: str, parameters: Any) -> None:
    gathers = re.findall(r"= (\S+) all-gather", program)
    if name.startswith("tt"):
        assert not gathers, f"{name}: gathers {gathers}"
    # A dense table takes the step of the whole batch on each device: ids and gradients travel, never the table.
    tables = {
        f"f32[{','.join(map(str, leaf.shape))}]"
        for leaf in jax.tree.leaves(parameters)
        if leaf.ndim > 1
    }
    assert not [g for g in gathers if g.split("{")[0] in tables], (
        f"{name}: gathers a table: {gathers}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
