"""Inside `shard_map`: what a result varies over, where JAX cannot know."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array


def vary_as(like: Any, y: Array) -> Array:
    """Declares that y, computed from a pytree's arrays, varies over the mesh axes of them all."""
    own = jax.typeof(y).manual_axis_type.varying
    found = {a for x in jax.tree.leaves(like) for a in jax.typeof(x).manual_axis_type.varying}
    axes = tuple(sorted(found - set(own)))
    return jax.lax.pcast(y, axes, to="varying") if axes else y
