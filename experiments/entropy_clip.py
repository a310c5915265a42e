"""What does the clip window do to entropy, when there is nothing to learn?

Rewards are coin flips, so no answer is better than another: whatever happens to the policy's
entropy, the update rule did. A tabular policy (independent tokens) takes 8 passes over each batch
under windows (1 - low, 1 + high) that differ only in their edges, with the same samples and
rewards to start from; seeds are paired, and differences to the window (.2, .2) are given with 95%
intervals.

Command:
    python -m experiments.entropy_clip
    python -m experiments.entropy_clip --seeds 100 --plot entropy_clip.png

Cost: about a minute on 2 CPU cores.

Expected (learning rate 14, 60 steps, 40 seeds, 2.36 nats at the start): every window loses entropy
(1.75 nats are left under (.2, .2)), and without a window nearly all is lost (.25 left). Against
(.2, .2), wider upper edges lose less, +.12 at .28 and +.22 at .5, with 19% of the tokens clipped:
verdict "ordered". After 10 steps at learning rate 3, with 5% clipped, the sign is the opposite,
-.05 at .5: "reversed". So what a window does to entropy is a matter of how long and how hard it
clips, and no law. Asserted: with one pass all windows give the same policy, and a verdict is
printed.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

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
      steps: Batches sampled.
      passes: Passes over each batch (num_iterations).
      learning_rate: Of plain gradient descent on the logits.
      seeds: Paired runs, at least 20.
      prompts: Prompts a step; all share the one policy.
      num_generations: Responses a prompt.
      length: Tokens of a response.
      vocabulary: Choices of a token.
      plot: Where to write a figure; None: nowhere.
    """

    steps: int = 60
    passes: int = 8
    learning_rate: float = 14.0
    seeds: int = 40
    prompts: int = 8
    num_generations: int = 8
    length: int = 4
    vocabulary: int = 16
    plot: Path | None = None


WINDOWS = ((0.2, 0.2), (0.2, 0.28), (0.2, 0.5), (0.1, 0.2), (math.inf, math.inf))
UPPER = WINDOWS[:3]  # these differ in the upper edge alone
REGIMES = ((10, 3.0), (20, 3.0), (20, 8.0))  # (steps, learning rate), beside the main one


class Trace(NamedTuple):
    """What a run shows: entropy (nats) at the start and after each step, and clip fractions."""

    entropy: jax.Array
    clipped: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(window: tuple[float, float], config: Config, keys: jax.Array) -> Trace:
    """Runs every seed under one window: entropy [seeds, steps + 1], clipped [seeds, steps]."""
    what = L.Objective(
        advantage=L.group_normalize(),
        policy=L.chain(L.token_ratio(), L.ppo_clip(*window)),
        weights=L.token_mean(),
    )
    size = config.prompts * config.num_generations

    def log_probability(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        logp = jnp.broadcast_to(jax.nn.log_softmax(logits), (size, *logits.shape))
        return jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0]

    def entropy(logits: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(logits)
        return -(jnp.exp(logp) * logp).sum(-1).mean()

    def step(logits: jax.Array, key: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        sample, coin = jax.random.split(key)
        tokens = jax.random.categorical(sample, logits, shape=(size, config.length))
        batch = Batch(
            tokens=tokens,
            mask=jnp.ones(tokens.shape, bool),
            group=jnp.arange(size) // config.num_generations,
            rewards=jax.random.bernoulli(coin, 0.5, (size,)).astype(jnp.float32),
            old_logp=log_probability(logits, tokens),
        )
        rows, _ = what.prepare(batch)

        def loss(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            value, metrics = what.loss(log_probability(logits, tokens), rows)
            low, high = metrics["policy/clip_frac_low"], metrics["policy/clip_frac_high"]
            return value, (low.numerator + high.numerator) / low.denominator

        def update(logits: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            gradient, clipped = jax.grad(loss, has_aux=True)(logits)
            return logits - config.learning_rate * gradient, clipped

        logits, clipped = jax.lax.scan(update, logits, None, length=config.passes)
        return logits, (entropy(logits), clipped.mean())

    def run(key: jax.Array) -> Trace:
        first, rest = jax.random.split(key)
        start = jax.random.normal(first, (config.length, config.vocabulary))
        _, (entropies, clipped) = jax.lax.scan(step, start, jax.random.split(rest, config.steps))
        return Trace(jnp.concatenate([entropy(start)[None], entropies]), clipped)

    return jax.lax.map(run, keys)


def difference(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """Mean of a - b over paired seeds, and the ends of its 95% interval (Student's t)."""
    gap = a - b
    if not gap.any():
        return 0.0, 0.0, 0.0
    half = stats.t.ppf(0.975, len(gap) - 1) * stats.sem(gap)
    return float(gap.mean()), float(gap.mean() - half), float(gap.mean() + half)


def verdict(gaps: list[tuple[float, float, float]]) -> str:
    """Of the entropy kept by ever wider upper edges, against the narrowest.

    Ordered: the widest keeps more for certain, and the means rise with the edge; reversed: the
    other way round; else undecided.
    """
    means = [0.0, *(gap[0] for gap in gaps)]
    if gaps[-1][1] > 0 and sorted(means) == means:
        return "ordered"
    if gaps[-1][2] < 0 and sorted(means, reverse=True) == means:
        return "reversed"
    return "undecided"


def compare(config: Config, windows: Any, keys: jax.Array) -> tuple[dict[Any, Trace], list[Any]]:
    """Runs some windows; gives the traces and each one's difference to the first."""
    traces = {window: jax.tree.map(np.asarray, train(window, config, keys)) for window in windows}
    base = traces[windows[0]].entropy[:, -1]
    gaps = [difference(traces[window].entropy[:, -1], base) for window in windows[1:]]
    return traces, gaps


def spelt(gap: tuple[float, float, float]) -> str:
    """A difference with its interval."""
    return f"{gap[0]:+.3f} [{gap[1]:+.3f}, {gap[2]:+.3f}]"


def main(config: Config) -> dict[str, Any]:
    """Runs all windows and regimes, prints them and the verdicts."""
    if config.seeds < 20:
        raise SystemExit(f"seeds must be at least 20 for the intervals, got {config.seeds}")
    keys = jax.random.split(jax.random.key(0), config.seeds)

    once, _ = compare(dataclasses.replace(config, passes=1), WINDOWS, keys)
    first = once[WINDOWS[0]].entropy
    assert all((trace.entropy == first).all() for trace in once.values())
    print(f"1 pass: all windows give the same policy (entropy {first[:, -1].mean():.3f} nats)")

    traces, gaps = compare(config, WINDOWS, keys)
    print(
        f"{config.passes} passes, {config.steps} steps, learning rate {config.learning_rate:g}, "
        f"{config.seeds} paired seeds"
    )
    for window, gap in zip(WINDOWS, [(0.0, 0.0, 0.0), *gaps], strict=True):
        entropy, clipped = traces[window]
        print(
            f"  {window!s:12} entropy {entropy[:, 0].mean():.3f} -> {entropy[:, -1].mean():.3f}"
            f"   against (.2, .2) {spelt(gap)}   clipped {clipped.mean():.1%}"
        )
    found = {"main": verdict(gaps[:2])}
    print(f"verdict: {found['main']} (does a wider upper edge keep more entropy?)")

    print(f"where it turns, {' and '.join(map(str, UPPER[1:]))} against (.2, .2):")
    for steps, learning_rate in REGIMES:
        regime = dataclasses.replace(config, steps=steps, learning_rate=learning_rate)
        some, gaps = compare(regime, UPPER, keys)
        name = f"{steps} steps at {learning_rate:g}"
        found[name] = verdict(gaps)
        clipped = some[UPPER[0]].clipped.mean()
        shown = "   ".join(map(spelt, gaps))
        print(f"  {name:14} clipped {clipped:5.1%}   {shown}   {found[name]}")
    if config.plot is not None:
        draw(traces, config.plot)
    print(json.dumps(found))
    return found


def draw(traces: dict[Any, Trace], path: Path) -> None:
    """Mean entropy against steps for each window."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for window, trace in traces.items():
        axes.plot(trace.entropy.mean(0), label=str(window))
    axes.set(xlabel="step", ylabel="entropy, nats")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
