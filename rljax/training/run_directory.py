"""The directory of a run: its configuration on disk, and whether a start may continue it."""

from __future__ import annotations

import dataclasses
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from rljax.config import Config
from rljax.errors import InputError

CONFIG_FILE = "config.json"

# Settings that may change when a run is continued: they change no result, or only what is yet to
# come, such as when to stop.
MAY_CHANGE = frozenset({
    "steps", "run_dir", "resume", "save_every", "keep_checkpoints", "export", "log_samples",
    "eval_every", "stop_at", "max_skipped_updates", "reward_timeout", "micro_batch_size",
    "micro_batch_tokens", "packing", "share_prompts", "remat", "slots", "page_size", "num_pages",
    "decode_chunk", "host_memory", "rollout_kernels", "attention_backend", "expert_backend",
    "expert_dispatch", "logprob_backend",
    "pipeline_rows", "coordinator", "num_processes", "process_id", "heartbeat_timeout",
})  # fmt: skip


def locate(config: Config, name: str) -> Path:
    """Where a run writes."""
    return Path(config.run.run_dir or f"runs/{name}-seed{config.run.seed}")


def claim(directory: Path, config: Config, name: str, own: dict[str, Any]) -> None:
    """Writes the configuration into a new run directory, or checks that a run may be continued.

    A directory holds a run once it holds a checkpoint; one whose start failed counts as new.

    Args:
      directory: Of the run.
      config: The configuration.
      name: The preset's name, or another name of the run.
      own: Descriptions, as JSON, of objects that the caller gave in place of settings, such as an
        objective.

    Raises:
      InputError: The directory holds another run, or `resume` does not allow what was found, or
        it cannot be written.
    """
    resume = config.run.resume
    if not holds_run(directory):
        if resume == "must":
            raise InputError(f"resume=must, but {directory} holds no run; check run_dir")
        _refuse_only_unreadable(directory)
        _write(directory, config, name, own)
        return
    if resume == "never":
        raise InputError(f"resume=never, but {directory} holds a run; choose another run_dir")
    _compare(directory, config, own)


def holds_run(directory: Path) -> bool:
    """Whether there is a checkpoint, readable or not."""
    checkpoints = directory / "checkpoints"
    return checkpoints.is_dir() and any(p.name.isdigit() for p in checkpoints.iterdir())


def _refuse_only_unreadable(directory: Path) -> None:
    """A run whose checkpoints were all set aside is not a new run."""
    aside = sorted(directory.glob("unreadable-*")) if directory.is_dir() else []
    if aside:
        raise InputError(
            f"{directory} holds no checkpoint but {aside[-1].name}, which could not be read; "
            "restore a checkpoint, or choose another run_dir"
        )


def _write(directory: Path, config: Config, name: str, own: dict[str, Any]) -> None:
    packages = ("rljax", "jax", "jaxlib", "flax", "optax")
    versions = {package: metadata.version(package) for package in packages}
    record = {
        "preset": name,
        "config": dataclasses.asdict(config),
        "own": own,
        "versions": {"python": platform.python_version(), **versions},
    }
    file = directory / CONFIG_FILE
    temporary = file.with_suffix(".tmp")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        temporary.rename(file)
    except OSError as error:
        raise InputError(f"run_dir={str(directory)!r} cannot be written: {error}") from None


def _compare(directory: Path, config: Config, own: dict[str, Any]) -> None:
    """Refuses a setting that would change the result of a run that is continued.

    A setting that the run's version did not know has its default: that is how the run was.
    """
    file = directory / CONFIG_FILE
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file} cannot be read ({error}); restore it, or choose another run_dir"
        ) from None
    saved = {name: value for part in record["config"].values() for name, value in part.items()}
    defaults = Config().flat()
    for name, value in json.loads(json.dumps(config.flat())).items():
        old = saved.get(name, json.loads(json.dumps(defaults[name])))
        steps_matter = name == "steps" and config.optimizer.lr_schedule != "constant"
        if old != value and (name not in MAY_CHANGE or steps_matter):
            raise InputError(
                f"{directory} holds a run with {name}={old!r}, got {value!r}; choose another "
                "run_dir, or give the old value to continue it"
            )
    for name, value in own.items():
        if record.get("own", {}).get(name, value) != value:
            raise InputError(
                f"{directory} holds a run with another {name}; choose another run_dir, or give "
                f"the same {name} to continue it"
            )
