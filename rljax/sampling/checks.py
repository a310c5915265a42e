"""Checks of single values: each raises one line that names the value and what it must be."""

from __future__ import annotations

import math
import operator
from typing import Any

from rljax.errors import InputError


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """The value as a Python int.

    Args:
      name: What the value is called in the message.
      value: An int or a numpy integer; truth values and floats are refused.
      least: The smallest value allowed; None: any.
      most: The largest value allowed; None: any.

    Raises:
      InputError: It is no integer, or lies outside the bounds.
    """
    number = None if isinstance(value, bool) else _index(value)
    if number is None:
        raise InputError(f"{name}={value!r} must be an integer")
    if least is not None and number < least:
        raise InputError(f"{name}={number} must be at least {least}")
    if most is not None and number > most:
        raise InputError(f"{name}={number} must be at most {most}")
    return number


def real(name: str, value: Any) -> float:
    """The value as a finite Python float; raises `InputError` where it is none."""
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{name}={value!r} must be a finite number")
    return number


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None
