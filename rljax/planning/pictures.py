"""Pictures of how weights are sharded over a mesh."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from rljax import mesh as meshes
from rljax.errors import InputError
from rljax.models import ModelConfig
from rljax.planning.placement import ShardedParameter, shard_parameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LABELS = 64  # cells; the numbers of more could not be read


def draw_shards(
    mesh: Mesh | AbstractMesh,
    config: ModelConfig,
    parameter: str,
    rules: meshes.Rules = meshes.TRAIN_RULES,
) -> Figure:
    """The device grid beside a weight, both in the colours of the weight's shards.

    Devices of one colour hold the same shard. The columns of the grid are the last mesh axis of
    more than one device, its rows all other axes. The weight's first split dimension runs down, the
    others across.

    Args:
      mesh: The mesh; it may be abstract.
      config: The model.
      parameter: Its name, or the end of it, such as `feed_forward/gate`; the first that matches.
      rules: Logical axis -> mesh axes.

    Raises:
      InputError: The model has no such parameter, or it does not divide over the mesh.
    """
    import matplotlib.pyplot as plt

    placed = shard_parameters(mesh, config, rules)
    weight = next((p for p in placed if p.name.endswith(parameter)), None)
    if weight is None:
        names = ", ".join(p.name for p in placed)
        raise InputError(f"parameter {parameter!r} is not one of the model's: {names}")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    used = [axis for axis in meshes.AXES if mesh.shape[axis] > 1] or [meshes.AXES[0]]
    shards = _shard_numbers(mesh, weight, used)
    _cells(left, shards, np.arange(shards.size).reshape(shards.shape), int(shards.max()) + 1)
    left.set(
        title="devices",
        xlabel=f"{used[-1]} = {mesh.shape[used[-1]]}",
        ylabel=" × ".join(f"{a} = {mesh.shape[a]}" for a in used[:-1]),
    )
    ways = [s // n for s, n in zip(weight.shape, weight.shard, strict=True)]
    split = [d for d, n in enumerate(ways) if n > 1]
    down = ways[split[0]] if split else 1
    parts = np.arange(math.prod(ways)).reshape(down, -1)
    _cells(right, parts, parts, parts.size)
    across = [d for d in range(len(ways)) if not split or d != split[0]]
    right.set(
        title=f"{weight.name}: {parts.size} shard(s) of {'×'.join(map(str, weight.shard))}",
        xlabel=", ".join(_dimension(weight, d) for d in across),
        ylabel=_dimension(weight, split[0]) if split else "",
    )
    return figure


def _dimension(weight: ShardedParameter, d: int) -> str:
    axes = "×".join(meshes.axes_of(weight.spec[d : d + 1]))
    over = f" over {axes}" if axes else ""
    return f"{weight.axes[d] or 'dimension'} {weight.shape[d]}{over}"


def _shard_numbers(
    mesh: Mesh | AbstractMesh, weight: ShardedParameter, used: list[str]
) -> np.ndarray:
    """Which shard each device holds, as a grid of devices."""
    split = weight.mesh_axes
    sizes = [mesh.shape[axis] for axis in used]
    found = [
        sum(
            index[used.index(axis)] * math.prod(mesh.shape[a] for a in split[i + 1 :])
            for i, axis in enumerate(split)
        )
        for index in itertools.product(*(range(n) for n in sizes))
    ]
    return np.asarray(found).reshape(-1, sizes[-1])


def _cells(axes: Any, colours: np.ndarray, labels: np.ndarray, most: int) -> None:
    """A grid of coloured cells, numbered where there are few."""
    axes.imshow(colours, cmap="turbo", vmin=-0.5, vmax=most - 0.5, aspect="auto", alpha=0.75)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    if labels.size <= _MOST_LABELS:
        for (line, column), label in np.ndenumerate(labels):
            axes.text(column, line, str(label), ha="center", va="center", fontsize=8)
