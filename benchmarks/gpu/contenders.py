"""Steps of each contender, as ``(step, state)``: ``step(state, ids) -> state``, ids ``[bags, bag_size]``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_tt
from benchmarks.gpu.timing import Step, accumulated
from benchmarks.gpu.work import GpuWork
from benchmarks.work import LEARNING_RATE
from jax_tt import optimizers
from jax_tt._kinds.hashed.table import directory_of
from jax_tt._native import hash_backend

RULE = optimizers.SGD(LEARNING_RATE)
# Of the rows of a hash table, those that have a key.
LOAD = 0.75


def cores_of(work: GpuWork) -> tuple[jax.Array, ...]:
    return tuple(jax_tt.tt.init(jax.random.key(0), work.shape, "approx-normal"))


def _example(work: GpuWork) -> jax.Array:
    return jnp.zeros((work.bags, work.bag_size), jnp.int32)


def empty(work: GpuWork) -> tuple[Step, Any]:
    """A step that adds one id: what the loop itself takes."""
    return accumulated(lambda _, ids: ids[:1, :1], None, _example(work))


def tt_forward(work: GpuWork, method: str) -> tuple[Step, Any]:
    """Pooled rows."""
    n = work.shape.num_embeddings

    def call(cores: Any, ids: jax.Array) -> jax.Array:
        return jax_tt.tt.embed_bag(cores, ids, num_embeddings=n, bounds="error", method=method)

    return accumulated(call, cores_of(work), _example(work))


def tt_gradient(work: GpuWork, method: str) -> tuple[Step, Any]:
    """Forward and the gradients of the cores."""
    n = work.shape.num_embeddings

    def call(given: Any, ids: jax.Array) -> Any:
        def loss(cores: Any, g: jax.Array) -> jax.Array:
            options = {"num_embeddings": n, "bounds": "error", "method": method}
            return jnp.vdot(jax_tt.tt.embed_bag(cores, ids, **options), g)

        return jax.grad(loss)(*given)

    return accumulated(call, (cores_of(work), work.gradient()), _example(work))


def tt_fused(work: GpuWork, method: str) -> tuple[Step, Any]:
    """Forward, backward and SGD, fused."""
    n, update = work.shape.num_embeddings, jax_tt.Update(RULE)
    table, state = jax_tt.tt.to_table(cores_of(work), num_embeddings=n, update=update)
    return _fused(table, method), (state, work.gradient())


def _fused(table: jax_tt.Table, method: str) -> Step:
    def step(state: Any, ids: jax.Array) -> Any:
        def loss(state: Any, g: jax.Array) -> jax.Array:
            out, _ = jax_tt.lookup_bags(table, state, ids, bounds="error", method=method)
            return jnp.vdot(out, g)

        return jax.grad(loss)(*state), state[1]

    return step


def _rows(work: GpuWork) -> jax.Array:
    return jnp.full((work.shape.num_embeddings, work.shape.features), 0.01, jnp.float32)


def dense_fused(work: GpuWork, method: str) -> tuple[Step, Any]:
    """A dense table of the same rows and columns: forward, backward and SGD, fused."""
    table = jax_tt.dense_table(
        work.shape.num_embeddings,
        work.shape.features,
        embedding_init=jax.nn.initializers.constant(0.01),
        optimizer=RULE,
    )
    return _fused(table, method), (table.init(jax.random.key(0)), work.gradient())


def dense_forward(work: GpuWork) -> tuple[Step, Any]:
    """Pooled rows of that table."""

    def call(rows: jax.Array, ids: jax.Array) -> jax.Array:
        return jax_tt.functional.embed_bag(rows, ids)

    return accumulated(call, _rows(work), _example(work))


def flax_dense(work: GpuWork) -> tuple[Step, Any]:
    """The same with `nnx.Embed` and `optax.sgd`."""
    from benchmarks.contenders.flax_embed import dense_program

    step, state = dense_program(work.shape, work.gradient())
    return lambda state, ids: step(state, ids)[1], state


def pooled(work: GpuWork, table: jax_tt.Table, state: Any) -> tuple[Step, Any]:
    """Pooled rows of a table of any kind."""

    def call(state: Any, ids: jax.Array) -> jax.Array:
        return jax_tt.lookup_bags(table, state, jax_tt.Bags(ids))[0]

    return accumulated(call, state, _example(work))


def keys_of(ids: jax.Array) -> jax_tt.SplitIds:
    """A 64-bit key for each id, the same for the same id."""
    words = jnp.stack([ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B1), ids.astype(jnp.uint32)], -1)
    return jax_tt.SplitIds(jax.lax.bitcast_convert_type(words, jnp.int32))


def hash_table(work: GpuWork, policy: str) -> tuple[jax_tt.tables.HashTable, Any]:
    """A table of so many rows that the keys of all ids fill `LOAD` of it, and its state with these keys."""
    rows = int(work.shape.num_embeddings / LOAD) // 32 * 32
    table = jax_tt.hash_table(
        rows, work.shape.features, policy=policy, safe_check="ignore", optimizer=RULE
    )
    state = jax.jit(table.init)(jax.random.key(0))
    insert = jax.jit(
        lambda state, ids: jax_tt.dynamic.insert(table, state, keys_of(ids))[1], donate_argnums=0
    )
    for part in np.array_split(np.arange(work.shape.num_embeddings, dtype=np.int32), 16):
        state = insert(state, jnp.asarray(part))
    return table, state


def hash_find(work: GpuWork) -> tuple[Step, Any]:
    """The slots of keys that are all in the table."""
    _, state = hash_table(work, "none")

    def call(directory: Any, ids: jax.Array) -> jax.Array:
        keys = jax.lax.bitcast_convert_type(keys_of(ids.reshape(-1)).digits, jnp.uint32)
        return hash_backend.find(directory, keys, jnp.ones(len(keys), bool), "auto")

    return accumulated(call, directory_of(state), _example(work))


def hash_insert(work: GpuWork) -> tuple[Step, Any]:
    """Keys that are nearly all new, for which others leave the table."""
    table, state = hash_table(work, "lru")
    rows = work.shape.num_embeddings

    def step(state: Any, ids: jax.Array) -> Any:
        state, turn = state
        keys = keys_of(ids.reshape(-1) + turn * rows)
        return jax_tt.dynamic.insert(table, state, keys)[1], turn % 1000 + 1

    return step, (state, jnp.int32(1))


def hash_step(work: GpuWork) -> tuple[Step, Any]:
    """Insertion of keys that are all in the table, their rows, and SGD."""
    table, state = hash_table(work, "lru")
    collection = jax_tt.Collection({"rows": table}, {"rows": jax_tt.Feature("rows")})

    def step(state: Any, ids: jax.Array) -> Any:
        state, g = state
        batch = {"rows": jax_tt.Bags(keys_of(ids))}
        inserted, state = jax_tt.dynamic.insert(collection, state, batch)
        batch = jax_tt.dynamic.with_slots(batch, inserted)

        def loss(own: Any) -> jax.Array:
            arrays = collection.replaced(state, own)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch)
            return jnp.vdot(rows["rows"], g)

        gradients = jax.grad(loss)(collection.trained(state))
        return collection.overwritten(state, gradients)[0], g

    start = collection.init(jax.random.key(0))
    start["rows"] = {name: state[name] for name in start["rows"]}
    return step, (start, work.gradient())


def hash_step_in_call(work: GpuWork) -> tuple[Step, Any]:
    """The same by the call of a layer, which inserts the keys itself."""
    table, state = hash_table(work, "lru")
    layer = jax_tt.TableEmbedBag(table, rngs=nnx.Rngs(0))
    for name, value in state.items():
        getattr(layer, name)[...] = value
    optimizer = jax_tt.FusedOptimizer(layer, optax.sgd(LEARNING_RATE))
    described, start = nnx.split((layer, optimizer))

    def step(state: Any, ids: jax.Array) -> Any:
        state, g = state
        layer, optimizer = nnx.merge(described, state)

        def loss(layer: Any) -> jax.Array:
            return jnp.vdot(layer(jax_tt.Bags(keys_of(ids))), g)

        optimizer.update(layer, jax_tt.grad(loss)(layer))
        return nnx.state((layer, optimizer)), g

    return step, (start, work.gradient())
