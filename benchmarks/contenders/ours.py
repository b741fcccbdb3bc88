"""jax_tt: TT tables (fused, or gradients with optax) and dense tables updated in place."""

import jax
import jax.numpy as jnp
import optax

import jax_tt
from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE, Work
from jax_tt import optimizers


def bags_of(work: Work) -> list[jax_tt.Bags]:
    """The batches as `Bags` on the device."""
    made = [jax_tt.Bags.from_offsets(ids, work.offsets) for ids in work.batches]
    return jax.device_put(made)


def cores_of(work: Work) -> tuple[jax.Array, ...]:
    """Freshly initialised cores."""
    return tuple(jax_tt.tt.init(jax.random.key(0), work.shape, "approx-normal"))


def tt_forward(work: Work, method: str = "auto") -> Call:
    """Pooled rows of a TT table."""
    cores, bags, n = cores_of(work), bags_of(work), work.shape.num_embeddings

    @jax.jit
    def forward(cores, bags):
        return jax_tt.tt.embed_bag(cores, bags, num_embeddings=n, bounds="error", method=method)

    return lambda i: forward(cores, bags[i % len(bags)]).block_until_ready()


def tt_fused_step(work: Work, method: str = "auto", optimizer=None) -> Call:
    """Forward, backward and update of a TT table, the update fused into the backward pass."""
    optimizer = optimizer or optimizers.SGD(LEARNING_RATE)
    step, state = tt_fused_program(work, optimizer, method)
    return _training(step, state, bags_of(work))


def tt_fused_program(work: Work, optimizer, method: str = "auto"):
    """The jitted donated step ``(state, bags) -> (loss, state)`` and the state it starts from."""
    table, state = jax_tt.tt.to_table(
        cores_of(work),
        num_embeddings=work.shape.num_embeddings,
        update=jax_tt.Update(optimizer),
    )
    return _fused_program(work, table, method), state


def _fused_program(work: Work, table: jax_tt.Table, method: str = "auto"):
    gradient = jnp.asarray(work.gradient)

    def loss(state, bags):
        # The reference would tell the host of ids out of range, which other libraries' programs do not.
        out, _ = jax_tt.lookup_bags(table, state, bags, bounds="error", method=method)
        return jnp.vdot(out, gradient)

    return jax.jit(jax.value_and_grad(loss), donate_argnums=0)


def tt_optax_step(work: Work, method: str = "auto") -> Call:
    """Forward, backward and `optax.sgd` on the cores of a TT table."""
    gradient, n = jnp.asarray(work.gradient), work.shape.num_embeddings
    tx = optax.sgd(LEARNING_RATE)

    def loss(cores, bags):
        options = {"num_embeddings": n, "bounds": "error", "method": method}
        return jnp.vdot(jax_tt.tt.embed_bag(cores, bags, **options), gradient)

    def step(state, bags):
        cores, slots = state
        value, gradients = jax.value_and_grad(loss)(cores, bags)
        updates, slots = tx.update(gradients, slots, cores)
        return value, (optax.apply_updates(cores, updates), slots)

    cores = cores_of(work)
    return _training(jax.jit(step, donate_argnums=0), (cores, tx.init(cores)), bags_of(work))


def tt_sum(works: list[Work]) -> tuple[Call, Call]:
    """Forward and fused step of a sum of TT tables, whose terms have the same bags and ids of their own."""
    rule, gradient = optimizers.SGD(LEARNING_RATE), jnp.asarray(works[0].gradient)
    names = [f"term {k}" for k in range(len(works))]
    terms = jax_tt.Collection(
        {
            name: jax_tt.tt_table(**work.shape.layer_arguments(), optimizer=rule)
            for name, work in zip(names, works, strict=True)
        },
        {name: jax_tt.Feature(name) for name in names},
    )
    batches = [
        dict(zip(names, bags, strict=True)) for bags in zip(*map(bags_of, works), strict=True)
    ]
    state = jax.jit(terms.init)(jax.random.key(0))

    def rows(state, batch):
        return sum(jax_tt.lookup_features(terms, state, batch)[0].values())

    def step(state, batch):
        def loss(trained):
            return jnp.vdot(rows(terms.replaced(state, trained), batch), gradient)

        value, new = jax.value_and_grad(loss)(terms.trained(state))
        return value, terms.overwritten(state, new)[0]

    forward, fixed = jax.jit(rows), jax.jit(terms.init)(jax.random.key(0))
    return (
        lambda i: forward(fixed, batches[i % len(batches)]).block_until_ready(),
        _training(jax.jit(step, donate_argnums=0), state, batches),
    )


def table_forward(work: Work, table: jax_tt.Table, state: dict) -> Call:
    """Pooled rows of a table of any kind."""
    bags, lookup = bags_of(work), jax_tt.Lookup()
    forward = jax.jit(lambda state, bags: jax_tt.lookup_bags(table, state, bags, lookup)[0])
    return lambda i: forward(state, bags[i % len(bags)]).block_until_ready()


def dense_forward(work: Work) -> Call:
    """Pooled rows of a dense table."""
    bags = bags_of(work)
    rows = jnp.full((work.shape.num_embeddings, work.shape.features), 0.01, jnp.float32)
    forward = jax.jit(jax_tt.functional.embed_bag)
    return lambda i: forward(rows, bags[i % len(bags)]).block_until_ready()


def dense_fused_program(work: Work, optimizer=None):
    """As `tt_fused_program`, for a dense table of the same rows and columns."""
    table = jax_tt.dense_table(
        work.shape.num_embeddings,
        work.shape.features,
        embedding_init=jax.nn.initializers.constant(0.01),
        optimizer=optimizer or optimizers.SGD(LEARNING_RATE),
    )
    return _fused_program(work, table), table.init(jax.random.key(0))


def dense_fused_step(work: Work, optimizer=None) -> Call:
    """Forward, backward and update of a dense table, in place."""
    step, state = dense_fused_program(work, optimizer)
    return _training(step, state, bags_of(work))


def _training(step, state, bags) -> Call:
    def call(i: int) -> object:
        nonlocal state
        value, state = step(state, bags[i % len(bags)])
        return jax.block_until_ready((value, state))

    return call
