"""Times a jitted loss and gradient against the same computation in plain torch.

Both get the same batch of 64 x 4096 tokens (log-probabilities given: no model runs) and compute the
loss, its gradient with respect to the log-probabilities and, unless told otherwise, the same
metrics; the values are compared too. Advantages and weights are prepared beforehand on both sides.

Command:
    python -m experiments.benchmark_losses                      # JAX alone
    python -m experiments.benchmark_losses --torch-python /path/to/python-with-torch

Cost: about 20 seconds on 2 CPU cores.

Expected: values and gradients agree to 1e-4. On 2 CPU cores, by the fastest runs: with metrics JAX
takes 1.3 to 3 ms and torch 4 to 8 ms where the ratio is a token's; without, .5 to 1.5 ms against 3
to 5 ms. With GSPO both have little to do, its ratio being one number a response, and come out about
equal (2 ms with metrics, .6 to .9 ms without). Where other work shares the cores, torch's threads
wait for each other and take a hundred times as long; look at the fastest runs, not at the medians.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.timing import HOW_TO_COMPARE, peer_half, spelt, timed


@dataclasses.dataclass(frozen=True)
class Config:
    """What to time.

    Attributes:
      responses: Responses in the batch.
      length: Tokens of a row, prompt and padding included.
      repeats: Timed runs; the median and the fastest are reported.
      metrics: Whether to compute the metrics too.
      torch_python: A Python that has torch, for the other half; None: this one, if it has torch.
      seed: Of the batch.
    """

    responses: int = 64
    length: int = 4096
    repeats: int = 30
    metrics: bool = True
    torch_python: Path | None = None
    seed: int = 0


OBJECTIVES = ("grpo", "dapo", "gspo")


def arrays(config: Config) -> dict[str, np.ndarray]:
    """A random batch: mask, log-probabilities, and advantages of groups of 8."""
    rng = np.random.default_rng(config.seed)
    shape = (config.responses, config.length)
    lengths = rng.integers(config.length // 20, config.length - 100, config.responses)
    columns = np.arange(config.length)
    old = -rng.gamma(1.0, 1.0, shape)
    return {
        "mask": (columns >= 50) & (columns < 50 + lengths[:, None]),
        "old": old.astype(np.float32),
        "new": (old + rng.normal(0, 0.2, shape)).astype(np.float32),
        "ref": (old + rng.normal(0, 0.2, shape)).astype(np.float32),
        "rewards": rng.integers(0, 2, config.responses).astype(np.float32),
        "group": np.arange(config.responses) // 8,
    }


def run_jax(config: Config) -> dict[str, dict[str, float]]:
    """Times rljax's objectives, prepared beforehand."""
    import jax
    import jax.numpy as jnp

    from rljax import losses as L
    from rljax.batch import Batch

    data = {name: jnp.asarray(value) for name, value in arrays(config).items()}
    batch = Batch(
        tokens=jnp.zeros(data["mask"].shape, jnp.int32),
        mask=data["mask"],
        group=data["group"],
        rewards=data["rewards"],
        old_logp=data["old"],
        ref_logp=data["ref"],
    )
    found = {}
    for name, objective in zip(OBJECTIVES, (L.grpo(), L.dapo(), L.gspo(0.02, 0.03)), strict=True):
        rows, _ = jax.jit(objective.prepare)(batch)

        def loss(logp, rows, objective=objective):
            value, stats = objective.loss(logp, rows)
            return value, (stats if config.metrics else None)

        both = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, _), gradient = both(data["new"], rows)
        found[name] = {
            "loss": float(value),
            "gradient_norm": float(jnp.linalg.norm(gradient)),
            **timed(
                lambda both=both, rows=rows: jax.block_until_ready(both(data["new"], rows)),
                config.repeats,
            ),
        }
    return found


def run_torch(config: Config) -> dict[str, dict[str, float]]:
    """Times the same objectives in plain torch, op by op."""
    import torch

    data = {name: torch.from_numpy(value) for name, value in arrays(config).items()}
    mask, old, ref = data["mask"].float(), data["old"], data["ref"]
    groups = data["rewards"].reshape(-1, 8)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    advantages = advantages.reshape(-1, 1)
    tokens, lengths = mask.sum(), mask.sum(1, keepdim=True)
    degenerate = (groups.std(1, keepdim=True) == 0).expand(-1, 8).reshape(-1, 1)
    kept = mask * ~degenerate
    new = data["new"].requires_grad_()

    def clipped(ratio: Any, low: float, high: float) -> Any:
        return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)

    def k3(a: Any, b: Any) -> Any:
        difference = (b - a).clamp(-20, 20)
        return difference.exp() - difference - 1

    def loss_of(name: str) -> tuple[Any, Any, float, float, Any]:
        log_ratio = (new - old) * mask
        if name == "gspo":
            ratio = ((log_ratio * mask).sum(1, keepdim=True) / lengths).clamp(-20, 20).exp()
            j, low, high = clipped(ratio, 0.02, 0.03), 0.02, 0.03
            return -(j * mask / lengths).sum() / len(j), ratio, low, high, mask / lengths
        ratio = log_ratio.clamp(-20, 20).exp()
        if name == "dapo":
            j = clipped(ratio, 0.2, 0.28)
            return -(j * kept).sum() / kept.sum(), ratio, 0.2, 0.28, kept
        j = clipped(ratio, 0.2, 0.2) - 0.04 * k3(new, ref)
        return -(j * mask / lengths).sum() / len(j), ratio, 0.2, 0.2, mask

    def metrics_of(name: str, ratio: Any, low: float, high: float, counter: Any) -> list[Any]:
        with torch.no_grad():
            inside = kept if name == "dapo" else mask
            probability = new.exp()
            above = ((ratio > 1 + high) & (advantages > 0)) * counter
            below = ((ratio < 1 - low) & (advantages < 0)) * counter
            return [
                (probability * inside).sum() / inside.sum(),
                (ratio * counter).sum() / counter.sum(),
                (ratio * (inside > 0)).max(),
                below.sum() / counter.sum(),
                above.sum() / counter.sum(),
                (probability * above).sum() / above.sum(),
                (k3(old, new) * inside).sum() / inside.sum(),
                (k3(new, ref) * inside).sum() / inside.sum(),
            ]

    found = {}
    for name in OBJECTIVES:

        def step(name: str = name) -> float:
            new.grad = None
            loss, ratio, low, high, counter = loss_of(name)
            loss.backward()
            if config.metrics:
                metrics_of(name, ratio, low, high, counter)
            return float(loss.detach())

        value = step()
        found[name] = {
            "loss": value,
            "gradient_norm": float(new.grad.norm()),
            **timed(step, config.repeats),
        }
    assert float(tokens) > 0
    return found


def main(config: Config) -> None:
    """Runs both halves and prints one line an objective."""
    ours = run_jax(config)
    theirs = peer_half("torch", config.torch_python, "experiments.benchmark_losses", config)
    print(f"{config.responses} x {config.length} tokens, metrics: {config.metrics}")
    for name in OBJECTIVES:
        line = f"{name:6} jax {spelt(ours[name])}"
        if theirs is not None:
            ratio = theirs[name]["fastest_ms"] / ours[name]["fastest_ms"]
            line += f"   torch {spelt(theirs[name])}   {ratio:4.1f} x by the fastest"
            for key in ("loss", "gradient_norm"):
                np.testing.assert_allclose(ours[name][key], theirs[name][key], rtol=1e-4)
        print(line)
    if theirs is None:
        print(HOW_TO_COMPARE["torch"])
    print(json.dumps({"jax": ours, "torch": theirs}))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
