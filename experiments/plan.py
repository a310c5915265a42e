r"""Plans the training of a model on chips that need not be there.

    python -m experiments.plan --model deepseek-v3 --topology v5p:8x8x16 \
        --mesh data=2,fsdp=32,expert=8,tensor=2 --rollout_rules experts=fsdp+expert
    python -m experiments.plan --model qwen3-30b-a3b --topology h100:64 --search
    python -m experiments.plan --model tiny-moe --topology v5p:2x2x2 --mesh fsdp=8 --compile

Prints bytes per device, the communication of a step and its least time; with `--search` the meshes
that fit, fastest first. `--compile` also compiles the real programs of update, scoring, prefill and
decoding for the described chips and prints XLA's figures next to the estimates; it needs the extra
`tpu`, and minutes for the largest models.
"""

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Literal

from experiments import renamed_flags
from experiments.flags import fail, read
from rljax.errors import InputError, RljaxError

if TYPE_CHECKING:
    from rljax import models


@dataclasses.dataclass(frozen=True)
class Flags:
    """What to plan."""

    model: str = "deepseek-v3"
    """A named configuration of rljax.models."""
    topology: str = "v5p:8x8x16"
    """Chips as kind:grid; kinds are v5e, v5p, v6e, a100, h100, h200, b200."""
    mesh: str = ""
    """Sizes of mesh axes, such as fsdp=64,expert=16; empty: all chips on fsdp."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of activations and matmul inputs."""
    remat: Literal["none", "layer", "attention", "offload"] = "layer"
    """What the backward pass recomputes: nothing, layers, layers but their attention, or layers
    whose inputs wait in the host's memory."""
    attention_backend: str = "auto"
    """What computes attention in training and scoring; auto: what these chips' platform takes."""
    expert_dispatch: Literal["all_gather", "all_to_all"] | None = None
    """How tokens reach experts of other devices; unset: whichever sends fewer bytes."""
    pipeline_repeats: int = 1
    """Mesh axis stage: groups of layers on each stage (circular pipeline)."""
    pipeline_rows: int = 1
    """Mesh axis stage: rows per device of a micro-batch of the pipeline."""
    train_rules: str = ""
    """Changes to TRAIN_RULES (weights in the update), as logical axis=mesh axes."""
    rollout_rules: str = ""
    """Changes to ROLLOUT_RULES (weights while sampling), such as experts=fsdp+expert."""
    moments_on_host: bool = False
    """Keep the optimizer's moments in the hosts' memory, as --host_memory optimizer of a run."""
    layout: bool = False
    """Print every parameter and its shard, too."""
    search: bool = False
    """Rank the meshes that fit instead."""
    compile: bool = False
    """Compile update, scoring, prefill and decoding for these chips too (TPUs only)."""


_RENAMED = {"expert_exchange": "--expert_dispatch all_gather or all_to_all"}


def main() -> int:
    """Parses the flags, plans and prints; returns 1 after an error of the user's input."""
    # Planning needs no accelerator; without the cache, compile times are those of a first run.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    try:
        from rljax import mesh as meshes
        from rljax import planning

        @dataclasses.dataclass(frozen=True)
        class All:
            plan: Flags = Flags()
            work: planning.Work = dataclasses.field(default_factory=planning.Work)

        about = (__doc__ or "").strip()
        renamed_flags.refuse(sys.argv[1:], _RENAMED)
        given = read(All, sys.argv[1:], "python -m experiments.plan", about, switches=True)
        flags, work = given.plan, given.work
        config = _model(flags)
        topology = planning.Topology.parse(flags.topology)
        rules = (
            meshes.read_rules(flags.train_rules, meshes.TRAIN_RULES),
            meshes.read_rules(flags.rollout_rules, meshes.ROLLOUT_RULES),
        )
        on_host = flags.moments_on_host
        if flags.search:
            print(planning.ranking(planning.search(config, topology, work, *rules, on_host)))
            return 0
        sizes = meshes.read_flags(flags.mesh, topology.num_chips)
        abstract = meshes.make_abstract(topology.num_chips, **sizes)
        try:
            planned = planning.plan(config, topology, abstract, work, *rules, on_host)
        except InputError as error:
            if flags.mesh:
                raise
            raise InputError(
                f"{error} (without --mesh all chips are on fsdp; --search lists meshes that fit)"
            ) from None
        if flags.layout:
            print(f"{planned.sharding}\n")
        print(planned, flush=True)
        if flags.compile:
            from rljax.planning import compile as programs
            from rljax.planning.comparison import Comparison

            mesh = meshes.make(devices=topology.devices(), **sizes)
            given = config, mesh, work
            for compiled in (
                programs.compile_update(*given, rules[0], on_host),
                programs.compile_score(*given, rules[0]),
                programs.compile_prefill(*given, rules[1]),
                programs.compile_decode(*given, rules[1]),
            ):
                print(f"\n{Comparison(planned, compiled)}", flush=True)
    except RljaxError as error:
        return fail(error)
    return 0


def _model(flags: Flags) -> "models.ModelConfig":
    from rljax import models

    if flags.model not in models.PRESETS:
        names = ", ".join(models.PRESETS)
        raise InputError(f"model={flags.model!r} is unknown; the models are {names}")
    return dataclasses.replace(
        models.PRESETS[flags.model](),
        dtype=flags.dtype,
        remat=flags.remat,
        attention_backend=flags.attention_backend,
        expert_dispatch=flags.expert_dispatch,
        pipeline_repeats=flags.pipeline_repeats,
        pipeline_rows=flags.pipeline_rows,
    )


if __name__ == "__main__":
    sys.exit(main())
