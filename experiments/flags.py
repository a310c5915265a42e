"""Flags from the configuration's dataclasses, and one clear line where they are wrong."""

import contextlib
import dataclasses
import difflib
import io
import re
import sys
from typing import get_args

from rljax.config import PRESETS, Config, ObjectiveName, ObjectiveSettings


def parse(arguments: list[str], prog: str) -> tuple[str, Config]:
    """The preset's name, and its configuration with the flags applied.

    Args:
      arguments: The command line, without the program.
      prog: How the program is called, for --help.

    Raises:
      ValueError: A flag is unknown (with the nearest known one), or a value cannot be read.
      SystemExit: --help was asked for, and printed.
    """
    import tyro

    name, rest = "arithmetic", []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--preset":
            name = next(remaining, "")
        elif argument.startswith("--preset="):
            name = argument.split("=", 1)[1]
        else:
            rest.append(argument)
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; the presets are {', '.join(PRESETS)}")
    _refuse_unknown(rest)
    about = " ".join((PRESETS[name].__doc__ or "").split())
    default = _with_objective(PRESETS[name](), rest)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            config = tyro.cli(
                Config,
                args=rest,
                default=default,
                prog=prog,
                description=f"Presets: {', '.join(PRESETS)}. Flags change {name}: {about}",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
                use_underscores=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        text = re.sub(r"[\u2500-\u257f]", " ", complaint.getvalue())
        raise ValueError(" ".join(text.split()).replace("Parsing error", "flags:")) from None
    return name, config


def _with_objective(preset: Config, arguments: list[str]) -> Config:
    """The preset; where the flags name another objective, without the settings of its own.

    A window or coefficient belongs to the objective that it was chosen for.
    """
    chosen = preset.objective.objective
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if flag.partition("=")[0] == "--objective":
            chosen = flag.partition("=")[2] or value
    if chosen == preset.objective.objective or chosen not in get_args(ObjectiveName):
        return preset
    return dataclasses.replace(preset, objective=ObjectiveSettings(objective=chosen))


def _refuse_unknown(arguments: list[str]) -> None:
    known = ["help", "preset"]
    for part in dataclasses.fields(Config):
        known += [f.name for f in dataclasses.fields(part.default)]
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument[2:].split("=", 1)[0].replace("-", "_")
            if flag not in known:
                near = difflib.get_close_matches(flag, known, 1)
                hint = f"did you mean --{near[0]}?" if near else "--help lists them all"
                raise ValueError(f"flag --{flag} is unknown; {hint}")


def fail(error: Exception) -> int:
    """Prints an error as one line, and returns the exit status."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1
