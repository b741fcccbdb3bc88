"""`by_platform`: native functions where there are some, and a reference that is traced only when it is lowered."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_tt._jax.backend import by_platform, run

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def refused(*args: Any) -> Any:
    raise AssertionError("the reference was traced")


def double(tree: Any) -> Any:
    return {"twice": 2 * tree["x"], "count": jnp.int32(tree["x"].size)}


def triple(tree: Any) -> Any:
    return {"twice": 3 * tree["x"], "count": jnp.int32(0)}


def on(platform: str, reference: Any = triple) -> Any:
    return lambda x: by_platform({platform: double}, reference, {"x": x})


def test_the_reference_is_not_traced_for_a_cpu():
    for function in (jax.jit(on("cpu", refused)), on("cpu", refused)):
        np.testing.assert_array_equal(function(X)["twice"], 2 * X)
    grouped = jax.jit(jax.vmap(on("cpu", refused)))
    np.testing.assert_array_equal(grouped(X)["count"], [3, 3])


def test_the_reference_of_other_platforms():
    for transform in (lambda f: f, jax.jit, jax.checkpoint, jax.vmap):
        found = transform(on("cuda"))(X)
        np.testing.assert_array_equal(found["twice"], 3 * X)
        assert not np.any(found["count"]) and found["count"].dtype == jnp.int32


def test_under_vmap_of_some_operands():
    def add(x, y):
        return by_platform({"cuda": refused_native}, lambda x, y: (x + y, y), x, y)

    def refused_native(x, y):
        return x - y, y

    total, y = jax.jit(jax.vmap(add, in_axes=(1, None), out_axes=(1, 0)))(X, X[:, 0])
    np.testing.assert_array_equal(total, X + X[:, :1])
    np.testing.assert_array_equal(y, np.broadcast_to(X[:, 0], (3, 2)))


def test_in_loops_and_in_programs_for_two_platforms():
    def body(carry, x):
        return carry + on("cuda")(x)["twice"].sum(), x

    assert float(jax.jit(lambda x: jax.lax.scan(body, 0.0, x)[0])(X)) == 3 * X.sum()
    exported = jax.export.export(jax.jit(on("cuda")), platforms=("cpu", "cuda"))(X)
    np.testing.assert_array_equal(exported.call(X)["twice"], 3 * X)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_inside_shard_map(platform, check):
    devices = min(jax.device_count(), 2)
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    sharded = jax.shard_map(
        lambda x: on(platform)(x)["twice"], mesh=mesh, in_specs=P("data"), out_specs=P("data"),
        check_vma=check,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(sharded)(X), (2 if platform == "cpu" else 3) * X)


def test_without_a_reference_other_platforms_are_refused():
    def native(platform: str, tree: Any) -> Any:
        return double(tree)

    looked_up = jax.jit(lambda x: run("native", native, refused, {"x": x}))
    with pytest.raises(Exception, match=r"(?i)platform"):
        looked_up.trace(X).lower(lowering_platforms=("tpu",))


def test_results_of_other_types_are_an_error():
    def wrong(tree: Any) -> Any:
        return {"twice": tree["x"][:1], "count": jnp.int32(0)}

    with pytest.raises(
        TypeError, match=r"returns .*float32\[1, 3\].*, but the native op .*\[2, 3\]"
    ):
        jax.jit(on("cuda", wrong))(X)
