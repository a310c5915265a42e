"""Log-probability and entropy of tokens from hidden states, without the logits of all of them.

`logprobs` gives them; `statistics_of` gives what they are made of, which adds up over slices of a
vocabulary that is split over devices (`merged`). `OPERATION.choose` picks the implementation.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from rljax_kernels import triton_tools
from rljax_kernels.logprobs import chunked, pallas_tpu, reference, triton
from rljax_kernels.logprobs.statistics import Options, Statistics, merged
from rljax_kernels.registry import PLATFORMS, Implementation, Operation

__all__ = ["OPERATION", "Asked", "Options", "Statistics", "logprobs", "merged", "statistics_of"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a call of `statistics_of` asks for, all of it static.

    Attributes:
      dtype: Of hidden states, and of the products.
      tokens: N.
      hidden_size: D.
      vocab_size: V, of this device's slice.
      picked: n, ids of each token whose logits are returned.
      tied: Whether the matrix is an embedding [V, D].
      num_tokens: Ids from this one on have no token; None: all have one.
    """

    dtype: str
    tokens: int
    hidden_size: int
    vocab_size: int
    picked: int = 1
    tied: bool = False
    num_tokens: int | None = None


OPERATION = Operation(
    "logprobs",
    (
        Implementation(
            "triton",
            ("gpu",),
            triton.run,
            triton.refuses,
            triton_tools.missing,
            triton.defers,
            source="our own kernels",
        ),
        Implementation(
            "pallas",
            ("tpu",),
            pallas_tpu.run,
            pallas_tpu.refuses,
            source="Pallas, kernels/logprobs/pallas_tpu.py",
        ),
        Implementation("chunked", PLATFORMS, chunked.run, source="plain JAX"),
        Implementation("reference", PLATFORMS, reference.run, source="plain JAX"),
    ),
    reference="reference",
)
"""The ways to compute log-probabilities, in the order in which they are preferred."""


def logprobs(
    hidden: Float[Array, "N D"],
    matrix: Float[Array, "_ _"],
    targets: Int[Array, " N"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    tied: bool = False,
    num_tokens: int | None = None,
    chunk: int = 1024,
    backend: str = "auto",
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """The log-probability of each target, and the entropy of the distribution that it is of.

    Args:
      hidden: Final hidden states.
      matrix: The output matrix [D, V], or the embedding [V, D].
      targets: Token ids.
      temperature: Divides the logits; it has no gradient.
      tied: Whether the matrix is an embedding.
      num_tokens: Ids from this one on have no token and are never predicted; None: all have one.
      chunk: Tokens whose logits may exist at a time, where the implementation forms logits.
      backend: The name of an implementation, or `auto`.

    Returns:
      Log-probabilities and entropies, float32, in nats; both have gradients.

    Raises:
      ValueError: As `statistics_of`.
    """
    found = statistics_of(
        hidden,
        matrix,
        targets[:, None],
        temperature=temperature,
        tied=tied,
        num_tokens=num_tokens,
        chunk=chunk,
        backend=backend,
    )
    return found.picked[:, 0] - found.lse, found.lse - found.mean


def statistics_of(
    hidden: Float[Array, "N D"],
    matrix: Float[Array, "_ _"],
    ids: Int[Array, "N n"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    first: int | Int[Array, ""] = 0,
    tied: bool = False,
    num_tokens: int | None = None,
    chunk: int = 1024,
    backend: str = "auto",
) -> Statistics:
    """Statistics of the logits of each token; log-probability is `picked - lse`.

    The logits are `hidden @ matrix / temperature` in float32, of operands in hidden's dtype. The
    entropy is `lse - mean`. All have gradients; those of logits are rounded to hidden's dtype.

    Args:
      hidden: Final hidden states.
      matrix: The output matrix [D, V], or the embedding [V, D], of any dtype.
      ids: Token ids whose logits are wanted, -1 where unset.
      temperature: Divides the logits; it has no gradient.
      first: The id of the first entry of this slice of the vocabulary.
      tied: Whether the matrix is an embedding.
      num_tokens: Ids from this one on have no token and count for nothing; None: all have one.
      chunk: Tokens whose logits may exist at a time, where the implementation forms logits.
      backend: The name of an implementation, or `auto`.

    Raises:
      ValueError: Shapes do not agree, or the backend is unknown, or does not compute this here.
    """
    size = hidden.shape[1]
    if matrix.ndim != 2 or matrix.shape[1 if tied else 0] != size:
        raise ValueError(
            f"logprobs needs a matrix {'[V, D]' if tied else '[D, V]'} with D={size}, got "
            f"{matrix.shape}; check tied={tied}"
        )
    options = Options(tied, num_tokens, chunk)
    asked = Asked(
        dtype=jnp.dtype(hidden.dtype).name,
        tokens=hidden.shape[0],
        hidden_size=size,
        vocab_size=options.vocabulary(matrix),
        picked=ids.shape[1],
        tied=tied,
        num_tokens=num_tokens,
    )
    run = OPERATION.choose(backend, asked).run
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    return run(hidden, matrix, ids, temperature, jnp.asarray(first, jnp.int32), options)
