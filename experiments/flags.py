"""Flags from the configuration's dataclasses, and one clear line where they are wrong."""

import contextlib
import dataclasses
import difflib
import io
import re
import sys
from collections.abc import Iterable
from typing import TypeVar, get_args

from rljax.config import PRESETS, Config, ObjectiveName, ObjectiveSettings

T = TypeVar("T")


def parse(arguments: list[str], prog: str) -> tuple[str, Config]:
    """The preset's name, and its configuration with the flags applied.

    Args:
      arguments: The command line, without the program.
      prog: How the program is called, for --help.

    Raises:
      ValueError: A flag is unknown (with the nearest known one), or a value cannot be read.
      SystemExit: --help was asked for, and printed.
    """
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
    about = " ".join((PRESETS[name].__doc__ or "").split())
    default = _with_objective(PRESETS[name](), rest)
    description = f"Presets: {', '.join(PRESETS)}. Flags change {name}: {about}"
    return name, read(rest, default, prog, description, also=("preset",))


def read(
    arguments: list[str],
    default: T,
    prog: str,
    description: str,
    also: Iterable[str] = (),
    switches: bool = False,
) -> T:
    """A dataclass of dataclasses with the flags applied, one flag a field.

    Args:
      arguments: The command line, without the program.
      default: What the flags change.
      prog: How the program is called, for --help.
      description: What it does, for --help.
      also: Further flags that the caller knows.
      switches: Whether truths are written --flag and --no_flag, and not --flag True.

    Raises:
      ValueError: A flag is unknown (with the nearest known one), or a value cannot be read.
      SystemExit: --help was asked for, and printed.
    """
    import tyro

    names = _fields(default)
    negated = [f"no_{name}" for name in names] if switches else []
    _refuse_unknown(arguments, ["help", *also, *names, *negated])
    plain = () if switches else (tyro.conf.FlagConversionOff,)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                type(default),
                args=arguments,
                default=default,
                prog=prog,
                description=description,
                config=(tyro.conf.OmitArgPrefixes, *plain),
                use_underscores=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        text = re.sub(r"[\u2500-\u257f]", " ", complaint.getvalue())
        raise ValueError(" ".join(text.split()).replace("Parsing error", "flags:")) from None


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


def _fields(part: object) -> list[str]:
    """The names of all fields, those of parts included."""
    found = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        found += _fields(value) if dataclasses.is_dataclass(value) else [field.name]
    return found


def _refuse_unknown(arguments: list[str], known: list[str]) -> None:
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
