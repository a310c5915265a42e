"""Rotary position embeddings, plain and stretched."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.models.config import RopeScaling, Yarn


def rope_frequencies(
    dim: int, theta: float, scaling: RopeScaling | Yarn | None = None
) -> Float[Array, " half"]:
    """Inverse frequencies of the rotary embedding of `dim` numbers, stretched by `scaling`."""
    inverse = 1.0 / theta ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if isinstance(scaling, RopeScaling):
        return _llama3(inverse, scaling)
    if isinstance(scaling, Yarn):
        return _yarn(inverse, dim, theta, scaling)
    return inverse


def _llama3(inverse: Array, s: RopeScaling) -> Array:
    wavelength = 2 * jnp.pi / inverse
    ratio = s.original_max_position / wavelength
    smooth = (ratio - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * inverse / s.factor + smooth * inverse


def _yarn(inverse: Array, dim: int, theta: float, s: Yarn) -> Array:
    def index(rotations: float) -> float:
        """Which frequency turns so often over the original context."""
        wavelength = s.original_max_position / rotations
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = index(s.beta_fast), index(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (jnp.arange(dim // 2, dtype=jnp.float32) - low) / max(high - low, 0.001)
    slow = jnp.clip(ramp, 0.0, 1.0)
    return slow * inverse / s.factor + (1 - slow) * inverse


def rotate(x: Array, positions: Array, inverse: Array, magnitude: float = 1.0) -> Array:
    """Applies rotary embeddings (Su et al., 2021) to [B, T, heads, d], halves apart."""
    angle = positions[..., None, None].astype(jnp.float32) * inverse
    cos, sin = jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    y = x.astype(jnp.float32)
    return (y * cos + jnp.roll(y, y.shape[-1] // 2, axis=-1) * sin).astype(x.dtype)
