"""Flags of earlier versions, which are refused with their new names."""

from rljax.errors import InputError


def refuse(arguments: list[str], renamed: dict[str, str]) -> None:
    """Refuses old flags.

    Args:
      arguments: The command line, without the program.
      renamed: Old flags, without dashes in front, to what to write in their place.

    Raises:
      InputError: One of them is an old flag.
    """
    for argument in arguments:
        flag = argument.removeprefix("--").split("=", 1)[0].replace("-", "_")
        if argument.startswith("--") and flag in renamed:
            raise InputError(f"flag --{flag} was renamed; use {renamed[flag]}")
