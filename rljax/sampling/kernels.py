"""Which way decode steps go: the kernels for CPUs, gathered pages, or the pages themselves."""

from __future__ import annotations

import dataclasses
import logging

import jax
from jax.sharding import Mesh
from rljax_kernels import cpu

from rljax.errors import InputError, MissingDependencyError
from rljax.models.config import LatentAttention, ModelConfig
from rljax.sampling.config import ProgramConfig
from rljax.sampling.decode import Attention

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DecodePath:
    """How decode steps work.

    Attributes:
      native: Whether they use the kernels of `rljax_kernels.cpu`.
      attention: How they reach the pages.
      config: The model, with the experts' backend that goes with it.
    """

    native: bool
    attention: Attention
    config: ModelConfig

    @property
    def unstacked(self) -> bool:
        """Whether layers run one by one and not in a loop."""
        return self.native or self.attention == "gathered"


def choose(config: ModelConfig, mesh: Mesh | None, programs: ProgramConfig) -> DecodePath:
    """Picks what the settings ask for, or what suits the devices; the choice is logged.

    Args:
      config: The model.
      mesh: Where to run; None: the default device.
      programs: The settings.

    Raises:
      InputError: `kernels` is `native` and the devices or the dtype are not for them.
      MissingDependencyError: It is, and there is no C++ compiler that builds them.
    """
    gathered, native = programs.gathered, False
    if programs.kernels != "off":
        reason = _unsuited(config, mesh) or _refused(config, programs) or _unbuilt()
        native = reason is None
        if reason is None:
            _log.info("kernels=%s: decoding with the C++ kernels for CPUs", programs.kernels)
        elif programs.kernels == "native":
            raise reason
        else:
            why = str(reason).partition(";")[0]
            _log.info("kernels=auto: decoding without the C++ kernels for CPUs: %s", why)
    if native:
        config = dataclasses.replace(config, expert_backend="native")
    latent = any(isinstance(b.attention, LatentAttention) for b in config.layers)
    if native and not latent:
        return DecodePath(True, "native", config)
    if gathered is None:
        gathered = native or _platform(mesh) == "cpu"
    return DecodePath(native, "gathered" if gathered else "paged", config)


def _platform(mesh: Mesh | None) -> str:
    return (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).platform


def _unsuited(config: ModelConfig, mesh: Mesh | None) -> InputError | None:
    """What the kernels are not for: other devices, several of them, another dtype."""
    devices = 1 if mesh is None else mesh.size
    if (_platform(mesh), devices, config.dtype) == ("cpu", 1, "float32"):
        return None
    return InputError(
        f"kernels='native' needs one cpu device in float32, got {devices} {_platform(mesh)} in "
        f"{config.dtype}; use kernels='auto'"
    )


def _refused(config: ModelConfig, programs: ProgramConfig) -> InputError | None:
    """Settings that ask for another way, which `auto` follows."""
    if programs.kernels == "native":
        return None
    if programs.gathered is not None:
        return InputError(f"gathered={programs.gathered} was requested")
    if config.expert_backend not in ("auto", "native"):
        return InputError(f"expert_backend={config.expert_backend!r} was requested")
    return None


def _unbuilt() -> InputError | None:
    """Builds the kernels; what is missing if that fails."""
    reason = cpu.unavailable_reason()
    if reason is None:
        return None
    return MissingDependencyError(f"kernels='native' cannot be built: {reason}")
