"""Where parameters lie in a weight file: one table a family, read and written through."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Weight:
    """Where one parameter of one layer (and one expert) is stored.

    Attributes:
      name: Its name in the file, with `{layer}` and `{expert}` to be filled in.
      axes: For each stored dimension, the dimensions of ours that it holds, flattened in order.
        Ours are counted without the leading `layers` and `experts`.
      part: Which of `parts` parameters it is that are stored in one array, taking turns along its
        last dimension.
      parts: How many they are.
      interleaved: Whether rotary pairs stand next to each other in the stored array's first
        dimension, as in GGUF files of llama; ours are halves apart. Our dimension that ends it is
        never split over devices.
      rotary: How many numbers at the end of that dimension are rotated; None: all.
    """

    name: str
    axes: tuple[tuple[int, ...], ...]
    part: int = 0
    parts: int = 1
    interleaved: bool = False
    rotary: int | None = None

    def _flat_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(math.prod(shape[d] for d in group) for group in self.axes)

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in the file of a parameter of `shape`, with those stored in one array."""
        *others, last = self._flat_shape(shape)
        return (*others, last * self.parts)

    def stored_slices(self, shape: Sequence[int], box: Slices) -> Slices:
        """The part of the stored array that holds `box`, and little more.

        The first of the dimensions flattened together is cut as `box` is, the others are whole.
        """
        out = []
        for first, *rest in self.axes:
            step = math.prod(shape[d] for d in rest)
            out.append(slice(box[first].start * step, box[first].stop * step))
        last = out[-1]
        return (*out[:-1], slice(last.start * self.parts, last.stop * self.parts))

    def from_stored(self, array: np.ndarray, shape: Sequence[int], box: Slices) -> np.ndarray:
        """Turns what `stored_slices` cut out into our `box`; a view where it can be."""
        array = array[..., self.part :: self.parts]
        sizes, cut = [], [slice(None)] * len(shape)
        for first, *rest in self.axes:
            sizes += [box[first].stop - box[first].start, *(shape[d] for d in rest)]
            for d in rest:
                cut[d] = box[d]
        order = np.argsort([d for group in self.axes for d in group])
        array = array.reshape(sizes).transpose(order)
        if self.interleaved:
            array = array.take(self._halves(shape), axis=self.axes[0][-1])
        return array[tuple(cut)]

    def to_stored(self, array: np.ndarray) -> np.ndarray:
        """Turns a whole parameter of ours into its part of what the file holds."""
        if self.interleaved:
            array = array.take(np.argsort(self._halves(array.shape)), axis=self.axes[0][-1])
        order = [d for group in self.axes for d in group]
        return np.ascontiguousarray(array.transpose(order).reshape(self._flat_shape(array.shape)))

    def _halves(self, shape: Sequence[int]) -> np.ndarray:
        """The stored index of each of our indices, along the dimension with pairs."""
        size = shape[self.axes[0][-1]]
        first = size - (size if self.rotary is None else self.rotary)
        pairs = np.arange(first, size)
        return np.concatenate([np.arange(first), pairs[::2], pairs[1::2]])


def vector(name: str) -> Weight:
    """A norm's scale, stored as it is."""
    return Weight(name, ((0,),))


def heads_vector(name: str) -> Weight:
    """A bias [heads, head_dim], stored flat."""
    return Weight(name, ((0, 1),))


def rows(name: str) -> Weight:
    """A matrix stored as it is, such as an embedding."""
    return Weight(name, ((0,), (1,)))


def linear(name: str, interleaved: bool = False) -> Weight:
    """A matrix [in, out], stored [out, in] as torch's Linear does."""
    return Weight(name, ((1,), (0,)), interleaved=interleaved)


def to_heads(name: str, interleaved: bool = False) -> Weight:
    """A projection [in, heads, head_dim], stored [heads·head_dim, in]."""
    return Weight(name, ((1, 2), (0,)), interleaved=interleaved)


def from_heads(name: str) -> Weight:
    """A projection [heads, head_dim, out], stored [out, heads·head_dim]."""
    return Weight(name, ((2,), (0, 1)))


def all_experts(name: str, dims: int, part: int = 0, parts: int = 1) -> Weight:
    """A parameter of all experts in one array of `dims` dimensions, stored as it is."""
    return Weight(name, tuple((d,) for d in range(dims)), part, parts)


Table = Mapping[str, Weight]
"""Parameter -> where it is stored. Keys are paths of `declare`, `embed` and `norm` at the top and
`attention/q` within a layer; feed-forward parameters stand under `dense/` or `experts/`."""
