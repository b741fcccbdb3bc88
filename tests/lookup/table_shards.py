"""Steps of a dense table that is sharded over the devices, and what their programs send between the devices."""

from __future__ import annotations

import functools
import gc
import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt

ROWS, WIDTH, BATCH = 512, 8, 16
RULES = {
    "gradients": None,
    "sgd": jax_tt.optimizers.SGD(0.5),
    "rowwise": jax_tt.optimizers.RowWiseAdagrad(0.5),
    "adam": jax_tt.optimizers.Adam(0.125),
}
COLLECTIVES = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"


def mesh_of(shape: tuple[int, int], kind: AxisType) -> Any:
    return jax.make_mesh(
        shape, ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices()[: math.prod(shape)]
    )


def largest_message(compiled: Any) -> int:
    """The number of elements of the largest array that the devices of a program exchange."""
    text = compiled.as_text()
    found = re.findall(rf"= ([^=\n]*?) (?:{COLLECTIVES})(?:-start)?\(", text)
    sizes = [
        math.prod(map(int, filter(None, dims.split(","))))
        for types in found
        for dims in re.findall(r"\w+\[([\d,]*)\]", types)
    ]
    return max(sizes, default=0)


def placed(table: Any, state: Any, mesh: Any, spec: P) -> Any:
    """The state with rows sharded like ``spec``, which a slot with one number per row follows."""

    def place(array: Any) -> Any:
        given = P(*spec[: array.ndim]) if array.shape[:1] == (table.num_embeddings,) else P()
        # Every process has all of the values.
        values = np.asarray(array)
        return jax.make_array_from_callback(
            values.shape, NamedSharding(mesh, given), lambda at: values[at]
        )

    return jax.tree.map(place, state)


def table_of(rule: str, **options: Any) -> tuple[Any, Any]:
    """A table whose rows have few bits, so that sums of them are exact, and its state."""
    values = np.random.default_rng(0).integers(-8, 8, (ROWS, WIDTH)).astype(np.float32)
    table = jax_tt.dense_table(ROWS, WIDTH, optimizer=RULES[rule], **options)
    state = table.init(jax.random.key(0))
    return table, {**state, "embedding": jnp.asarray(values)}


def batch_of(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Ids, many of them twice, and targets."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, (BATCH, 3)).astype(np.int32)
    ids[BATCH // 2 :, 1] = ids[: BATCH // 2, 0]
    return ids, rng.integers(-4, 4, (BATCH, WIDTH)).astype(np.float32)


@functools.cache
def step_of(table: Any) -> Any:
    """A jitted step: the sums of bags, and the state after it, or the gradients."""

    def loss(trained: Any, state: Any, ids: Any, target: Any) -> Any:
        sums, _ = jax_tt.lookup_bags(table, {**state, **trained}, ids)
        return jnp.sum(sums * target), sums

    def step(state: Any, ids: Any, target: Any) -> Any:
        trained = {name: state[name] for name in table.spec.trained_names}
        new, sums = jax.grad(loss, has_aux=True)(trained, state, ids, target)
        return sums, {**state, **new}

    return jax.jit(step, donate_argnums=0)


def check_steps(mesh: Any, rule: str, spec: P, steps: int) -> None:
    """Steps on a mesh equal those on one device bit for bit, keep all shardings, and send no shard of the table."""
    table, state = table_of(rule)
    step = step_of(table)
    ids, target = batch_of()
    shards = placed(table, state, mesh, spec)
    over = NamedSharding(mesh, P("data"))
    batch = [
        jax.make_array_from_callback(x.shape, over, lambda at, x=x: x[at]) for x in (ids, target)
    ]
    compiled = step.lower(shards, *batch).compile()
    axes = [axis for axes in spec if axes for axis in (axes if isinstance(axes, tuple) else [axes])]
    divided = math.prod(mesh.shape[axis] for axis in axes)
    assert largest_message(compiled) < ROWS * WIDTH // divided
    before = {name: array.sharding for name, array in shards.items()}
    for number in range(steps):
        sums, state = step(state, jnp.asarray(ids), jnp.asarray(target))
        shard_sums, shards = compiled(shards, *batch)
        # Rows with many bits are added in another order.
        check_equal(shard_sums, sums, "sums", 0 if number == 0 else 1e-5)
    for name, array in shards.items():
        assert array.sharding.is_equivalent_to(before[name], array.ndim), (name, array.sharding)
        check_equal(array, state[name], name)


def check_memory(mesh: Any, rule: str, spec: P, steps: int) -> None:
    """Lookups and steps need less than a tenth of a shard of table and slots beside it.

    Counted by XLA for one device, and as the arrays of every device after each step.
    """
    table = jax_tt.dense_table(2**15, 32, optimizer=RULES[rule])
    # Copies, since arrays of numpy may keep those of JAX.
    state = jax.tree.map(lambda x: np.array(x), table.init(jax.random.key(0)))
    before = _bytes_by_device()
    shards = placed(table, state, mesh, spec)
    axes = [axis for axes in spec if axes for axis in (axes if isinstance(axes, tuple) else [axes])]
    rows = [x for x in state.values() if x.ndim]
    share = sum(x.nbytes for x in rows) // math.prod(mesh.shape[axis] for axis in axes)
    over = NamedSharding(mesh, P("data"))
    shapes = {"int32": (BATCH, 3), "float32": (BATCH, 32)}
    batch = [
        jax.make_array_from_callback(
            shape, over, lambda at, kind=kind, shape=shape: np.ones(shape, kind)[at]
        )
        for kind, shape in shapes.items()
    ]

    def forward(state: Any, ids: Any, target: Any) -> Any:
        return jnp.sum(jax_tt.lookup_bags(table, state, ids)[0] * target)

    step = step_of(table).lower(shards, *batch).compile()
    # A gradient that no optimizer takes at once is as large as the shard.
    shards_of_step = 1 if table.update else 2
    for compiled, least, most in (
        # JAX leaves out arguments that a program does not read, such as slots in a forward pass.
        (jax.jit(forward).lower(shards, *batch).compile(), 0, share),
        (step, share, shards_of_step * share),
    ):
        counted = compiled.memory_analysis()
        peak = counted.argument_size_in_bytes + counted.output_size_in_bytes
        peak += counted.temp_size_in_bytes - counted.alias_size_in_bytes
        assert least <= peak < 1.1 * most, (peak, share)
    for _ in range(steps):
        _, shards = step(shards, *batch)
        after = _bytes_by_device()
        most = max(after[device] - before[device] for device in after)
        assert share <= most < 1.1 * share, (most, share)


def _bytes_by_device() -> Counter[Any]:
    gc.collect()
    return Counter(
        {
            device: sum(
                math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
                for array in jax.live_arrays()
                if device in array.sharding.device_set
            )
            for device in jax.local_devices()
        }
    )


def check_equal(got: jax.Array, wanted: jax.Array, name: str, tolerance: float = 0) -> None:
    """The shards of this process equal those parts of an array, by default exactly."""
    for shard in got.addressable_shards:
        part = np.asarray(wanted)[shard.index]
        np.testing.assert_allclose(shard.data, part, tolerance, tolerance, err_msg=name)
