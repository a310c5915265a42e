"""Log-probabilities and entropies of tokens, never holding the logits of all of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int
from rljax_kernels import logprobs as kernels

from rljax.errors import InputError
from rljax.mesh import BATCH_AXES, axes_of, fit, map_shards, split, varies, vary_alike
from rljax.models.attention import full_attention
from rljax.models.config import ModelConfig
from rljax.models.forward import EMBED_AXES, hidden_states, output_logits
from rljax.models.layers import enter, gather_part
from rljax.models.mixture import RouterInputs, RouterOutputs
from rljax.models.parameters import Params


@struct.dataclass
class Inputs:
    """Rows of tokens and what is known of them.

    Attributes:
      tokens: Token ids.
      positions: Rotary positions; None: each segment counts from 0.
      segments: Packed sequences by number, at most T, 0 for padding; None: a row is one sequence.
      prefix: The segment that a position sees besides its own, 0 for none: a prompt that several
        responses of its row share. Their first tokens are scored given its last. None: no prefixes.
      routing: Experts to replay, -1 where unset; None: the routers' own.
      support: Ids that the sampler kept when it drew each token, -1 where unset: probabilities are
        those among them. A token with none, and every token where this is None, is scored among
        the whole vocabulary.
      copies: How often each position counts in the routers' statistics; None: once, padding not.
      packed: Static: whether a row may hold several segments, or padding elsewhere than at its end.
        False lets attention take implementations for rows of one sequence.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"] | None = None
    segments: Int[Array, "B T"] | None = None
    prefix: Int[Array, "B T"] | None = None
    routing: Int[Array, "B T layers k"] | None = None
    support: Int[Array, "B T S"] | None = None
    copies: Int[Array, "B T"] | None = None
    packed: bool = struct.field(pytree_node=False, default=True)

    def places(self) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
        """Positions and segments, with their defaults."""
        positions, segments = self.positions, self.segments
        if segments is None:
            segments = jnp.ones(self.tokens.shape, jnp.int32)
        if positions is None:
            # Each segment counts from 0, wherever in the row it begins.
            row = jnp.arange(self.tokens.shape[1])
            starts = jnp.concatenate(
                [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1
            )
            positions = row - jax.lax.cummax(jnp.where(starts, row, 0), axis=1)
        return positions, segments


def logits(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T V"]:
    """All logits, for small uses; `token_logprobs` never holds as much.

    Args:
      params: The parameters.
      config: The model.
      tokens: Token ids.
      positions: Rotary positions; by default each segment counts from 0.
      segments: Packed sequences by number, 0 for padding; by default a row is one sequence.

    Returns:
      float32 logits of the token after each position.
    """
    positions, segments = Inputs(tokens, positions, segments).places()
    attend = full_attention(positions, segments, backend=config.attention_backend)
    hidden, _, _ = hidden_states(params, config, tokens, positions, attend)
    return output_logits(params, config, hidden)


def token_logprobs(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    *,
    temperature: float = 1.0,
    routing: Int[Array, "B T layers k"] | None = None,
    chunk: int = 1024,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability and entropy at every token, never holding [B, T, V].

    Args:
      params: The parameters.
      config: The model.
      tokens: Token ids.
      positions: Rotary positions; by default each segment counts from 0.
      segments: Packed sequences by number, 0 for padding; by default a row is one sequence.
      temperature: Divides the logits, as in sampling.
      routing: Experts to replay, -1 where unset.
      chunk: Tokens whose logits a device holds at a time, if its backend forms logits.

    Returns:
      logp: float32; entry t is the log-probability of the token at t given those before it in its
        segment, 0 for the first.
      entropy: float32, nats; of the distribution that the token at t was drawn from.

    Raises:
      InputError: The temperature is not above 0.
    """
    inputs = Inputs(tokens, positions, segments, routing=routing)
    return score_tokens(params, config, inputs, temperature=temperature, chunk=chunk)[:2]


def score_tokens(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    *,
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 1024,
    score_mask: Bool[Array, "B T"] | None = None,
    max_scored_tokens: int | None = None,
    load: Float[Array, "layers E"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], RouterOutputs | None]:
    """`token_logprobs` of chosen tokens, with what the routers did.

    Args:
      params: The parameters.
      config: The model.
      inputs: Tokens, and what is known of them.
      temperature: Divides the logits.
      chunk: Tokens whose logits a device holds at a time, if its backend forms logits.
      score_mask: The tokens to score; others get 0. All but the first of a segment by default.
      max_scored_tokens: A bound on the scored tokens of a row. Logits are then formed for that
        many tokens a row, which saves most of the output matmul where prompts are long. Tokens
        past the bound get NaN. Not used on a mesh with a context axis.
      load: As in `RouterInputs`, for the routers' load-balancing loss.

    Returns:
      logp, entropy, and the routers' outputs (None for a dense model).

    Raises:
      InputError: The temperature is not above 0.
    """
    if isinstance(temperature, int | float) and not temperature > 0:
        raise InputError(
            f"temperature={temperature} must be above 0: greedy decoding has no log-probabilities"
        )
    tokens, support = inputs.tokens, inputs.support
    before, follows, router = states_before(params, config, inputs, load)
    keep = follows if score_mask is None else follows & score_mask
    rows = jnp.arange(tokens.shape[0])[:, None]
    # Over `context` each device scores what it holds: the scored tokens may all lie on one of them.
    if (
        max_scored_tokens is not None
        and max_scored_tokens < tokens.shape[1]
        and not split("context")
    ):
        # The scored places first, in order; the rest of the bound is filled with others.
        place = jnp.argsort(~keep, axis=1, stable=True)[:, :max_scored_tokens]
        kept = None if support is None else support[rows, place]
        logp, entropy = _score(
            params, config, before[rows, place], tokens[rows, place], temperature, chunk, kept
        )
        # A row with more scored tokens than the bound shows it, as NaN.
        unknown = jnp.full(tokens.shape, jnp.nan, jnp.float32)
        logp = unknown.at[rows, place].set(logp)
        entropy = unknown.at[rows, place].set(entropy)
    else:
        logp, entropy = _score(params, config, before, tokens, temperature, chunk, support)
    return jnp.where(keep, logp, 0.0), jnp.where(keep, entropy, 0.0), router


def states_before(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    load: Float[Array, "layers E"] | None = None,
) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"], RouterOutputs | None]:
    """Final hidden states in which each token was chosen: what policy and critic both read.

    Arguments as in `score_tokens`. Returns the states, whether each token has one, and the
    routers' outputs (None for a dense model).
    """
    positions, segments = inputs.places()
    packed = inputs.packed and inputs.segments is not None
    hidden, _, router = hidden_states(
        params,
        config,
        inputs.tokens,
        positions,
        full_attention(positions, segments, inputs.prefix, config.attention_backend, packed),
        counted=segments > 0 if inputs.copies is None else inputs.copies,
        routers=RouterInputs(inputs.routing, load),
    )
    return *preceding(hidden, segments, inputs.prefix), router


def preceding(
    hidden: Float[Array, "B T D"],
    segments: Int[Array, "B T"],
    prefix: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"]]:
    """The hidden state that each token was predicted from, and whether there is one.

    It is the one before it in its segment; for the first of a segment the last of its prefix.
    """
    follows = jnp.pad(
        (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), ((0, 0), (1, 0))
    )
    before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    if prefix is None:
        return before, follows
    # The last place of each segment, by its number.
    rows, length = segments.shape
    row, place = jnp.arange(rows)[:, None], jnp.arange(length, dtype=jnp.int32)
    ends = jnp.full((rows, length + 1), -1).at[row, jnp.clip(segments, 0, length)].max(place)
    ends = ends[row, jnp.clip(prefix, 0, length)]
    first = ~follows & (prefix > 0) & (ends >= 0)
    last = jnp.take_along_axis(hidden, jnp.maximum(ends, 0)[..., None], axis=1)
    return jnp.where(first[..., None], last, before), follows | first


def _score(
    params: Params,
    config: ModelConfig,
    hidden: Array,
    targets: Array,
    temperature: float | Array,
    chunk: int,
    support: Array | None,
) -> tuple[Array, Array]:
    """Log-probability and entropy of each target, never holding the logits of all.

    Each device works on its own tokens, and over `tensor` on its own slice of the vocabulary.
    `support` holds the ids that each target was drawn among, as in `Inputs`.
    """
    name, axes = ("embed", EMBED_AXES) if config.tie_embeddings else ("output", EMBED_AXES[::-1])
    rows = fit(hidden.shape, BATCH_AXES, "context")
    laid, parted = enter(params[name], axes, axes_of(rows))
    local = functools.partial(_score_part, config=config, chunk=chunk, parted=parted)
    with jax.named_scope("logprobs"):
        return map_shards(local, ({name: laid}, rows, rows, rows, P()), (rows, rows))(
            {name: params[name]}, hidden, targets, support, jnp.float32(temperature)
        )


def _score_part(
    params: Params,
    hidden: Array,
    targets: Array,
    support: Array | None,
    temperature: Array,
    *,
    config: ModelConfig,
    chunk: int,
    parted: int | None,
) -> tuple[Array, Array]:
    """`_score` of one device."""
    (name, matrix) = next(iter(params.items()))
    sliced = varies(matrix, "tensor")
    matrix, hidden = vary_alike((gather_part(matrix, hidden, parted), hidden))
    tied = name == "embed"
    size = matrix.shape[0 if tied else 1]
    ids = targets[..., None]
    if support is not None:
        ids = jnp.concatenate([ids, support], axis=-1)
    try:
        found = kernels.statistics_of(
            hidden.reshape(-1, hidden.shape[-1]),
            matrix,
            ids.reshape(-1, ids.shape[-1]),
            temperature=temperature,
            first=jax.lax.axis_index("tensor") * size if sliced else 0,
            tied=tied,
            num_tokens=config.num_tokens,
            chunk=chunk,
            backend=config.logprob_backend,
        )
    except ValueError as e:
        raise InputError(f"logprob_backend={config.logprob_backend!r}: {e}") from e
    if sliced:
        found = kernels.merged(found, "tensor")
    lse, entropy = found.lse, found.lse - found.mean
    logp = found.picked[:, 0] - lse
    if support is not None:
        inside = support.reshape(-1, support.shape[-1]) >= 0
        logp, entropy = _among(found.picked - lse[:, None], inside, logp, entropy)
    return logp.reshape(targets.shape), entropy.reshape(targets.shape)


def _among(picked: Array, inside: Array, logp: Array, entropy: Array) -> tuple[Array, Array]:
    """Log-probability and entropy among the kept ids, or as given where there are none.

    Args:
      picked: [N, 1 + S], log-probabilities of the token and of the kept ids.
      inside: [N, S], which of those are set.
      logp: [N], among the whole vocabulary.
      entropy: [N], likewise.
    """
    own, among = picked[:, 0], picked[:, 1:]
    some = inside.any(-1)
    among = jnp.where(inside, among, jnp.where(some[..., None], -jnp.inf, 0.0))
    each = jax.nn.log_softmax(among, axis=-1)
    own = own - jax.nn.logsumexp(among, axis=-1)
    nats = -jnp.sum(jnp.where(inside, jnp.exp(each) * jnp.where(inside, each, 0.0), 0.0), axis=-1)
    return jnp.where(some, own, logp), jnp.where(some, nats, entropy)
