"""The record that flows between sampling and training: `Batch`, one response a row, and `Rows`.

B counts responses, T tokens, R rows of the device. Every per-token field is aligned with
`tokens`: entry t speaks of the token at t given those before it.
"""

import bisect

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from rljax.errors import InputError

_PER_TOKEN = (
    "mask",
    "positions",
    "segments",
    "token_rewards",
    "rollout_logp",
    "old_logp",
    "old_entropy",
    "ref_logp",
    "teacher_logp",
    "values",
    "version",
    "routing",
)
_PER_RESPONSE = (
    "group",
    "rewards",
    "scores",
    "score_components",
    "valid",
    "completion_length",
    "truncated",
    "bootstrap_value",
)


class Batch(struct.PyTreeNode):
    """A rollout batch: B responses of at most T tokens, each right-padded after its prompt.

    Only `tokens`, `mask`, `group` and `rewards` are required.

    Attributes:
      tokens: Prompt then response, right-padded; int32 [B, T].
      mask: True on the policy's own response tokens; False on prompt, tool and observation
        tokens and on padding. It alone says what trains: no field is rebuilt from a pad id.
      group: Which prompt a response answers; any integers.
      rewards: Weighted sum of the reward functions, not yet shaped. NaN excludes the response.
      scores: What the verifier said; filters look at this. None: the rewards.
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
        """Refuses fields whose shapes disagree with `tokens`.

        Raises:
          ValueError: The first such field, its shape and the shape it should have.
        """
        shape = jnp.shape(self.tokens)
        if len(shape) != 2:
            raise InputError(f"tokens must be [B, T], got shape {shape}: add the missing axis")
        for names, expected, layout in (
            (_PER_TOKEN, shape, "[B, T]"),
            (_PER_RESPONSE, shape[:1], "[B]"),
        ):
            for name in names:
                value = getattr(self, name)
                got = None if value is None else jnp.shape(value)
                if got is not None and got[: len(expected)] != expected:
                    raise InputError(
                        f"{name} must start with {layout} = {expected} like tokens, got {got}: "
                        "give one entry for each"
                    )


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
      sequence: The response each position belongs to, -1 for none.
      group: The prompt each position belongs to (0 .. B-1, in the order of the batch's group
        numbers), -1 for none.
      keep: Counts in the denominators. True over a whole kept response, its prompt included.
      advantages: A, without gradient.
      weights: w, fixed by the optimizer batch.
      token_weights: 1 over the kept tokens of the optimizer batch: the weight of entropy,
        critic and reported averages.
      correction: c, importance weights and rejections; multiplies the surrogate only.
      old_logp: By the proximal policy; None: the live policy stands in (see `Objective.loss`).
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
    batch_stats: tuple[Bool[Array, "R T"], ...] = ()
    max_segments: int = struct.field(pytree_node=False, default=1)
    context_axis: str | None = struct.field(pytree_node=False, default=None)

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
        self, row_length: int, num_rows: int | None = None, max_segments: int | None = None
    ) -> "Rows":
        """Lays several responses into each row, longest first into the fullest row that holds it.

        Runs on the host. Padding is dropped, so a response needs only its own length.

        Args:
          row_length: Tokens in a packed row.
          num_rows: Rows to give back, so that shapes do not vary; None: as many as needed.
          max_segments: The static bound on responses in a row; None: the next power of two of
            what occurs. Fix it, with num_rows, to keep one compiled shape.

        Returns:
          The same tokens with the same per-token fields, as packed Rows.

        Raises:
          ValueError: A response is longer than row_length, or the bounds are too small, or the
            rows are packed already.
        """
        if self.packed:
            raise InputError("rows are packed already: pack the rows that prepare gave")
        present = np.asarray(self.segments) > 0
        columns = np.arange(present.shape[1])
        lengths = np.where(present.any(1), np.where(present, columns, -1).max(1) + 1, 0)
        if lengths.max(initial=0) > row_length:
            raise InputError(
                f"row_length must hold the longest response, got {row_length} for "
                f"{lengths.max()} tokens: raise row_length"
            )
        bins = _best_fit(lengths, row_length)
        most = max((len(members) for members in bins), default=1)
        total = len(bins) if num_rows is None else num_rows
        bound = max(2, 1 << (most - 1).bit_length()) if max_segments is None else max_segments
        if len(bins) > total or most > bound or bound < 2:
            raise InputError(
                f"packing needs {len(bins)} rows of up to {most} responses, got "
                f"num_rows={num_rows}, max_segments={max_segments}: raise them "
                "(max_segments is at least 2)"
            )
        source_row = np.zeros((total, row_length), np.int32)
        source_column = np.zeros((total, row_length), np.int32)
        segments = np.zeros((total, row_length), np.int32)
        for row, members in enumerate(bins):
            start = 0
            for number, member in enumerate(members, start=1):
                span = slice(start, start + lengths[member])
                source_row[row, span] = member
                source_column[row, span] = columns[: lengths[member]]
                segments[row, span] = number
                start += lengths[member]
        filled = segments > 0

        def gather(leaf: Array, empty: float = 0) -> Array:
            taken = jnp.asarray(leaf)[source_row, source_column]
            shape = filled.shape + (1,) * (taken.ndim - 2)
            return jnp.where(filled.reshape(shape), taken, jnp.asarray(empty, taken.dtype))

        packed = jax.tree.map(gather, self)
        return packed.replace(
            segments=jnp.asarray(segments),
            sequence=gather(self.sequence, -1),
            group=gather(self.group, -1),
            routing=None if self.routing is None else gather(self.routing, -1),
            support=None if self.support is None else gather(self.support, -1),
            max_segments=bound,
        )


def _best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Best-fit decreasing: each response into the fullest row that still holds it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for member in np.argsort(-lengths, kind="stable"):
        length = int(lengths[member])
        if length == 0:
            continue
        place = bisect.bisect_left(room, (length, -1))
        if place == len(room):
            free, chosen = capacity, len(bins)
            bins.append([])
        else:
            free, chosen = room.pop(place)
        bins[chosen].append(int(member))
        bisect.insort(room, (free - length, chosen))
    return bins
