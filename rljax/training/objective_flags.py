"""From the flags of an objective to the `Objective` itself."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljax import losses as L
from rljax.config import Config
from rljax.errors import InputError, MissingFileError

NAMES = tuple(build.__name__ for build in L.named.ALL if build is not L.supervised)
"""The named objectives that a run can train."""


def make_objective(config: Config, given: L.Objective | None = None) -> L.Objective:
    """The objective of a run: the one given or named, with the terms that the flags add.

    Args:
      config: The configuration.
      given: An objective of the caller's own, in place of the one that the configuration names.

    Raises:
      InputError: There is no such objective, it does not take a setting that was given, or a term
        cannot be added to it.
    """
    terms = L.additional(**vars(config.terms))
    if given is not None:  # it replaces the named one, with that one's settings
        return given.adding(*terms)
    settings = config.objective
    wanted = {
        f.name: value
        for f in dataclasses.fields(settings)
        if f.name != "objective" and (value := getattr(settings, f.name)) is not None
    }
    name, build = settings.objective, _find(settings.objective)
    if isinstance(build, L.Objective):
        if wanted:
            raise InputError(
                f"{next(iter(wanted))}={next(iter(wanted.values()))} has no effect on an "
                "objective that is built already; leave it out, or give a function that takes it"
            )
        objective = build
    else:
        objective = build(**_arguments(name, build, wanted, config))
        if not isinstance(objective, L.Objective):
            raise InputError(
                f"objective={name!r} returned {type(objective).__name__}; return an Objective"
            )
    return objective.adding(*terms)


def _find(name: str) -> Any:
    """A named objective, or what `file.py:name` holds."""
    if name in NAMES:
        return getattr(L, name)
    path, colon, attribute = name.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(NAMES)}"
        raise InputError(f"objective={name!r} is unknown; {hint} Or give file.py:name")
    if not Path(path).is_file():
        raise MissingFileError(f"objective={name!r}: {path!r} does not exist; check the path")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, attribute, None)
    if not (isinstance(found, L.Objective) or callable(found)):
        raise InputError(
            f"objective={name!r}: {path} has no Objective or function {attribute!r}; check the name"
        )
    return found


def _arguments(
    name: str, build: Callable[..., Any], wanted: dict[str, Any], config: Config
) -> dict[str, Any]:
    """The keyword arguments of an objective's function."""
    taken = inspect.signature(build).parameters
    for setting, value in wanted.items():
        if setting not in taken:
            raise InputError(
                f"{setting}={value} means nothing to objective={name}; leave it out, or choose an "
                f"objective that takes it ({name} takes {', '.join(taken) or 'no settings'})"
            )
    longest = config.rollout.max_completion_length
    if name == "dapo":
        wanted.setdefault("overlong_max", longest)
        if wanted["overlong_max"] > longest:
            raise InputError(
                f"overlong_max={wanted['overlong_max']} is longer than max_completion_length="
                f"{longest}; no response could reach it"
            )
        wanted.setdefault("overlong_cache", max(wanted["overlong_max"] // 5, 1))
    if name == "gdpo":
        rewards = config.rewards
        wanted["reward_weights"] = rewards.reward_weights or (1.0,) * len(rewards.rewards)
    if name == "dr_grpo":
        wanted["length"] = longest
    return wanted
