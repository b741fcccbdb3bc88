"""A small language model whose vocabulary table is `nnx.Embed`, `Embed`, fused or not, or `TTEmbed`.

    python -m examples.lm.main

The text is the documentation of Python's keywords, which ships with Python. A token is a pair of characters, so that
the vocabulary has 96 * 96 rows. Every variant trains the same decoder from the same seed on the same batches.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt

CHARACTERS = 96
VOCABULARY = CHARACTERS**2
RATE = 3e-3


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the model and of a batch."""

    features: int = 64
    context: int = 32
    batch: int = 4
    steps: int = 200
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Variant:
    """What the vocabulary tables are.

    Attributes:
        make: makes the table of the input from the number of rows and columns.
        make_output: makes that of the logits; None for tied weights, the table of the input.
        mesh: whether the table is sharded over its rows and the batch over another axis of a mesh of 2 x 4 devices.
    """

    make: Callable[..., Any]
    make_output: Callable[..., Any] | None = None
    mesh: bool = False


def _sharded(rows: int, features: int, *, rngs: nnx.Rngs) -> jax_tt.Embed:
    init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    by_rows = nnx.with_partitioning(init, ("model", None))
    return jax_tt.Embed(rows, features, embedding_init=by_rows, rngs=rngs)


def _fused(rows: int, features: int, *, rngs: nnx.Rngs) -> jax_tt.Embed:
    return jax_tt.Embed(rows, features, optimizer=jax_tt.optimizers.Adam(RATE), rngs=rngs)


def _tt(rank: int) -> Callable[..., jax_tt.TTEmbed]:
    def make(rows: int, features: int, *, rngs: nnx.Rngs) -> jax_tt.TTEmbed:
        factors = {"row_factors": (CHARACTERS, CHARACTERS), "tt_ranks": rank}
        return jax_tt.TTEmbed(rows, features, **factors, rngs=rngs)

    return make


VARIANTS = {
    "nnx.Embed, tied": Variant(nnx.Embed),
    "Embed, tied": Variant(jax_tt.Embed),
    "Embed, tied, 2 x 4 devices": Variant(_sharded, mesh=True),
    "TTEmbed, rank 16, tied": Variant(_tt(16)),
    "TTEmbed, rank 32, tied": Variant(_tt(32)),
    "nnx.Embed, untied": Variant(nnx.Embed, nnx.Embed),
    "Embed, untied": Variant(jax_tt.Embed, jax_tt.Embed),
    "Embed, fused input": Variant(_fused, jax_tt.Embed),
}


class Decoder(nnx.Module):
    """One block of attention over the tokens so far, between a table of the input and one of the logits."""

    def __init__(self, variant: Variant, settings: Settings, rngs: nnx.Rngs) -> None:
        features = settings.features
        self.input = variant.make(VOCABULARY, features, rngs=nnx.Rngs(settings.seed))
        output, of_output = variant.make_output, nnx.Rngs(settings.seed + 1)
        self.output = output and output(VOCABULARY, features, rngs=of_output)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs(), (settings.context, features)))
        self.attention = nnx.MultiHeadAttention(4, features, decode=False, rngs=rngs)
        self.wide = nnx.Linear(features, 4 * features, rngs=rngs)
        self.narrow = nnx.Linear(4 * features, features, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(features, rngs=rngs) for _ in range(3)])

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """What the logits of the next tokens follow from, ``[B, context, features]``."""
        x = self.input(tokens) + self.position[...]
        x += self.attention(self.norms[0](x), mask=nnx.make_causal_mask(tokens))
        x += self.narrow(nnx.gelu(self.wide(self.norms[1](x))))
        return self.norms[2](x)

    def losses(self, tokens: jax.Array) -> jax.Array:
        """Cross entropy of every token but the first, from ``[B, context + 1]``."""
        hidden, targets = self.hidden(tokens[:, :-1]), tokens[:, 1:]
        table = self.input if self.output is None else self.output
        if isinstance(table, nnx.Embed):
            logits = table.attend(hidden)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return table.softmax_cross_entropy(hidden, targets)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: Decoder, optimizer: jax_tt.FusedOptimizer, tokens: jax.Array) -> jax.Array:
    """One step; returns the loss before it."""
    loss, grads = jax_tt.value_and_grad(lambda model: model.losses(tokens).mean())(model)
    optimizer.update(model, grads)
    return loss


def read_tokens() -> np.ndarray:
    """The text as pairs of characters, int32; what is no printable character is one of them."""
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32) - 31
    codes = np.where((codes > 0) & (codes < CHARACTERS), codes, 0)
    first, second = codes[: len(codes) // 2 * 2].reshape(-1, 2).T
    return first * CHARACTERS + second


def batches(tokens: np.ndarray, settings: Settings) -> Iterator[np.ndarray]:
    """Random pieces of the text, ``[B, context + 1]``."""
    rng = np.random.default_rng(settings.seed)
    for _ in range(settings.steps):
        starts = rng.integers(0, len(tokens) - settings.context, settings.batch)
        yield tokens[starts[:, None] + np.arange(settings.context + 1)]


def train(variant: Variant, settings: Settings, every: int = 100) -> list[float]:
    """The mean losses of every hundred steps."""
    context, sharding = contextlib.nullcontext(), None
    if variant.mesh:
        mesh = jax.make_mesh((2, 4), ("data", "model"))
        context, sharding = jax.set_mesh(mesh), NamedSharding(mesh, P("data", None))
    with context:  # Flax places variables as their metadata says
        model = Decoder(variant, settings, nnx.Rngs(settings.seed))
        optimizer = jax_tt.FusedOptimizer(model, optax.adam(RATE))
    losses = [
        train_step(model, optimizer, jax.device_put(tokens, sharding))
        for tokens in batches(read_tokens(), settings)
    ]
    return [float(x) for x in np.asarray(losses).reshape(-1, every).mean(1)]


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Trains the variants, prints and returns their losses."""
    parser = argparse.ArgumentParser(description=__doc__, prog="examples.lm.main")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--every", type=int, default=100, help="steps of a mean loss")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    options = parser.parse_args(arguments)
    settings = Settings(steps=options.steps)
    results = {}
    for name in options.variants:
        begin = time.perf_counter()
        results[name] = train(VARIANTS[name], settings, options.every)
        losses = "  ".join(f"{loss:.3f}" for loss in results[name])
        print(f"{name:30} {losses}   {time.perf_counter() - begin:.0f} s", flush=True)
    return results


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
