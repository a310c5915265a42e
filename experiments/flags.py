"""Flags from the configuration's dataclasses, and one clear line where they are wrong."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import sys
from typing import Any, TypeVar, get_type_hints

from experiments import renamed_flags
from rljax.config import Config, ObjectiveSettings
from rljax.errors import InputError
from rljax.presets import PRESETS

Settings = TypeVar("Settings")


@dataclasses.dataclass(frozen=True)
class Parsed:
    """What a command line asks for.

    Attributes:
      name: The preset, or "custom" where --model stands without --preset.
      config: The configuration with the flags applied.
      given: The flags that were given.
      print_config: Whether to print the configuration and do nothing else.
    """

    name: str
    config: Config
    given: frozenset[str]
    print_config: bool


def parse(arguments: list[str], prog: str) -> Parsed:
    """A configuration from a preset and flags.

    Without --preset the flags change the embedded default, or, where --model is given, the neutral
    defaults of `rljax.Config`, which suit a pretrained model.

    Args:
      arguments: The command line, without the program.
      prog: How the program is called, for --help.

    Raises:
      InputError: A flag is unknown (with the nearest known one), or a value cannot be read.
      SystemExit: --help was asked for, and printed.
    """
    preset, rest, show = "", [], False
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--preset":
            preset = next(remaining, "")
        elif argument.startswith("--preset="):
            preset = argument.split("=", 1)[1]
        elif argument in ("--print-config", "--print_config"):
            show = True
        else:
            rest.append(argument)
    renamed_flags.refuse(rest, _RENAMED)
    given = frozenset(a[2:].partition("=")[0].replace("-", "_") for a in rest if a[:2] == "--")
    if preset and preset not in PRESETS:
        raise InputError(f"preset={preset!r} is unknown; the presets are {', '.join(PRESETS)}")
    name = preset or ("custom" if "model" in given else "arithmetic")
    if name in PRESETS:
        start, about = PRESETS[name](), " ".join((PRESETS[name].__doc__ or "").split())
    else:
        start, about = Config(), "Neutral defaults for a pretrained model."
    about = (
        f"Presets: {', '.join(PRESETS)}; with --model and no --preset, neutral defaults for a "
        f"pretrained model. Flags change {name}: {about}"
    )
    default = _with_objective(start, rest)
    others = ("preset", "print_config")
    return Parsed(name, read(Config, rest, prog, about, default, others), given, show)


def print_config(parsed: Parsed) -> str:
    """Every setting of a run with its value and where it comes from, a line each."""
    neutral, lines = Config().flat(), []
    for name, value in parsed.config.flat().items():
        origin = "default"
        if name in parsed.given:
            origin = "flag"
        elif value != neutral[name]:
            origin = f"preset {parsed.name}"
        lines.append((name, "unset" if value is None else str(value), origin))
    wide = [max(len(line[i]) for line in lines) for i in (0, 1)]
    return "\n".join(f"{n:<{wide[0]}}  {v:<{wide[1]}}  {o}" for n, v, o in lines)


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
    if chosen == preset.objective.objective:
        return preset
    return dataclasses.replace(preset, objective=ObjectiveSettings(objective=chosen))


# Flags of the version before, and what they are now.
_RENAMED = {
    "expert_exchange": "--expert_dispatch all_gather or all_to_all",
    "native_rollouts": "--rollout_kernels auto, native or off",
    "transposed_rollouts": "--rollout_kernels auto, which is faster",
}


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
