"""Which way decode steps go: C++ kernels for CPUs, kernels for pages, or gathered pages."""

from __future__ import annotations

import dataclasses
import logging

import jax
from jax.sharding import Mesh
from rljax_kernels import cpu
from rljax_kernels.paged_attention import OPERATION, Asked
from rljax_kernels.registry import Implementation

from rljax import mesh as meshes
from rljax.errors import InputError, MissingDependencyError
from rljax.models.config import Attention, LatentAttention, ModelConfig
from rljax.models.forward import UNROLLED
from rljax.sampling.config import PLAIN, EngineConfig
from rljax.sampling.decode import GATHERED

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DecodePath:
    """How decode steps work.

    Attributes:
      native: Whether their products are those of `rljax_kernels.cpu`.
      attention: How they reach the pages: `GATHERED`, or the name of an implementation of
        `rljax_kernels.paged_attention`.
      config: The model, with the experts' backend that goes with it.
    """

    native: bool
    attention: str
    config: ModelConfig

    @property
    def unstacked(self) -> bool:
        """Whether layers run one by one and not in a loop."""
        return self.native or self.attention == GATHERED

    @property
    def exact(self) -> bool:
        """Whether a step costs what its tokens cost, however wide the page tables are."""
        return self.attention not in (GATHERED, "reference")

    @property
    def shares(self) -> bool:
        """Whether samples of a prompt read its pages together."""
        return self.attention != "native"

    @property
    def opaque(self) -> bool:
        """Whether attention is a kernel that XLA cannot split over devices."""
        return self.attention not in (GATHERED, "native", *PLAIN)


def choose(config: ModelConfig, mesh: Mesh | None, settings: EngineConfig) -> DecodePath:
    """Picks what the settings ask for, or what suits the devices; the choice is logged.

    Args:
      config: The model.
      mesh: Where to run; None: the default device.
      settings: The engine's settings.

    Raises:
      InputError: `kernels` names what the devices, the dtype or the model are not for.
      MissingDependencyError: It names what needs a package or a compiler that is not there.
    """
    programs, native = settings.programs, False
    if programs.kernels == "native" or (programs.kernels == "auto" and platform_of(mesh) == "cpu"):
        reason = _unsuited(config, mesh) or _refused(config, settings) or _unbuilt()
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
    if programs.kernels in ("auto", "native", "off"):
        gathered = programs.gathered
        if native or (platform_of(mesh) == "cpu" if gathered is None else gathered):
            return DecodePath(native, GATHERED, config)
    chosen = _choose_attention(config, mesh, settings)
    _log.info("kernels=%s: decode attention by %r", programs.kernels, chosen.name)
    return DecodePath(native, chosen.name, config)


def platform_of(mesh: Mesh | None) -> str:
    """The platform of a mesh's devices, or of the default device."""
    return (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).platform


def asked_of(config: ModelConfig, mesh: Mesh | None, settings: EngineConfig) -> list[Asked]:
    """What the layers of a model ask of `paged_attention` on each device, each kind once."""
    tensor = 1 if mesh is None else mesh.shape["tensor"]

    def of_layer(c: Attention | LatentAttention) -> Asked:
        latent = isinstance(c, LatentAttention)
        if isinstance(c, LatentAttention):
            kv_heads, head_dim, value_dim = 1, c.kv_rank + c.rope_dim, c.kv_rank
            window, sinks = None, False
        else:
            kv_heads, head_dim, value_dim = c.num_kv_heads, c.head_dim, c.head_dim
            window, sinks = c.window, c.sinks
        splits = kv_heads % tensor == 0 or (latent and c.num_heads % tensor == 0)
        return Asked(
            dtype=config.dtype,
            rows=settings.slots // meshes.batch_shards(mesh),
            heads=c.num_heads // tensor if splits else c.num_heads,
            kv_heads=kv_heads // tensor if kv_heads % tensor == 0 else kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            page_size=settings.page_size,
            sharing=settings.programs.share if settings.programs.share > 1 else 0,
            latent=latent,
            window=window,
            sinks=sinks,
            static_layer=False,
        )

    return [of_layer(c) for c in dict.fromkeys(block.attention for block in config.layers)]


def _choose_attention(
    config: ModelConfig, mesh: Mesh | None, settings: EngineConfig
) -> Implementation:
    """The first implementation that computes what all layers ask, of those that are wanted."""
    asked, platform = asked_of(config, mesh, settings), platform_of(mesh)

    def objection(found: Implementation) -> str | None:
        reasons = (found.objection(each, platform) for each in asked)
        return next(filter(None, reasons), None) or _unsplit(found.name, config, mesh)

    wanted = settings.programs.kernels
    if wanted not in ("auto", "off"):
        chosen = OPERATION.named(wanted)
        if settings.programs.gathered:
            raise InputError(f"gathered=True and kernels={wanted!r} exclude each other; drop one")
        if reason := objection(chosen):
            # A package that is missing is named only where nothing else stands in the way.
            missing = reason == chosen.missing()
            raise (MissingDependencyError if missing else InputError)(
                f"kernels={wanted!r}: {reason}; use kernels='auto'"
            )
        return chosen
    for found in OPERATION.implementations:
        if found.name == "native" or (wanted == "off" and found.name not in PLAIN):
            continue  # the C++ kernels were considered before
        reason = objection(found)
        if reason is None and not any(found.defers(each, platform) for each in asked):
            return found
        if platform in found.platforms:
            _log.info("kernels=%s: decoding without %r: %s", wanted, found.name, reason)
    raise AssertionError(f"nothing computes {asked} on {platform}")


def _unsplit(name: str, config: ModelConfig, mesh: Mesh | None) -> str | None:
    """Why kernels cannot be called on the parts of `tensor`; None: they can, or there are none.

    XLA's partitioner (JAX 0.10) aborts the process on several calls that follow each other in a
    program: layers must be of one kind, in a loop that is not unrolled.
    """
    if name in ("native", *PLAIN) or mesh is None or mesh.shape["tensor"] == 1:
        return None
    stack = config.stacks[0]
    if len(config.stacks) == len(stack.pattern) == 1 and stack.repeats > UNROLLED:
        return None
    tensor = mesh.shape["tensor"]
    return f"with tensor={tensor} it needs more than {UNROLLED} layers that are all alike"


def _unsuited(config: ModelConfig, mesh: Mesh | None) -> InputError | None:
    """What the kernels are not for: other devices, several of them, another dtype."""
    devices = 1 if mesh is None else mesh.size
    if (platform_of(mesh), devices, config.dtype) == ("cpu", 1, "float32"):
        return None
    return InputError(
        f"kernels='native' needs one cpu device in float32, got {devices} {platform_of(mesh)} in "
        f"{config.dtype}; use kernels='auto'"
    )


def _refused(config: ModelConfig, settings: EngineConfig) -> InputError | None:
    """Settings that ask for another way, which `auto` follows."""
    gathered = settings.programs.gathered
    if settings.programs.kernels == "native":
        return None
    if gathered is not None:
        return InputError(f"gathered={gathered} was requested")
    if config.expert_backend not in ("auto", "native"):
        return InputError(f"expert_backend={config.expert_backend!r} was requested")
    return None


def _unbuilt() -> InputError | None:
    """Builds the kernels; what is missing if that fails."""
    reason = cpu.unavailable_reason()
    if reason is None:
        return None
    return MissingDependencyError(f"kernels='native' cannot be built: {reason}")
