"""Batch and Rows: shapes are checked, rows are cut and packed without changing a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.batch import Batch


@pytest.fixture(scope="module")
def rows():
    lengths = np.array([5, 2, 3, 7, 1, 4])
    prompt = 2
    columns = np.arange(12)
    key = jax.random.key(0)
    batch = Batch(
        tokens=jax.random.randint(key, (6, 12), 0, 50),
        mask=jnp.asarray((columns >= prompt) & (columns < prompt + lengths[:, None])),
        group=jnp.asarray([7, 7, 7, -3, -3, -3]),
        rewards=jnp.asarray([1.0, 0, 0, 1, 1, 0]),
        old_logp=-jax.random.uniform(key, (6, 12)),
        routing=jnp.arange(6 * 12 * 2 * 2).reshape(6, 12, 2, 2),
    )
    return L.grpo(beta=0.0).prepare(batch)[0]


def by_response(rows):
    """Each response's tokens with every field, whatever row they lie in."""
    found = {}
    sequence = np.asarray(rows.sequence)
    for row, column in zip(*np.nonzero(sequence >= 0), strict=True):
        found.setdefault(int(sequence[row, column]), []).append(
            jax.tree.map(lambda leaf: np.asarray(leaf)[row, column].tolist(), fields(rows))  # noqa: B023
        )
    return found


def fields(rows):
    names = ("tokens", "mask", "positions", "group", "keep", "advantages", "weights")
    return {name: getattr(rows, name) for name in (*names, "old_logp", "correction", "routing")}


def test_packing_keeps_every_token_with_its_fields(rows):
    packed = rows.pack(12)
    assert packed.packed and not rows.packed
    assert packed.tokens.shape[0] < rows.tokens.shape[0]
    assert by_response(packed) == by_response(rows)


def test_packed_padding_is_empty(rows):
    packed = rows.pack(13, num_rows=5, max_segments=6)
    padding = np.asarray(packed.segments) == 0
    assert packed.tokens.shape == (5, 13) and packed.max_segments == 6
    assert padding.any()
    assert not np.asarray(packed.mask)[padding].any()
    assert (np.asarray(packed.sequence)[padding] == -1).all()
    assert (np.asarray(packed.routing)[padding] == -1).all()


def test_segments_number_the_responses_of_a_row(rows):
    packed = rows.pack(12)
    for segments, sequence in zip(
        np.asarray(packed.segments), np.asarray(packed.sequence), strict=True
    ):
        pairs = {(s, q) for s, q in zip(segments, sequence, strict=True) if s > 0}
        assert sorted(s for s, _ in pairs) == list(range(1, len(pairs) + 1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"row_length": 8}, "row_length must hold the longest response, got 8 for 9"),
        ({"row_length": 12, "num_rows": 1}, "num_rows=1"),
        ({"row_length": 40, "max_segments": 2}, "max_segments=2"),
    ],
)
def test_packing_that_cannot_hold_is_refused(rows, arguments, words):
    with pytest.raises(ValueError, match=words):
        rows.pack(**arguments)


def test_packing_twice_is_refused(rows):
    with pytest.raises(ValueError, match="packed already"):
        rows.pack(12).pack(12)


def test_every_leaf_is_cut_by_rows(rows):
    cut = jax.tree.map(lambda leaf: leaf[jnp.array([3, 1])], rows)
    assert cut.routing.shape == (2, 12, 2, 2)
    np.testing.assert_array_equal(cut.sequence[0], rows.sequence[3])
    assert jax.tree.all(jax.tree.map(np.array_equal, cut, rows.take(jnp.array([3, 1]))))


@pytest.mark.parametrize("field", ["old_logp", "group", "valid", "version"])
def test_a_misshapen_field_is_named(rows, field):
    batch = Batch(
        tokens=jnp.zeros((2, 3), jnp.int32),
        mask=jnp.ones((2, 3), bool),
        group=jnp.zeros(2, jnp.int32),
        rewards=jnp.zeros(2),
    )
    with pytest.raises(ValueError, match=rf"^{field} must be"):
        L.grpo(beta=0.0).prepare(batch.replace(**{field: jnp.zeros((3, 2))}))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("mask", np.ones((2, 3, 1), bool), r"mask must be \[B, T\] = \(2, 3\) like tokens"),
        ("support", np.zeros((2, 3), np.int32), r"support must be \[B, T, S\] = \(2, 3, S\)"),
        ("support", np.zeros((2, 4, 5), np.int32), "support must be"),
        ("score_components", np.zeros(2), "score_components must be"),
        ("tokens", np.zeros((2, 3)), "tokens must be of kind int, got float"),
        ("mask", np.ones((2, 3)), "mask must be of kind bool, got float"),
        ("group", np.zeros(2), "group must be of kind int, got float"),
    ],
)
def test_ranks_and_kinds_of_a_batch_are_checked(field, value, said):
    batch = Batch(
        tokens=np.zeros((2, 3), np.int32),
        mask=np.ones((2, 3), bool),
        group=np.zeros(2, np.int32),
        rewards=np.zeros(2, np.float32),
    )
    batch.check()
    with pytest.raises(ValueError, match=said):
        batch.replace(**{field: value}).check()


def test_rows_are_checked_by_the_loss(rows):
    logp = rows.old_logp
    for field, value in (
        ("support", jnp.zeros((6, 12), jnp.int32)),
        ("mask", rows.mask[..., None]),
        ("advantages", rows.advantages[:, :1]),
        ("weights", rows.mask[:3] * 1.0),
    ):
        with pytest.raises(ValueError, match=f"^{field} must be"):
            L.grpo(beta=0.0).loss(logp, rows.replace(**{field: value}))
