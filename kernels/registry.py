"""Operations with several implementations, and the one rule that chooses between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

PLATFORMS = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
      name: What flags and logs call it.
      platforms: The devices that it is for, of `PLATFORMS`.
      run: Computes it; arguments and results are those of the operation. It imports what it needs
        when it is called, so that a package that is not installed costs only those who ask for it.
      refuses: Why it does not compute what is asked (a record of the operation's own: dtype, sizes,
        options); None: it does.
      missing: Why it cannot run here, such as a package that is not installed; None: it can.
      defers: Why `auto` leaves what it could compute on a platform to those behind it, which are
        faster at that; None: it does not.
      source: Where it comes from: a library, or a paper where the code is ours.
    """

    name: str
    platforms: tuple[str, ...]
    run: Callable[..., Any]
    refuses: Callable[[Any], str | None] = lambda asked: None
    missing: Callable[[], str | None] = lambda: None
    defers: Callable[[Any, str], str | None] = lambda asked, platform: None
    source: str = ""

    def objection(self, asked: Any, platform: str) -> str | None:
        """Why it cannot be used for what is asked on a platform; None: it can."""
        if platform not in self.platforms:
            return f"it is for {' and '.join(self.platforms)}, not for {platform}"
        return self.refuses(asked) or self.missing()


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation and its implementations.

    Attributes:
      name: Of the operation.
      implementations: Of it, those to be preferred first; the last computes all there is to ask, on
        every platform, and defers to none.
      reference: The name of the implementation that the others are tested against.
    """

    name: str
    implementations: tuple[Implementation, ...]
    reference: str

    def named(self, name: str) -> Implementation:
        """The implementation of a name.

        Raises:
          ValueError: There is none.
        """
        for found in self.implementations:
            if found.name == name:
                return found
        names = ", ".join(["auto", *(i.name for i in self.implementations)])
        raise ValueError(f"{self.name} has no implementation {name!r}; use one of {names}")

    def choose(self, wanted: str, asked: Any, platform: str | None = None) -> Implementation:
        """The one rule: the first implementation that computes what is asked on these devices.

        Args:
          wanted: The name of an implementation, or `auto`.
          asked: What is asked, as the implementations' `refuses` takes it.
          platform: Of the devices; None: as `platform_here` says.

        Raises:
          ValueError: The implementation that is wanted does not exist, or cannot be used here.
        """
        platform = platform or platform_here()
        if wanted != "auto":
            found = self.named(wanted)
            if reason := found.objection(asked, platform):
                raise ValueError(f"{self.name} by {wanted!r}: {reason}; use 'auto'")
            return found
        for found in self.implementations:
            if (found.objection(asked, platform) or found.defers(asked, platform)) is None:
                return found
        raise AssertionError(f"{self.name}: nothing computes {asked} on {platform}")

    def objections(
        self, asked: Any, platform: str | None = None
    ) -> Sequence[tuple[Implementation, str | None]]:
        """Each implementation, and why it is not for what is asked (None: it is)."""
        platform = platform or platform_here()
        return [(i, i.objection(asked, platform)) for i in self.implementations]


def platform_here() -> str:
    """The platform that programs are compiled for: that of `jax.set_mesh`, or the default one.

    Under `jax.set_mesh` the mesh's devices count, which need not be at hand.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
