"""Flags from the configuration's dataclasses, and one clear line where they are wrong."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import sys
from typing import Any, TypeVar, get_args, get_type_hints

from rljax.config import PRESETS, Config, ObjectiveName, ObjectiveSettings
from rljax.errors import InputError

Settings = TypeVar("Settings")


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
        raise InputError(f"preset={name!r} is unknown; the presets are {', '.join(PRESETS)}")
    about = " ".join((PRESETS[name].__doc__ or "").split())
    about = f"Presets: {', '.join(PRESETS)}. Flags change {name}: {about}"
    default = _with_objective(PRESETS[name](), rest)
    return name, read(Config, rest, prog, about, default, others=("preset",))


def read(
    kind: type[Settings],
    arguments: list[str],
    prog: str,
    description: str | None,
    default: Settings | None = None,
    others: tuple[str, ...] = (),
    switches: bool = False,
) -> Settings:
    """A configuration from flags.

    Args:
      kind: The dataclass; its fields, or those of the dataclasses in it, are the flags.
      arguments: The command line, without the program.
      prog: How the program is called, for --help.
      description: What the program does, for --help.
      default: What the flags change; None: the dataclass's own defaults.
      others: Flags that the program reads itself, to be proposed where one is mistyped.
      switches: Whether truths are written --flag and --no_flag, and not --flag True.

    Raises:
      ValueError: A flag is unknown (with the nearest known one) or missing, or a value cannot be
        read.
      SystemExit: --help was asked for, and printed.
    """
    import tyro

    names = _names(kind)
    negated = [f"no_{name}" for name in names] if switches else []
    _refuse_unknown(arguments, ["help", *others, *names, *negated])
    plain = () if switches else (tyro.conf.FlagConversionOff,)
    given: dict[str, Any] = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                kind,
                args=arguments,
                prog=prog,
                description=description,
                config=(tyro.conf.OmitArgPrefixes, *plain),
                use_underscores=True,
                **given,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        text = re.sub(r"[\u2500-\u257f]", " ", complaint.getvalue())
        raise InputError(" ".join(text.split()).replace("Parsing error", "flags:")) from None


def _names(kind: Any) -> list[str]:
    """The flags of a dataclass: its fields, those that are dataclasses replaced by their own."""
    names = []
    for name, part in get_type_hints(kind).items():
        names += _names(part) if dataclasses.is_dataclass(part) else [name]
    return names


def _with_objective(preset: Config, arguments: list[str]) -> Config:
    """The preset; where the flags name another objective, without the settings of its own.

    A window or coefficient belongs to the objective that it was chosen for.
    """
    chosen = preset.objective.objective
    for flag, value in itertools.pairwise([*arguments, ""]):
        if flag.partition("=")[0] == "--objective":
            chosen = flag.partition("=")[2] or value
    if chosen == preset.objective.objective or chosen not in get_args(ObjectiveName):
        return preset
    return dataclasses.replace(preset, objective=ObjectiveSettings(objective=chosen))


def _refuse_unknown(arguments: list[str], known: list[str]) -> None:
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument[2:].split("=", 1)[0].replace("-", "_")
            if flag not in known:
                near = difflib.get_close_matches(flag, known, 1)
                hint = f"did you mean --{near[0]}?" if near else "--help lists them all"
                raise InputError(f"flag --{flag} is unknown; {hint}")


def fail(error: Exception) -> int:
    """Prints an error as one line, and returns the exit status."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1
