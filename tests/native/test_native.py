"""What the native module promises beyond its numbers: determinism, memory in place, any batch, any instruction set."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import optimizers
from jax_tt._base import ffi
from tests.conftest import native_available
from tests.helpers import (
    SHAPES,
    assert_close,
    bag_model,
    core_gradients,
    dense_table,
    fused,
    make_case,
)
from tests.native.native_run import (
    BAGS,
    CHUNKED,
    JOINS,
    PAIRS,
    RULES,
    WIDTHS,
    chunked_batch,
    gradients,
    steps,
    wide_bags,
    wide_sums,
)
from tests.processes import run_python

pytestmark = [
    pytest.mark.skipif(not native_available(), reason="the native module is not built"),
    pytest.mark.optimized,
    pytest.mark.each_way,
]


def _run(path: Path, *arguments: str, **variables: str) -> dict[str, np.ndarray]:
    """The results of every op in a process of its own."""
    # Also for the fixture below, which pytest makes before it turns to the mark of a test.
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}
    run_python("-m", "tests.native.native_run", path, *arguments, **optimized, **variables)
    return dict(np.load(path))


@pytest.fixture(scope="module")
def one_thread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return _run(tmp_path_factory.mktemp("one") / "results.npz", JAX_TT_NUM_THREADS="1")


@pytest.mark.slow
@pytest.mark.dear("two processes compile all programs with all optimizations and run every kernel")
def test_bitwise_equal_for_any_number_of_threads(one_thread, tmp_path):
    several = _run(tmp_path / "results.npz", "again", JAX_TT_NUM_THREADS="4")
    assert several.keys() == one_thread.keys()
    for name, array in several.items():
        assert array.tobytes() == one_thread[name].tobytes(), (
            f"{name} depends on the number of threads"
        )


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "x86_64_v3"])
def test_instruction_sets_agree(isa, one_thread, tmp_path):
    there = str(one_thread["isa"])
    if isa == there or (isa == "x86_64_v3" and there == "baseline"):
        pytest.skip(f"this processor runs {there}")
    other = _run(tmp_path / "results.npz", JAX_TT_CPU_ISA=isa)
    assert str(other.pop("isa")) == isa
    for name, array in other.items():
        if name.startswith("hash"):
            assert array.tobytes() == one_thread[name].tobytes(), name
        # 16-bit results differ by a rounding where the sums before it differ in the last bit.
        assert_close(array, one_thread[name], 1e-2 if "bfloat16" in name else 1e-5, name)


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_any_width(weighted):
    tables, bags = wide_bags(weighted)
    ids, offsets = np.asarray(bags.ids), np.asarray(bags.offsets)
    weights = np.ones(ids.size) if bags.weights is None else np.asarray(bags.weights, np.float64)
    mixing = np.zeros((offsets.size - 1, 50))
    np.add.at(mixing, (np.searchsorted(offsets, np.arange(ids.size), "right") - 1, ids), weights)
    for width, table, sums, gradient in zip(WIDTHS, tables, *wide_sums(tables, bags), strict=True):
        want = mixing @ np.asarray(table, np.float64)
        assert_close(sums, want, 1e-5, f"{width} columns")
        assert_close(gradient, mixing.T @ want, 1e-5, f"gradient of {width} columns")


def _sum_of_parts(
    cores: tuple[jax.Array, ...], bags: jax_tt.Bags, g: jax.Array
) -> list[np.ndarray]:
    """What `gradients` gives, of halves of the batch, each of one chunk."""
    found = []
    for part in (slice(0, BAGS // 2), slice(BAGS // 2, BAGS)):
        ends = np.asarray(bags.offsets)[part.start : part.stop + 1]
        own = slice(ends[0], ends[-1])
        half = jax_tt.Bags(bags.ids[own], jnp.asarray(ends - ends[0]), bags.weights[own])
        found.append([np.asarray(leaf) for leaf in gradients(cores, half, g[part], "native")])
    (out, *dcores, dweights), others = found[0], found[1]
    sums = [a + b for a, b in zip(dcores, others[1:-1], strict=True)]
    return [np.concatenate([out, others[0]]), *sums, np.concatenate([dweights, others[-1]])]


@pytest.mark.slow
def test_chunked_batches_are_the_sums_of_their_parts(one_thread):
    for name, shape in CHUNKED.items():
        cores, bags, g = chunked_batch(shape)
        for k, leaf in enumerate(_sum_of_parts(cores, bags, g)):
            assert_close(one_thread[f"chunked {name} {k}"], leaf, 2e-5, f"{name} {k}")
    rule = RULES["adagrad"]
    slots = [np.full(core.shape, rule.initial_accumulator_value) for core in cores]
    for _ in range(3):
        _, *dcores, _ = _sum_of_parts(cores, bags, g)
        for slot, dcore in zip(slots, dcores, strict=True):
            slot += dcore.astype(np.float64) ** 2
        cores = tuple(
            jnp.asarray(core - rule.learning_rate * dcore / (np.sqrt(slot) + rule.eps), jnp.float32)
            for core, slot, dcore in zip(cores, slots, dcores, strict=True)
        )
    # The scalar between them is the sentinel, by the order of names.
    for k, leaf in enumerate([*cores, np.ones(()), *slots]):
        found = one_thread[f"chunked fused {k}"].reshape(leaf.shape)
        assert_close(found, leaf, 2e-5, f"fused {k}")


def _chunks(shape: jax_tt.TTShape, ids: np.ndarray) -> int:
    """How many chunks a batch has."""
    module = ffi.load("cpu")
    assert module is not None
    factors = (shape.row_factors, shape.col_factors, shape.full_ranks)
    distinct = len(np.unique(ids))
    whole, empty = (
        module.plan_size(*factors, shape.num_embeddings, n, ids.size)[0] for n in (distinct, 0)
    )
    return (whole - empty - (4 + 4 * shape.d) * distinct) // (shape.d + 1) + 1


def test_chunked_batches_have_several_chunks():
    """The shapes above would test nothing else if the limit on a chunk rose."""
    for name, shape in CHUNKED.items():
        _, bags, _ = chunked_batch(shape)
        ids, middle = np.asarray(bags.ids), int(bags.offsets[BAGS // 2])
        assert _chunks(shape, ids) > 1, name
        assert _chunks(shape, ids[:middle]) == _chunks(shape, ids[middle:]) == 1, name


@pytest.mark.parametrize("loss", ["linear", "square"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["tt", "dense"])
def test_donated_tables_stay_where_they_are(kind, rule, loss):
    """No copy of a table or slot in the program, and each buffer keeps its address from step to step."""
    cores = make_case(SHAPES["d3-odd"], "float32", False).cores
    start = cores if kind == "tt" else jnp.ones((1237, 24))
    table, state = fused(start, RULES[rule])

    def step(state, ids):
        def value(state):
            out, _ = jax_tt.lookup_bags(table, state, ids)
            return jnp.sum(out if loss == "linear" else out * out)

        return jax.value_and_grad(value)(state)

    ids = np.array([[1, 2, 2], [0, 59, 1]], np.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(state, ids).compile()
    program = compiled.as_text()
    large = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    for shape in {",".join(map(str, leaf.shape)) for leaf in large}:
        copies = re.findall(rf"= f32\[{shape}\][^ ]* copy[^ ]*\(", program)
        assert not copies, f"the program copies f32[{shape}]: {copies}"
    addresses = [leaf.unsafe_buffer_pointer() for leaf in large]
    for _ in range(3):
        _, state = compiled(state, ids)
        now = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.ndim]
        assert now == addresses


def test_scan_over_steps_copies_no_table():
    table, state = fused(jnp.ones((1237, 24)), optimizers.Adagrad(0.1))
    batches = np.arange(24, dtype=np.int32).reshape(4, 3, 2)

    def epoch(state, batches):
        def step(state, ids):
            loss = lambda state: jnp.sum(jax_tt.lookup_bags(table, state, ids)[0])  # noqa: E731
            return jax.grad(loss)(state), None

        return jax.lax.scan(step, state, batches)[0]

    program = jax.jit(epoch, donate_argnums=0).lower(state, batches).compile().as_text()
    assert not re.findall(r"= f32\[1237,24\][^ ]* copy[^ ]*\(", program)


_STEP_OF_A_LARGE_TABLE = """
import resource, jax, jax.numpy as jnp, numpy as np, jax_tt
def memory(what):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith(what)) * 1024
zeros = jax.nn.initializers.zeros
table = jax_tt.dense_table(1_000_000, 64, embedding_init=zeros, optimizer=jax_tt.optimizers.SGD(0.1))
state = table.init(jax.random.key(0))
step = jax.jit(jax.grad(lambda s, ids: jnp.sum(jax_tt.lookup_bags(table, s, ids)[0] ** 2)), donate_argnums=0)
rng = np.random.default_rng(0)
batch = lambda: rng.integers(0, 1_000_000, (512, 20)).astype(np.int32)
jax.block_until_ready(state)
size, address = state["embedding"].nbytes, state["embedding"].unsafe_buffer_pointer()
state = step(state, batch())
jax.block_until_ready(state)
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = memory("VmRSS")
for _ in range(3):
    state = step(state, batch())
jax.block_until_ready(state)
assert state["embedding"].unsafe_buffer_pointer() == address
print(size, before, memory("VmHWM"))
"""


@pytest.mark.slow
def test_a_step_takes_no_memory_beside_the_table():
    size, before, peak = map(int, run_python("-c", _STEP_OF_A_LARGE_TABLE).split())
    print(f"table {size >> 20} MiB, step at most {(peak - before) / 2**20:.1f} MiB more")
    assert before >= size  # every page of the table is there
    assert peak - before < 64 << 20


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_gradients_for_ids_above_2_to_the_31(dtype):
    with jax.enable_x64(dtype == "int64"):
        n = 4_200_000_000 if dtype == "uint32" else 10**13
        shape = jax_tt.TTShape.suggest(n, 6, 3, 4)
        cores = tuple(
            core.astype(jnp.float32) for core in jax_tt.tt.init(jax.random.key(0), shape, "normal")
        )
        rng = np.random.default_rng(0)
        ids = rng.integers(2**31, n, 20).astype(dtype)
        ids[3:6] = n - 1
        bags = jax_tt.Bags.from_lengths(ids, [5, 0, 7, 8], np.ones(20, np.float32))
        g = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
        for native, reference in zip(
            gradients(cores, bags, g, "native"), gradients(cores, bags, g, "reference"), strict=True
        ):
            assert_close(native, reference, 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(
    "shape",
    [
        jax_tt.TTShape(200, 130, (13, 13), (5, 6, 7), (13, 1, 10)),
        jax_tt.TTShape(200, 1, (13, 3), (15, 2, 7), (1, 1, 1)),
        jax_tt.TTShape(200, 1500, (5, 13), (5, 6, 7), (10, 15, 10)),
        jax_tt.TTShape(200, 97, (40,), (20, 10), (97, 1)),
        jax_tt.TTShape(200, 34, (2, 40, 2), (3, 8, 9, 1), (2, 1, 17, 1)),
        jax_tt.TTShape(200, 9, (1, 3, 1, 3), (1, 10, 2, 1, 10), (1, 3, 1, 1, 3)),
        *JOINS.values(),
        *PAIRS.values(),
    ],
    ids=[
        "odd-ranks",
        "one-column",
        "1500-columns",
        "prime-columns",
        "narrow-neck",
        "factors-of-one",
        *JOINS,
        *PAIRS,
    ],
)
def test_odd_sizes(shape, dtype):
    with jax.enable_x64(dtype == "float64"):
        case = make_case(shape, dtype, True)
        g = np.float32(case.g)
        leaves = gradients(case.cores, case.bags(), jnp.asarray(g), "native")
        table = dense_table(case.cores, shape.num_embeddings)
        model = bag_model(table, case.rows, case.weights, "sum", g.astype(np.float64))
        tolerance = 1e-2 if dtype == "float16" else 1e-5
        assert_close(leaves[0], model[0], tolerance, "out")
        for k, want in enumerate(core_gradients(case.cores, model[1])):
            assert_close(leaves[1 + k], want, tolerance, f"core {k}")
        flat = np.concatenate(model[2])
        assert_close(leaves[-1][: flat.size], flat, tolerance, "weights")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["tt", "dense"])
@pytest.mark.parametrize(
    "bags",
    [
        jax_tt.Bags.from_ragged([]),
        jax_tt.Bags.from_ragged([[], []], capacity=5),
        np.zeros((3, 0), np.int32),
    ],
    ids=["no-bags", "no-ids", "no-columns"],
)
def test_updates_of_nothing_change_nothing(bags, kind, rule):
    cores = make_case(SHAPES["d3"], "float32", False).cores
    table, state = fused(cores if kind == "tt" else jnp.ones((9, 4)), RULES[rule])
    count = bags.num_bags if isinstance(bags, jax_tt.Bags) else len(bags)
    g = jnp.ones((count, 8 if kind == "tt" else 4))
    after = steps(table, state, bags, g, "native")
    before = jax.tree.leaves(state | {"step": 3.0})
    for got, want in zip(after, before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_residuals_that_were_tampered_with_are_refused():
    """`jax.vjp` hands out what the forward pass saved; a changed plan must not be followed."""
    case = make_case(SHAPES["d3"], "float32", True)
    out, pullback = jax.vjp(
        lambda cores: jax_tt.tt.embed_bag(cores, case.bags(), method="native"), case.cores
    )
    plans = [
        leaf for leaf in jax.tree.leaves(pullback) if leaf.dtype == jnp.int32 and leaf.size > 100
    ]
    assert plans, "the plan is no longer among the residuals; this test looks at nothing"
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(50):
        noise = rng.integers(-(2**31), 2**31, plans[0].shape).astype(np.int32)
        where = rng.random(noise.shape) < rng.choice([0.01, 0.1, 1.0])
        where[..., :8] = False  # a plan whose header names another batch is made anew instead

        def tamper(leaf, noise=noise, where=where):
            changed = leaf is plans[0]
            return jnp.asarray(np.where(where, noise, np.asarray(leaf))) if changed else leaf

        changed = jax.tree.map(tamper, pullback)
        try:
            jax.block_until_ready(changed(jnp.ones_like(out)))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            assert "plan" in str(error)
            refused += 1
    assert refused > 25


def test_many_threads_at_once():
    """Calls from several Python threads share the pool of threads and the cache of temporary memory."""
    from concurrent.futures import ThreadPoolExecutor

    case = make_case(SHAPES["d4"], "float32", True)
    g = jnp.asarray(case.g, jnp.float32)

    @jax.jit
    def step(cores, bags):
        return jax.grad(lambda c: jnp.sum(jax_tt.tt.embed_bag(c, bags, method="native") * g))(cores)

    bags = dataclasses.replace(case.bags(), weights=jnp.asarray(case.bags().weights))
    want = [leaf.tobytes() for leaf in map(np.asarray, step(case.cores, bags))]

    def work(_: int) -> None:
        for _ in range(50):
            assert [np.asarray(leaf).tobytes() for leaf in step(case.cores, bags)] == want

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
