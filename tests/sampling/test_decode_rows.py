"""Rows of a chunk: few, and in blocks that share a prompt where that is free."""

import dataclasses

import numpy as np
import pytest

from rljax.sampling.decode_rows import Shapes, arrange, bucket, buckets
from rljax.sampling.params import SamplingParams
from rljax.sampling.scheduler import Group, Sequence

SHAPES = Shapes(slots=16, least_rows=2, share=4, page_size=4, most_pages=40)


def sequences(*sizes, length=9):
    params = SamplingParams(max_tokens=5)
    groups = [Group(i, np.arange(length)) for i in range(len(sizes))]
    return [
        Sequence(0, group, (0, group.index, 0, k), params, 5)
        for group, n in zip(groups, sizes, strict=True)
        for k in range(n)
    ]


@pytest.mark.parametrize(
    "least,most,growth", [(1, 16, 2), (3, 40, 4), (8, 8, 2), (4, 5, 2), (4, 64, 1.5)]
)
def test_every_bucket_is_listed_and_holds_what_it_should(least, most, growth):
    found = [bucket(n, least, most, growth) for n in range(1, most + 1)]
    assert sorted(set(found)) == buckets(least, most, growth)
    assert all(size >= n for n, size in enumerate(found, 1))


@pytest.mark.parametrize(
    "sizes,rows,shared",
    [
        ((4, 4, 4, 4), 16, True),
        ((4, 3), 8, True),
        ((3, 3, 3), 16, True),  # three blocks fit the 16 rows that nine sequences need anyway
        ((1, 1, 1, 1, 1, 1, 1), 8, False),  # seven blocks would need 28
        ((5,), 8, True),  # a block of four and one of one
        ((4,), 4, False),  # one block is all there is
        ((2,), 2, False),
    ],
)
def test_blocks_share_where_that_takes_no_more_rows(sizes, rows, shared):
    active = sequences(*sizes)
    found = arrange([active], SHAPES)
    assert (len(found.of_shard[0]), found.shared) == (rows, shared)
    assert {id(q) for _, _, q in found} == {id(q) for q in active}
    if shared:
        for start in range(0, rows, 4):
            block = found.of_shard[0][start : start + 4]
            assert len({id(q.group) for q in block if q is not None}) <= 1


def test_prompts_without_a_full_page_share_nothing():
    assert not arrange([sequences(4, 4, length=4)], SHAPES).shared


def test_all_shards_have_as_many_rows():
    found = arrange([sequences(4, 2), sequences(1), []], SHAPES)
    assert [len(rows) for rows in found.of_shard] == [8, 8, 8]


def test_every_shape_that_an_arrangement_takes_is_listed():
    every = set(SHAPES.every())
    for rows, own, shared in every:
        assert SHAPES.rows(rows) == rows and SHAPES.pages(own, rows) == own
        assert not shared or (SHAPES.can_share(rows) and SHAPES.shared_pages(shared) == shared)
    for own in range(1, SHAPES.most_pages + 1):
        for prompt in range(SHAPES.most_pages - own + 1):
            pages = SHAPES.shared_pages(prompt) if prompt else 0
            for rows in (8, 16):
                assert (rows, SHAPES.pages(own, rows), pages) in every


def test_where_steps_cost_what_tokens_cost_shapes_differ_in_rows_alone():
    shapes = dataclasses.replace(SHAPES, slots=64, share=1, exact=True)
    assert list(shapes.every()) == [(rows, 40, 0) for rows in (2, 3, 5, 8, 12, 18, 27, 41, 62, 64)]
    assert [shapes.pages(n, 8) for n in (1, 17, 40)] == [40, 40, 40]
    assert [shapes.fewer(n) for n in (2, 3, 64)] == [0, 2, 62]
    assert [SHAPES.fewer(n) for n in (2, 4, 16)] == [0, 2, 8]


def test_page_tables_are_padded_least_where_all_slots_are_busy():
    few, full = ({SHAPES.pages(n, rows) for n in range(1, 41)} for rows in (8, 16))
    assert few == {16, 32, 40} and full == {16, 24, 36, 40}
