"""The parameters of a model and a weight file: each weight read or written once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from rljax import mesh as meshes
from rljax import processes
from rljax.errors import InputError
from rljax.models.config import Experts, LatentAttention, ModelConfig
from rljax.models.files.tables import Slices, Table, Weight
from rljax.models.parameters import Parameter, Params, declare


@dataclasses.dataclass(frozen=True)
class Entry:
    """One declared parameter and its places in the file.

    Attributes:
      path: Its path in the tree of parameters, such as `("stacks", 0, 0, "attention", "q")`.
      parameter: Its declaration, stacked over layers.
      weight: How each of its pieces is stored.
      layers: The model's layer for each index of its leading axis; None outside the layers.
      experts: Experts along its second axis that are stored apart; None where there are none.
    """

    path: tuple[str | int, ...]
    parameter: Parameter
    weight: Weight
    layers: tuple[int, ...] | None
    experts: int | None

    @property
    def lead(self) -> int:
        """Leading axes that tell pieces apart."""
        return (self.layers is not None) + (self.experts is not None)

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of a piece."""
        return self.parameter.shape[self.lead :]

    def name(self, index: Sequence[int]) -> str:
        """The stored name of the piece at an index of the leading axes."""
        layer = self.layers[index[0]] if self.layers is not None else None
        return self.weight.name.format(layer=layer, expert=index[-1] if index else None)

    def pieces(self) -> Iterator[tuple[int, ...]]:
        """The indices of all pieces."""
        return itertools.product(*(range(n) for n in self.parameter.shape[: self.lead]))


def entries(config: ModelConfig, table: Table) -> list[Entry]:
    """Every parameter of a model with its places in the file.

    Raises:
      ValueError: The family has no name for a parameter that the configuration asks for.
    """
    out = []
    for path, parameter in jax.tree_util.tree_flatten_with_path(declare(config))[0]:
        keys = _keys(path)
        layers, within, attention = None, keys, None
        if keys[0] == "stacks":
            number, place = int(keys[1]), int(keys[2])
            within = keys[3:]
            stack = config.stacks[number]
            attention = stack.pattern[place].attention
            first = place + sum(len(s.pattern) * s.repeats for s in config.stacks[:number])
            layers = tuple(first + r * len(stack.pattern) for r in range(stack.repeats))
            if within[0] == "feed_forward":
                feed_forward = stack.pattern[place].feed_forward
                mixture = isinstance(feed_forward, Experts)
                within = ("experts" if mixture else "dense", *within[1:])
        key = "/".join(map(str, within))
        if key not in table:
            raise InputError(
                f"family {config.family!r} stores no parameter {key!r}; change the configuration "
                "or its family"
            )
        weight = table[key]
        if weight.interleaved and isinstance(attention, LatentAttention):
            weight = dataclasses.replace(weight, rotary=attention.rope_dim)
        experts = parameter.shape[1] if "{expert}" in weight.name else None
        out.append(Entry(keys, parameter, weight, layers, experts))
    return out


@runtime_checkable
class Store(Protocol):
    """A weight file or a folder of them, open for reading."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of every weight."""

    def reading(self) -> AbstractContextManager[Any]:
        """Holds files open for a run of reads; what they map is let go at its end."""

    def read(self, name: str, cut: Slices) -> np.ndarray:
        """A part of one weight, in the dtype of the file or, if it is quantised, in float32."""


def check_names(
    found: list[Entry], shapes: Mapping[str, tuple[int, ...]], optional: Sequence[str], where: str
) -> None:
    """Refuses a file that does not hold exactly the model's weights.

    Args:
      found: The model's parameters.
      shapes: What the file holds.
      optional: Names, or suffixes of names, that may be there without a use.
      where: What to call the file.

    Raises:
      ValueError: A weight is missing, surplus or misshapen; named, with both shapes.
    """
    wanted = {
        entry.name(index): entry.weight.stored_shape(entry.inner)
        for entry in found
        for index in entry.pieces()
    }
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            got = shapes.get(name, "no such weight")
            raise InputError(
                f"{where}: weight {name!r} must be {shape} by the configuration, got {got}"
            )
    for name in shapes:
        if name not in wanted and not name.endswith(tuple(optional)):
            raise InputError(
                f"{where}: weight {name!r} {shapes[name]} has no place in the configuration, "
                "which declares no such weight; is it of another family?"
            )


def load(
    found: list[Entry],
    store: Store,
    like: Params,
    dtype: Any,
    mesh: Mesh | None,
    rules: meshes.Rules,
) -> Params:
    """Reads every weight once, into the shards that this process holds.

    Args:
      found: The model's parameters with their places.
      store: Where they are.
      like: A tree of the wanted structure.
      dtype: Dtype of all parameters.
      mesh: Where to put them; None: whole on the default device.
      rules: How to lay them over the mesh.

    Returns:
      The parameters. Beyond them memory holds one stacked parameter in the file's dtype at most.
    """
    values: dict[tuple[str | int, ...], jax.Array] = {}
    # The largest first, while most memory is free: each is read into memory beside the others.
    for entry in sorted(found, key=lambda e: -math.prod(e.parameter.shape)):
        with store.reading():
            values[entry.path] = _load_one(entry, store, np.dtype(dtype), mesh, rules)
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(structure, [values[_keys(path)] for path, _ in paths])


def _keys(path: Sequence[Any]) -> tuple[str | int, ...]:
    return tuple(k.key if isinstance(k, jax.tree_util.DictKey) else k.idx for k in path)


def _load_one(
    entry: Entry, store: Store, dtype: np.dtype, mesh: Mesh | None, rules: meshes.Rules
) -> jax.Array:
    shape, lead = entry.parameter.shape, entry.lead
    whole = tuple(slice(0, n) for n in shape)
    if mesh is None:
        boxes = {_key(whole): whole}
    else:
        name = "/".join(map(str, entry.path))
        sharding = meshes.sharding(mesh, shape, entry.parameter.axes, rules, name)
        local = sharding.addressable_devices_indices_map(shape).values()
        cut = [_bounded(index, shape) for index in local if index is not None]
        boxes = {_key(box): box for box in cut}
    shards = {k: _empty([s.stop - s.start for s in box], dtype) for k, box in boxes.items()}
    # All that this process holds of a piece is read in one go and dealt out to its shards.
    union = tuple(
        slice(min(b[d].start for b in boxes.values()), max(b[d].stop for b in boxes.values()))
        for d in range(len(shape))
    )
    inner = union[lead:]
    for index in itertools.product(*(range(s.start, s.stop) for s in union[:lead])):
        holders = [
            (k, box)
            for k, box in boxes.items()
            if all(s.start <= i < s.stop for i, s in zip(index, box, strict=False))
        ]
        if not holders:
            continue
        stored = store.read(entry.name(index), entry.weight.stored_slices(entry.inner, inner))
        piece = entry.weight.from_stored(stored, entry.inner, inner)
        for k, box in holders:
            at = tuple(i - s.start for i, s in zip(index, box, strict=False))
            part = tuple(
                slice(b.start - u.start, b.stop - u.start)
                for b, u in zip(box[lead:], inner, strict=True)
            )
            shards[k][at] = piece[part]
    if mesh is None:
        return jax.device_put(shards[_key(whole)])
    return jax.make_array_from_callback(
        shape, sharding, lambda index: shards[_key(_bounded(index or whole, shape))]
    )


def _bounded(index: Slices, shape: Sequence[int]) -> Slices:
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def _key(box: Slices) -> tuple[tuple[int, int], ...]:
    return tuple((s.start, s.stop) for s in box)


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array on a 64-byte boundary, which a CPU device takes over instead of copying."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def stored(found: list[Entry], params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Every weight as the file holds it, one at a time, gathered from wherever it lies.

    All processes must go through it together.
    """
    together: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in found:
        together.setdefault((entry.weight.name, entry.layers), []).append(entry)
    for group in together.values():
        group.sort(key=lambda e: e.weight.part)
        wholes = [_gathered(entry, params) for entry in group]
        for index in group[0].pieces():
            parts = [e.weight.to_stored(x[index]) for e, x in zip(group, wholes, strict=True)]
            array = parts[0]
            if len(parts) > 1:
                array = np.stack(parts, -1).reshape(*array.shape[:-1], -1)
            yield group[0].name(index), array


def _gathered(entry: Entry, params: Params) -> np.ndarray:
    leaf: Any = params
    for key in entry.path:
        leaf = leaf[key]
    return processes.fetch(leaf)
