"""Times a whole step of reinforcement learning against TRL and tunix, and an update against torch.

All sides start from the same weights in float32 and get the same prompts: 8 of 64 tokens. `step`:
8 responses a prompt of 128 tokens each (no end token), at temperature 1; then GRPO's update on the
64 sequences, 12,288 tokens. Ours runs by `rljax.open_run` and the stages of a run, with log-
probabilities, entropy and mismatch metrics, as the settings are shipped and with each of the
`variants`; TRL by its GRPOTrainer on transformers' generate; tunix by its GRPOLearner and sampler.
`rollout` is what samples and scores, `update` the rest of the step.

`long-tail`: the update alone, on responses of `clip(7 + geometric(1/32), 8, 128)` tokens, 2,466 in
all, against a plain training step of transformers' model on torch, its rows padded to the longest.

`first` is what each side needs to open (load the weights, compile) and for its first step, which is
not counted otherwise; for ours, which are open by then, the first update alone in `long-tail`.
Ratios are those of one run, by the fastest steps.

Command:
    python -m experiments.benchmark_step                        # ours alone
    python -m experiments.benchmark_step --trl-python /path/to/python-with-trl \
        --tunix-python /path/to/python-with-tunix --torch-python /path/to/python-with-torch

Under Linux, GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in front gives all of them huge pages.

Cost: about 2 minutes for each side and variant on 2 CPU cores.

Expected: ours takes at most half of TRL's time for a step, and at most .55 of torch's for the
long-tail update; the settings as they are shipped are the fastest. Figures are in
experiments/README.md.
"""

import dataclasses
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.step_workload import (
    Config,
    lengths_of,
    parities,
    responses_of,
    texts_of,
    write_tokenizer,
)
from experiments.timing import HOW_TO_COMPARE, peer_half

VARIANTS: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "share_prompts=never": {"share_prompts": "never"},
    "packing=never": {"packing": "never"},
    "remat=none": {"remat": "none"},
    "remat=layer": {"remat": "layer"},
    "remat=attention": {"remat": "attention"},
}
"""Names of ours, and the settings in which each differs from what is shipped."""

PEERS = {"step": ("trl", "tunix"), "long-tail": ("torch",)}


def tell(line: str) -> None:
    """Prints a line of progress; results go to standard output, it does not."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def settings(config: Config, folder: Path, changes: dict[str, Any]) -> Any:
    """The configuration of a run: the neutral defaults but for the workload and the changes."""
    from rljax.config import Config as RunConfig

    workload = {
        "model": str(folder),
        "template": "none",
        "max_prompt_length": config.prompt_length,
        "prompts_per_step": config.prompts,
        "num_generations": config.generations,
        "max_completion_length": config.new_tokens,
        "micro_batch_size": config.micro_batch,
        "objective": "grpo",
        "learning_rate": config.learning_rate,
        "warmup_steps": 1,
        "run_dir": tempfile.mkdtemp(dir=folder),
    } | changes
    parts = {}
    for part in dataclasses.fields(RunConfig):
        own = getattr(RunConfig(), part.name)
        names = {field.name for field in dataclasses.fields(own)} & set(workload)
        parts[part.name] = dataclasses.replace(own, **{name: workload[name] for name in names})
    return RunConfig(**parts)


def run_ours(config: Config, folder: Path, name: str) -> dict[str, Any]:
    """The steps of each workload in seconds, with one of `VARIANTS`."""
    import rljax

    chosen = settings(config, folder, VARIANTS[name])
    prompts = [{"question": text, "answer": ""} for text in texts_of(config)]
    found: dict[str, Any] = {}
    started = time.perf_counter()
    with rljax.open_run(chosen, prompts=prompts, rewards=[parities], name="benchmark") as opened:
        run, state = opened
        endless = dataclasses.replace(run.source.sampling, stop_token_ids=())
        run = dataclasses.replace(run, source=dataclasses.replace(run.source, sampling=endless))
        opened_s = time.perf_counter() - started
        tell(f"rljax, {name}: opened in {opened_s:.0f} s")
        for workload in config.workloads:
            steps, tokens = [], 0
            for _ in range(1 + config.repeats):
                took, state, tokens = one_step(config, run, state, workload)
                tell(f"rljax, {name}, {workload}: {_spelt(took)}")
                steps.append(took)
            first = steps[0]["update"]
            if workload == "step":
                first = steps[0]["step"] + opened_s
            found[workload] = {"first_s": first, "steps": steps[1:], "tokens": tokens}
    return found


def one_step(
    config: Config, run: Any, state: Any, workload: str
) -> tuple[dict[str, float], Any, int]:
    """One step, or its update alone, by the stages of a run.

    Returns:
      Seconds; the new state; tokens of the responses.
    """
    import jax

    start = time.perf_counter()
    if workload == "step":
        groups, state, _ = run.sample(state)
    else:
        groups = long_tail_groups(config, run.prompts.stream.prompts)
        start = time.perf_counter()
    sampled = time.perf_counter()
    shapes = run.plan(groups)
    batch, _ = run.score(state, groups, shapes)
    rows, _ = run.prepare(batch)
    state, _ = run.learn(state, rows, shapes)
    state = state.replace(step=state.step + 1)
    if workload == "step":
        run.sync_weights(state)
    jax.block_until_ready(state.train)
    end = time.perf_counter()
    took = {"update": end - sampled}
    if workload == "step":
        took |= {"rollout": sampled - start, "step": end - start}
    return took, state, sum(len(r.tokens) for g in groups for r in g.responses)


def long_tail_groups(config: Config, prompts: Any) -> list[Any]:
    """Groups of responses of the long-tail lengths, with random tokens and rewards of 0 and 1."""
    from rljax.rollouts import ScoredGroup
    from rljax.sampling import Response

    size, groups = config.generations, []
    responses = responses_of(config)
    for i, prompt in enumerate(sorted(prompts, key=lambda p: p.id)):
        drawn = [
            Response(
                prompt_index=i,
                sample_index=k,
                tokens=tokens,
                logp=np.full(len(tokens), -9.0, np.float32),
                finish_reason="length",
                truncated=True,
                version=np.zeros(len(tokens), np.int32),
            )
            for k, tokens in enumerate(responses[i * size : (i + 1) * size])
        ]
        rewards = np.arange(size, dtype=np.float32) % 2
        groups.append(
            ScoredGroup(
                prompt, drawn, [""] * size, rewards, rewards, rewards[:, None], np.ones(size, bool)
            )
        )
    return groups


def _spelt(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())


def fastest(found: dict[str, Any], part: str) -> float:
    """Seconds of the fastest step."""
    return min(step[part] for step in found["steps"])


def median(found: dict[str, Any], part: str) -> float:
    """Seconds of the median step."""
    return float(np.median([step[part] for step in found["steps"]]))


def table(workload: str, sides: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of a workload's table.

    Args:
      workload: `step` or `long-tail`.
      sides: What each side found, the peers last; a side without steps is left out.
    """
    parts = ("step", "rollout", "update") if workload == "step" else ("update",)
    peers = [peer for peer in PEERS[workload] if peer in sides]
    heads = [workload, *(f"{part}, s (median)" for part in parts), "response tokens/s", "first, s"]
    heads += [f"time over {peer}'s" for peer in peers]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---"] * len(heads)) + " |"]
    for name, found in sides.items():
        cells = [name]
        cells += [f"{fastest(found, part):.2f} ({median(found, part):.2f})" for part in parts]
        cells.append(f"{found['tokens'] / fastest(found, parts[0]):,.0f}")
        cells.append(f"{found['first_s']:.1f}")
        for peer in peers:
            cells.append(f"{fastest(found, parts[0]) / fastest(sides[peer], parts[0]):.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(config: Config) -> None:
    """Runs every side and prints a table for each workload."""
    import jax

    from rljax import models
    from rljax.errors import InputError

    names = config.variants or tuple(VARIANTS)
    if unknown := set(names) - set(VARIANTS):
        raise InputError(
            f"variants={sorted(unknown)} are unknown; the variants are {', '.join(VARIANTS)}"
        )
    logging.getLogger("absl").setLevel(logging.ERROR)
    pythons = {peer: getattr(config, f"{peer}_python") for peer in config.peers}
    missing, sides = [], {workload: {} for workload in config.workloads}
    with tempfile.TemporaryDirectory() as folder:
        model = models.PRESETS[config.model]()
        params = models.init(jax.random.key(0), model)
        models.save_pretrained(Path(folder), model, params)
        write_tokenizer(Path(folder))
        del params
        for name in names:
            found = run_ours(config, Path(folder), name)
            for workload in config.workloads:
                sides[workload][f"rljax, {name}"] = found[workload]
        for workload in config.workloads:
            for peer in PEERS[workload]:
                if peer not in config.peers:
                    continue
                tell(f"{workload}: {peer}")
                theirs = peer_half(
                    peer, pythons[peer], "experiments.step_peers", config, folder=folder
                )
                if theirs is None:
                    missing.append(HOW_TO_COMPARE[peer])
                else:
                    sides[workload][peer] = theirs
    print(f"{config.model}, float32, {config.responses} sequences, fastest of {config.repeats}")
    for workload in config.workloads:
        print("\n".join(["", *table(workload, sides[workload])]))
    if "long-tail" in config.workloads:
        print(f"\nlong-tail: {lengths_of(config).sum():,} tokens of responses")
    print("\n".join(missing))
    print(json.dumps(sides))


if __name__ == "__main__":
    import tyro

    from experiments.flags import fail
    from rljax.errors import RljaxError

    try:
        main(tyro.cli(Config, description=__doc__))
    except RljaxError as error:
        sys.exit(fail(error))
