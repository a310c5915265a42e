"""Which aggregator makes wrong answers grow longer?

A policy in which nothing but length can be learned. A frozen coin decides whether a response is
right; right and wrong responses each go on from token to token with a probability of their own,
which is learned, so their lengths are geometric, cut off at a cap. Correctness never depends on
length: whatever length a policy learns, the aggregator taught it. Under `sequence_mean` a token of
a long wrong response is punished less than one of a short, so wrong responses grow; under a
constant every token weighs the same, and lengths stay where they are.

The aggregator and the division by the group's standard deviation are switched apart.

Command:
    python -m experiments.length_bias
    python -m experiments.length_bias --steps 100 --seeds 20 --plot length_bias.png

Cost: about 30 seconds on 2 CPU cores.

Expected (cap 1000, learning rate 20, 300 steps, start 21 tokens, 8 prompts of 8 responses; mean
tokens of a wrong response at the end, over 10 seeds, without and with the division by the standard
deviation): sequence mean 939 and 969, prompt mean 623 and 793, token mean 60 and 125, constant 21
and 21. Under token mean the drift comes from the denominator, which is drawn with the batch, so it
fades as batches grow (with the division: 284, 125, 60 tokens at 32, 64, 128 responses a step).
Asserted: the 95% interval under sequence mean lies above three times the start, and the interval
under a constant contains the start.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from rljax import losses as L
from rljax.batch import Batch


@dataclasses.dataclass(frozen=True)
class Config:
    """The experiment.

    Attributes:
      steps: On-policy updates.
      learning_rate: Of plain gradient descent on the two logits of going on.
      cap: Longest response, tokens; also the constant of the constant aggregator.
      start: Mean length at the start, tokens.
      prompts: Prompts a step.
      num_generations: Responses a prompt.
      correct: Probability of a right response, frozen.
      seeds: Independent runs, at least 10 for the intervals.
      plot: Where to write a figure; None: nowhere.
    """

    steps: int = 300
    learning_rate: float = 20.0
    cap: int = 1000
    start: float = 21.0
    prompts: int = 8
    num_generations: int = 8
    correct: float = 0.5
    seeds: int = 10
    plot: Path | None = None


WRONG, RIGHT = 0, 1


def objective(weights: Any, divide: bool) -> L.Objective:
    """One on-policy update a batch, so that no trust region plays a part."""
    advantage = L.group_normalize() if divide else L.group_center()
    return L.Objective(advantage, L.chain(L.token_ratio("self"), L.policy_gradient()), weights)


def expected_length(logit: jax.Array, cap: int) -> jax.Array:
    """Mean of a geometric length cut off at the cap, for the logit of going on."""
    go_on = jax.nn.sigmoid(logit)
    return jnp.expm1(cap * jnp.log(go_on)) / (go_on - 1)


def rollout(key: jax.Array, logits: jax.Array, config: Config) -> tuple[Batch, jax.Array]:
    """Samples responses; gives them and which branch each took."""
    size = config.prompts * config.num_generations
    coin, noise = jax.random.split(key)
    branch = jax.random.bernoulli(coin, config.correct, (size,)).astype(jnp.int32)
    uniform = jax.random.uniform(noise, (size,), minval=1e-7)
    more = jnp.floor(jnp.log(uniform) / jax.nn.log_sigmoid(logits[branch]))
    length = jnp.clip(1 + more, 1, config.cap).astype(jnp.int32)
    mask = jnp.arange(config.cap) < length[:, None]
    batch = Batch(
        tokens=jnp.zeros(mask.shape, jnp.int32),
        mask=mask,
        group=jnp.arange(size) // config.num_generations,
        rewards=branch.astype(jnp.float32),
        truncated=more >= config.cap,
    )
    return batch, branch


def log_probability(logits: jax.Array, branch: jax.Array, batch: Batch) -> jax.Array:
    """Log π of each token: going on, or stopping at the last (a cut-off response never stops)."""
    at = jnp.arange(batch.mask.shape[1])
    last = (at == batch.mask.sum(1, keepdims=True) - 1) & ~batch.truncated[:, None]
    logit = logits[branch][:, None]
    return jnp.where(last, jax.nn.log_sigmoid(-logit), jax.nn.log_sigmoid(logit))


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(what: L.Objective, config: Config, keys: jax.Array) -> jax.Array:
    """Runs every seed; gives the mean lengths [seeds, steps + 1, branch]."""

    def step(logits: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch, branch = rollout(key, logits, config)
        rows, _ = what.prepare(batch)
        loss = lambda logits: what.loss(log_probability(logits, branch, batch), rows)[0]  # noqa: E731
        logits = logits - config.learning_rate * jax.grad(loss)(logits)
        return logits, expected_length(logits, config.cap)

    def run(key: jax.Array) -> jax.Array:
        start = jnp.full(2, jnp.log(config.start - 1.0))
        lengths = jax.lax.scan(step, start, jax.random.split(key, config.steps))[1]
        return jnp.concatenate([expected_length(start, config.cap)[None], lengths])

    return jax.lax.map(run, keys)


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean and the ends of its 95% interval (Student's t)."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def main(config: Config) -> dict[str, Any]:
    """Trains under every aggregator, with and without the division, and prints a table."""
    if config.seeds < 10:
        raise SystemExit(f"seeds must be at least 10 for the intervals, got {config.seeds}")
    aggregators = {
        "sequence_mean": L.sequence_mean(),
        "constant": L.constant(config.cap),
        "token_mean": L.token_mean(),
        "prompt_mean": L.prompt_mean(),
    }
    keys = jax.random.split(jax.random.key(0), config.seeds)
    print(
        f"start {config.start:g} tokens, cap {config.cap}, learning rate "
        f"{config.learning_rate:g}, {config.steps} steps, {config.seeds} seeds"
    )
    curves: dict[str, np.ndarray] = {}
    results: dict[str, Any] = {}
    for name, weights in aggregators.items():
        for divide in (False, True):
            label = f"{name}{' / std' if divide else ''}"
            curves[label] = np.asarray(train(objective(weights, divide), config, keys))
            wrong, right = (interval(curves[label][:, -1, b]) for b in (WRONG, RIGHT))
            results[label] = {"wrong": wrong, "right": right}
            print(
                f"{label:21} wrong {wrong[0]:6.1f} [{wrong[1]:6.1f}, {wrong[2]:6.1f}]"
                f"   right {right[0]:6.1f} [{right[1]:6.1f}, {right[2]:6.1f}]"
            )
    for ending in ("", " / std"):
        low = results[f"sequence_mean{ending}"]["wrong"][1]
        assert low > 3 * config.start, f"wrong responses did not grow: {low:.1f}"
        _, low, high = results[f"constant{ending}"]["wrong"]
        assert low <= config.start <= high, f"lengths moved under a constant: {low}, {high}"
    if config.plot is not None:
        draw(curves, config.plot)
    print(json.dumps({name: value["wrong"][0] for name, value in results.items()}))
    return results


def draw(curves: dict[str, np.ndarray], path: Path) -> None:
    """Mean length of wrong responses against steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for label, lengths in curves.items():
        axes.plot(lengths[:, :, WRONG].mean(0), label=label, ls="--" if "std" in label else "-")
    axes.set(xlabel="step", ylabel="tokens of a wrong response", yscale="log")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
