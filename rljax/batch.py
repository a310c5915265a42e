"""The record that flows between sampling and training: `Batch`, one response a row, and `Rows`.

B counts responses, T tokens, R rows of the device. Every per-token field is aligned with
`tokens`: entry t speaks of the token at t given those before it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from rljax.errors import InputError
from rljax.packing import Layout, Lengths, fill, lay_out

_TOKEN, _RESPONSE = ("B", "T"), ("B",)

# Axes and kind of each field: 'int', 'bool' (or integers 0 and 1) or 'number'.
_BATCH_FIELDS: dict[str, tuple[tuple[str, ...], str]] = {
    "tokens": (_TOKEN, "int"),
    "mask": (_TOKEN, "bool"),
    "group": (_RESPONSE, "int"),
    "rewards": (_RESPONSE, "number"),
    "scores": (_RESPONSE, "number"),
    "score_components": (("B", "K"), "number"),
    "token_rewards": (_TOKEN, "number"),
    "valid": (_RESPONSE, "bool"),
    "completion_length": (_RESPONSE, "int"),
    "truncated": (_RESPONSE, "bool"),
    "positions": (_TOKEN, "int"),
    "segments": (_TOKEN, "int"),
    "rollout_logp": (_TOKEN, "number"),
    "old_logp": (_TOKEN, "number"),
    "old_entropy": (_TOKEN, "number"),
    "ref_logp": (_TOKEN, "number"),
    "teacher_logp": (_TOKEN, "number"),
    "values": (_TOKEN, "number"),
    "version": (_TOKEN, "int"),
    "bootstrap_value": (_RESPONSE, "number"),
    "routing": (("B", "T", "layers", "k"), "int"),
    "support": (("B", "T", "S"), "int"),
}
_ROW = ("R", "T")
_ROWS_FIELDS: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(("tokens", "positions", "segments", "sequence", "group"), (_ROW, "int")),
    **dict.fromkeys(("mask", "keep"), (_ROW, "bool")),
    **dict.fromkeys(("advantages", "weights", "token_weights", "correction"), (_ROW, "number")),
    **dict.fromkeys(("old_logp", "rollout_logp", "ref_logp", "teacher_logp"), (_ROW, "number")),
    **dict.fromkeys(("values", "returns", "old_entropy"), (_ROW, "number")),
    **dict.fromkeys(("prefix", "copies"), (_ROW, "int")),
    "routing": (("R", "T", "layers", "k"), "int"),
    "support": (("R", "T", "S"), "int"),
}
_KINDS = {
    "int": (jnp.integer,),
    "bool": (jnp.bool_, jnp.integer),
    "number": (jnp.number, jnp.bool_),
}


def _check(record: Any, fields: dict[str, tuple[tuple[str, ...], str]]) -> None:
    """Refuses fields whose axes or kind are wrong; sizes are those of `tokens`."""
    shape = jnp.shape(record.tokens)
    first, second = fields["tokens"][0]
    if len(shape) != 2:
        raise InputError(f"tokens must be [{first}, {second}], got shape {shape}: give two axes")
    sizes = {first: shape[0], second: shape[1]}
    for name, (axes, kind) in fields.items():
        value = getattr(record, name)
        if value is None:
            continue
        got = jnp.shape(value)
        fits = len(got) == len(axes) and all(
            size == sizes.get(axis, size) for axis, size in zip(axes, got, strict=True)
        )
        if not fits:
            expected = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
            raise InputError(
                f"{name} must be [{', '.join(axes)}] = ({expected}) like tokens, got {got}: "
                "give one entry for each"
            )
        dtype = jnp.result_type(value)
        if not any(jnp.issubdtype(dtype, allowed) for allowed in _KINDS[kind]):
            raise InputError(f"{name} must be of kind {kind}, got {dtype}: convert it")


class Batch(struct.PyTreeNode):
    """A rollout batch: B responses of at most T tokens, each right-padded after its prompt.

    Only `tokens`, `mask`, `group` and `rewards` are required.

    Attributes:
      tokens: Prompt then response, right-padded; int32 [B, T].
      mask: True on the policy's own response tokens; False on prompt, tool and observation
        tokens and on padding. It alone decides what trains; nothing is inferred from a padding id.
      group: Which prompt a response answers; any integers.
      rewards: Weighted sum of the reward functions, not yet shaped. NaN excludes the response.
      scores: The verifier's score; filters use it. None: the rewards.
      score_components: Each reward function apart.
      token_rewards: Per-token rewards; the response's reward is added at its last token.
      valid: False where scoring failed: excluded everywhere. None: all valid.
      completion_length: Tokens after the prompt, tool tokens included. None: `mask` summed.
      truncated: Cut off by the length limit, without an end token. None: none was.
      positions: Rotary positions. None: 0, 1, 2, ...
      segments: 1 on tokens, 0 on padding. None: up to the last token of the mask.
      rollout_logp: Log-probability (nats) by the policy that sampled: the behaviour policy.
      old_logp: Log-probability by the trainer at the start of the step: the proximal policy.
      old_entropy: Entropy (nats) of the same distribution as `old_logp`.
      ref_logp: Log-probability by the frozen reference.
      teacher_logp: Log-probability by a teacher.
      values: The critic's values before each token.
      version: The policy version that sampled each token.
      bootstrap_value: The critic's value after a truncated response.
      routing: Experts chosen at rollout, for replay; -1 where unset.
      support: int32 [B, T, S], the ids that were kept when each token was drawn, -1 where unset,
        for replay.
    """

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    group: Int[Array, " B"]
    rewards: Float[Array, " B"]
    scores: Float[Array, " B"] | None = None
    score_components: Float[Array, "B K"] | None = None
    token_rewards: Float[Array, "B T"] | None = None
    valid: Bool[Array, " B"] | None = None
    completion_length: Int[Array, " B"] | None = None
    truncated: Bool[Array, " B"] | None = None
    positions: Int[Array, "B T"] | None = None
    segments: Int[Array, "B T"] | None = None
    rollout_logp: Float[Array, "B T"] | None = None
    old_logp: Float[Array, "B T"] | None = None
    old_entropy: Float[Array, "B T"] | None = None
    ref_logp: Float[Array, "B T"] | None = None
    teacher_logp: Float[Array, "B T"] | None = None
    values: Float[Array, "B T"] | None = None
    version: Int[Array, "B T"] | None = None
    bootstrap_value: Float[Array, " B"] | None = None
    routing: Int[Array, "B T layers k"] | None = None
    support: Int[Array, "B T S"] | None = None

    def check(self) -> None:
        """Refuses fields whose axes disagree with `tokens`, or whose dtype is of the wrong kind.

        Raises:
          ValueError: The first such field, what it is and what it should be.
        """
        _check(self, _BATCH_FIELDS)


class Rows(struct.PyTreeNode):
    """What the device trains on: a batch with everything expanded to tokens, [R, T].

    Every array has the leading axis R, so cutting rows is
    `jax.tree.map(lambda x: x[index], rows)`. Unpacked, a row is a response; packed, several
    responses share one. The static fields say which, so that unpacked rows keep the cheap path.

    Attributes:
      tokens: int32 [R, T].
      mask: True on the policy's own tokens; structural, never changed.
      positions: Rotary positions.
      segments: 0 on padding, else the number of the response within its row, from 1.
      prefix: The segment that a position sees besides its own, where a prompt is shared; 0 for
        none. None: nowhere.
      copies: The responses that a position belongs to, 0 for padding: several for a shared prompt,
        which counts so often in the statistics of routers. None: one.
      sequence: The response each position belongs to, -1 for none.
      group: The prompt each position belongs to (0 .. B-1, in the order of the batch's group
        numbers), -1 for none.
      keep: Counts in the denominators. True over a whole kept response, its prompt included.
      advantages: A, without gradient.
      weights: w, fixed by the optimizer batch.
      token_weights: 1 over the kept tokens of the optimizer batch: the weight of entropy,
        critic and reported averages.
      correction: c, importance weights and rejections; multiplies the surrogate only.
      old_logp: By the proximal policy; None: the live policy is used (see `Objective.loss`).
      rollout_logp: By the behaviour policy.
      ref_logp: By the frozen reference.
      teacher_logp: By a teacher.
      values: The critic's values at the start of the step.
      returns: The critic's targets.
      old_entropy: Entropy (nats) at the start of the step.
      routing: Experts chosen at rollout, [R, T, layers, k]; -1 where unset.
      support: int32 [R, T, S], the ids that were kept when each token was drawn, -1 where unset.
      batch_stats: One mask for each batch-scoped term (see `Objective.with_batch_stats`).
      max_segments: Static: the most responses in a row; 1 means unpacked.
      context_axis: Static: the mesh axis over which T is cut inside `shard_map`, if any.
    """

    tokens: Int[Array, "R T"]
    mask: Bool[Array, "R T"]
    positions: Int[Array, "R T"]
    segments: Int[Array, "R T"]
    sequence: Int[Array, "R T"]
    group: Int[Array, "R T"]
    keep: Bool[Array, "R T"]
    advantages: Float[Array, "R T"]
    weights: Float[Array, "R T"]
    token_weights: Float[Array, "R T"]
    correction: Float[Array, "R T"]
    old_logp: Float[Array, "R T"] | None = None
    rollout_logp: Float[Array, "R T"] | None = None
    ref_logp: Float[Array, "R T"] | None = None
    teacher_logp: Float[Array, "R T"] | None = None
    values: Float[Array, "R T"] | None = None
    returns: Float[Array, "R T"] | None = None
    old_entropy: Float[Array, "R T"] | None = None
    routing: Int[Array, "R T layers k"] | None = None
    support: Int[Array, "R T S"] | None = None
    prefix: Int[Array, "R T"] | None = None
    copies: Int[Array, "R T"] | None = None
    batch_stats: tuple[Bool[Array, "R T"], ...] = ()
    max_segments: int = struct.field(pytree_node=False, default=1)
    context_axis: str | None = struct.field(pytree_node=False, default=None)

    def check(self) -> None:
        """Refuses fields whose axes disagree with `tokens`, or whose dtype is of the wrong kind.

        Raises:
          ValueError: The first such field, what it is and what it should be.
        """
        _check(self, _ROWS_FIELDS)

    @property
    def packed(self) -> bool:
        """Whether several responses may share a row."""
        return self.max_segments > 1

    @property
    def trains(self) -> Bool[Array, ""]:
        """Whether any token trains; where none does, the optimizer step is to be skipped."""
        return (self.mask & self.keep).any()

    def take(self, index: Int[Array, " n"]) -> "Rows":
        """Cuts rows, keeping their weights: a micro-batch.

        Args:
          index: Which rows, int [n].

        Returns:
          Those rows; adding a loss over such cuts gives the loss of the whole.
        """
        return jax.tree.map(lambda leaf: leaf[index], self)

    def pack(
        self,
        row_length: int,
        num_rows: int | None = None,
        max_segments: int | None = None,
        *,
        group_size: int = 1,
    ) -> "Rows":
        """Lays several responses into each row, longest first into the fullest row that it fits in.

        Runs on the host. Padding is dropped, so a response needs only its own length.

        Args:
          row_length: Tokens in a packed row.
          num_rows: Rows to give back, so that shapes do not vary; None: as many as needed.
          max_segments: The static bound on segments of a row: responses, and prompts where they are
            shared; None: the next power of two of what occurs. Fix it, with num_rows, to keep one
            compiled shape.
          group_size: Above 1, so many consecutive responses share a prompt: it is laid out once in
            each row that holds any of them, and whole groups stay together where they fit.

        Returns:
          The same tokens with the same per-token fields, as packed Rows.

        Raises:
          ValueError: A response is longer than row_length, or the bounds are too small, or the
            rows are packed already.
        """
        if self.packed:
            raise InputError("rows are packed already: pack the rows that prepare gave")
        lengths = self._lengths(group_size)
        bins = fill(lengths, row_length)
        assert bins is not None  # without a bound on their number
        most = bins.most
        total = len(bins.rows) if num_rows is None else num_rows
        bound = max(2, 1 << (most - 1).bit_length()) if max_segments is None else max_segments
        if len(bins.rows) > total or most > bound or bound < 2:
            raise InputError(
                f"packing needs {len(bins.rows)} rows of up to {most} responses, got "
                f"num_rows={num_rows}, max_segments={max_segments}: raise them "
                "(max_segments is at least 2)"
            )
        return self.lay_out(lay_out(bins, lengths, (total, row_length), bound))

    def _lengths(self, group_size: int) -> Lengths:
        """The lengths of unpacked rows, on the host; a response begins at its first own token."""
        present, mask = np.asarray(self.segments) > 0, np.asarray(self.mask)
        if present.shape[0] % group_size:
            raise InputError(
                f"group_size={group_size} does not divide {len(present)} rows: give whole groups"
            )
        columns = np.arange(1, present.shape[1] + 1)
        totals = np.where(present, columns, 0).max(1)
        prompts = np.where(mask.any(1), mask.argmax(1), totals)
        return Lengths(prompts, totals, group_size)

    def lay_out(self, layout: Layout) -> "Rows":
        """Lays unpacked rows out as planned; jit-compatible.

        Args:
          layout: The plan, made of their lengths.

        Returns:
          The same tokens with the same per-token fields, as packed Rows.
        """
        places = layout.places()
        own = {"sequence": -1, "group": -1, "keep": False, "support": -1}
        laid = {
            name: places.take(value, empty, prompts=False)
            for name, empty in own.items()
            if (value := getattr(self, name)) is not None
        }
        if self.routing is not None:
            laid["routing"] = places.take(self.routing, -1)
        rest = self.replace(**dict.fromkeys(laid))
        return jax.tree.map(places.take, rest).replace(
            **laid,
            segments=places.segments,
            prefix=places.prefix,
            copies=places.copies,
            max_segments=layout.max_segments,
        )
