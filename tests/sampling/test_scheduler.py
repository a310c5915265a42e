"""The schedule, on a fake device whose pages hold token ids, which each step checks."""

import collections
import math
import zlib

import jax
import numpy as np
import pytest

from rljax import mesh as meshes
from rljax import models
from rljax.sampling import Engine, SamplingParams
from rljax.sampling.decode import DecodeCarry, DecodeOutput

CONFIG = models.decoder(
    vocab_size=32, hidden_size=8, num_layers=1, num_heads=1, head_dim=8, intermediate_size=8
)
END = 1
PAGE, CHUNK = 4, 3


def token_at(ids, position):
    """What the fake device draws: like the true one, it depends on key and position alone."""
    return zlib.crc32(np.asarray([*ids, position], np.int64).tobytes()) % 12


def answer(ids, prompt_length, limit):
    """The whole response that a key stands for."""
    tokens = []
    while len(tokens) < limit and (not tokens or tokens[-1] != END):
        tokens.append(token_at(ids, prompt_length + len(tokens)))
    return tokens


class Device:
    """Stands in for the engine's programs: pages hold token ids, and each step checks them."""

    def __init__(self, engine):
        sizes = engine.runner.sizes
        self.shards, self.page = sizes.shards, sizes.page_size
        self.pool = np.full((self.shards, sizes.num_pages, self.page), -1)
        self.prompts = {}
        self.rounds, self.idle_rounds = 0, 0
        engine.runner.params = "none"
        engine.runner.programs = self
        self.decode = {False: self.decode_chunk, True: self.decode_chunk}

    def put(self, x):
        return x

    def make_pool(self):
        return None

    def of_shards(self, x):
        return x.reshape(self.shards, len(x) // self.shards, *x.shape[1:])

    def prefill(self, params, pool, *arrays):
        for s, shard in enumerate(zip(*map(self.of_shards, arrays), strict=True)):
            for tokens, start, count, table in zip(*shard, strict=True):
                for i in range(count):
                    page, offset = divmod(start + i, self.page)
                    self.pool[s, table[page], offset] = tokens[i]
        return None, None

    def copy_pages(self, pool, source, target):
        for s, pairs in enumerate(zip(self.of_shards(source), self.of_shards(target), strict=True)):
            for a, b in zip(*pairs, strict=True):
                if b < self.pool.shape[1]:
                    self.pool[s, b] = self.pool[s, a]

    def decode_chunk(self, params, pool, inputs):
        inputs = jax.tree.map(self.of_shards, inputs)
        slots, tables = inputs.carry, inputs.tables
        ids = inputs.sampling.key[..., :4].astype(int)
        rows = slots.token.shape[1]
        tokens = np.zeros((self.shards, rows, CHUNK), np.int32)
        count, stopped = np.zeros((self.shards, rows), int), np.zeros((self.shards, rows), bool)
        steps = np.zeros((self.shards, 1), int)
        going_on = slots.active.copy()
        for s in range(self.shards):
            table = {}
            for r in np.flatnonzero(slots.active[s]):
                block = tables.shared[s, r // (rows // tables.shared.shape[1])]
                table[r] = [*block[: tables.base[s, r] // self.page], *tables.own[s, r]]
                self.check(s, table[r], ids[s, r], slots.position[s, r], slots.token[s, r])
            active = set(table)
            while steps[s, 0] < CHUNK and len(active) > inputs.min_active[s, 0]:
                for r in sorted(active):
                    place = slots.position[s, r] + count[s, r]
                    fed = tokens[s, r, count[s, r] - 1] if count[s, r] else slots.token[s, r]
                    self.pool[s, table[r][place // self.page], place % self.page] = fed
                    new = token_at(ids[s, r], place + 1)
                    tokens[s, r, count[s, r]] = new
                    count[s, r] += 1
                    stopped[s, r] = new in inputs.sampling.stop[s, r]
                    if stopped[s, r] or count[s, r] == slots.remaining[s, r]:
                        active.remove(r)
                        going_on[s, r] = False
                steps[s, 0] += 1
            self.idle_rounds += bool(table) and steps[s, 0] == 0
        self.rounds += 1
        last = np.take_along_axis(tokens, np.maximum(count - 1, 0)[..., None], axis=2)[..., 0]
        rest = (np.where(count > 0, last, slots.token), slots.position + count, going_on)
        found = (tokens, count, stopped, steps, *rest, slots.remaining - count)
        flat = [x.reshape(-1, *x.shape[2:]) for x in found]
        logp = np.zeros(flat[0].shape, np.float32)
        output = DecodeOutput(flat[0], logp, *flat[1:3], records={}, steps=flat[3])
        return None, output, DecodeCarry(*flat[4:])

    def check(self, shard, table, ids, position, token):
        """All that was fed before lies where the page table says."""
        prompt = self.prompts[tuple(ids[:3])]
        drawn = [token_at(ids, p) for p in range(len(prompt), position + 1)]
        whole = [*prompt, *drawn]
        held = self.pool[shard, table[: math.ceil(position / self.page)]].reshape(-1)[:position]
        assert whole[:position] == held.tolist() and whole[position] == token


def make(num_pages, slots=8, max_length=24, shards=1, gathered=True, **options):
    mesh = None if shards == 1 else meshes.make(data=shards, devices=jax.devices()[:shards])
    engine = Engine(
        CONFIG, mesh, slots * shards, PAGE, num_pages * shards, max_length, chunk=CHUNK,
        prefill_tokens=64, gathered=gathered, **options,
    )  # fmt: skip
    return engine, Device(engine)


def ask(engine, device, prompts, g, sampling, draw=0):
    for i, prompt in enumerate(prompts):
        device.prompts[0, i, draw] = list(prompt)
    return engine.generate(prompts, g, sampling, draws=[draw] * len(prompts))


@pytest.mark.parametrize(
    "shards,calls,gathered", [(1, 84, True), (1, 84, False), (2, 16, True), (2, 16, False)]
)
def test_ten_thousand_requests_are_each_answered_once_and_leave_all_pages_free(
    shards, calls, gathered
):
    """With pages that are not gathered, chunks are sent before the last one has been read."""
    rng = np.random.default_rng(0)
    engine, device = make(num_pages=13, slots=8, shards=shards, gathered=gathered)
    stems = rng.integers(2, 32, (4, 20))
    asked = answered = cancelled = late = 0
    waited = collections.Counter()
    admit = engine.loop.admit

    def watch():
        """Counts the rounds that a sequence spends at the head of its queue."""
        admit()
        for shard in engine._shards:
            if shard.waiting:
                waited[id(shard.waiting[0])] += 1

    engine.loop.admit = watch
    for call in range(calls):
        waited.clear()
        g = int(rng.integers(1, 5))
        prompts = [
            np.concatenate([stems[rng.integers(4), : rng.integers(21)], rng.integers(2, 32, k)])
            for k in rng.integers(1, 4, 120 // g)
        ]
        sampling = [
            SamplingParams(max_tokens=int(n), stop_token_ids=(END,))
            for n in rng.integers(1, 21, len(prompts) * g)
        ]
        left = set(range(len(prompts)))
        for group in ask(engine, device, prompts, g, sampling, draw=call):
            index = group[0].prompt_index
            left.remove(index)  # an error where it was answered before or given up
            assert [r.sample_index for r in group] == list(range(g))
            for r in group:
                limit = min(
                    sampling[index * g + r.sample_index].max_tokens, 24 - len(prompts[index])
                )
                expected = answer((0, index, call, r.sample_index), len(prompts[index]), limit)
                assert r.tokens.tolist() == expected
                assert r.finish_reason == ("stop" if expected[-1] == END else "length")
            answered += g
            if rng.random() < 0.1:
                other = int(rng.integers(len(prompts)))
                assert engine.cancel(other) == (other in left)
                late += other not in left
                cancelled += g * (other in left)
                left.discard(other)
        assert not left
        asked += len(prompts) * g
        assert engine.free_pages == 13 * shards
        # The head of a queue waits for sequences that decode, each of which ends in so many rounds.
        assert max(waited.values(), default=0) <= 8 * (math.ceil(20 / CHUNK) + 1)
    assert asked == answered + cancelled >= 117 * calls
    if gathered:
        assert device.idle_rounds == 0  # no shard with work stands still
    for number in (
        cancelled,
        late,
        engine.num_preemptions,
        engine.prefix_hits,
        engine.cached_pages,
    ):
        assert number > 0
    # All pages can be had: cached ones are freed on demand.
    for shard in engine._shards:
        assert len(set(shard.pages.take(13))) == 13
    assert engine.cached_pages == 0


def test_a_shard_with_few_rows_does_not_wait_for_the_others():
    engine, device = make(num_pages=64, shards=2, least_rows=2)
    limits = [3] * 2 + [20] * 2 + [20] * 4  # two prompts on each shard; one ends at once
    sampling = [SamplingParams(max_tokens=n) for n in limits]
    found = list(ask(engine, device, [[5], [6], [7], [8]], 2, sampling))
    assert len(found) == 4 and device.idle_rounds == 0


def started(num_pages=64, g=4, count=6):
    """Six groups of which two have slots, and the first was yielded."""
    engine, device = make(num_pages)
    limits = [2] * g + [18] * g * (count - 1)
    sampling = [SamplingParams(max_tokens=n) for n in limits]
    prompts = [np.full(6, 2 + i) for i in range(count)]
    groups = ask(engine, device, prompts, g, sampling)
    assert next(groups)[0].prompt_index == 0
    return engine, groups


def state(engine, index):
    members = engine._groups[index].members
    decoding = {m.slot is not None for m in members if not m.finish_reason}
    begun = any(m.tokens for m in members)
    return "running" if True in decoding else "preempted" if begun else "waiting"


@pytest.mark.parametrize("what,index", [("running", 1), ("waiting", 5)])
def test_a_cancelled_group_is_not_yielded_and_its_pages_are_free(what, index):
    engine, groups = started()
    assert state(engine, index) == what
    group, before = engine._groups[index], engine.free_pages
    held = {
        page for pages in [group.pages or [], *(m.pages for m in group.members)] for page in pages
    }
    assert bool(held) == (what == "running")
    assert engine.cancel(index)
    assert engine.free_pages == before + len(held)
    assert not engine.cancel(index)
    assert sorted(g[0].prompt_index for g in groups) == sorted({1, 2, 3, 4, 5} - {index})
    assert engine.free_pages == 64


def test_a_cancelled_group_that_was_preempted_is_forgotten():
    engine, groups = started(num_pages=16, g=2, count=5)
    gone = {0}
    for group in groups:
        gone.add(group[0].prompt_index)
        back = [
            i for i in range(5) if not engine._groups[i].over and state(engine, i) == "preempted"
        ]
        if back:
            break
    assert engine.num_preemptions > 0 and engine.cancel(back[0])
    rest = [g[0].prompt_index for g in groups]
    assert sorted(rest) == sorted({0, 1, 2, 3, 4} - gone - {back[0]})
    assert engine.free_pages == 16


def test_a_group_that_was_yielded_or_finished_meanwhile_can_be_cancelled_too():
    engine, device = make(num_pages=64)
    groups = ask(engine, device, [[5], [6], [7]], 2, SamplingParams(max_tokens=2))
    first = next(groups)[0].prompt_index  # all three end in the same chunk
    assert not engine.cancel(first)
    assert engine.cancel(2)
    assert [g[0].prompt_index for g in groups] == [1]
    assert engine.free_pages == 64
    with pytest.raises(RuntimeError, match="no generate\\(\\) is under way"):
        engine.cancel(0)


def test_cancelling_what_was_never_asked_is_an_error():
    engine, groups = started()
    with pytest.raises(ValueError, match="prompt_index=6 is not one of the 6 prompts"):
        engine.cancel(6)
    groups.close()


def test_full_pages_of_prompts_are_found_again_and_the_least_recently_used_make_room():
    engine, device = make(num_pages=8)
    sampling = SamplingParams(max_tokens=1)

    def hits(prompt):
        before = engine.prefix_hits
        list(ask(engine, device, [prompt], 1, sampling, draw=engine.steps))
        return engine.prefix_hits - before

    a, b = np.arange(2, 15), np.arange(15, 28)  # 12 tokens to prefill: 3 full pages
    assert [hits(a), hits(b)] == [0, 0]
    assert (engine.cached_pages, engine.free_pages) == (6, 8)
    assert [hits(a), hits(np.append(a, 3)), hits(a[:11])] == [12, 12, 8]
    assert hits(np.concatenate([a[:8], b])) == 8
    # It took four more pages: two that were empty, and the end of b, which was used longest ago.
    assert hits(b) == 4


def test_page_tables_begin_with_the_pages_that_a_group_shares():
    engine, device = make(num_pages=64)
    assert engine.page_tables() == {}
    sampling = [SamplingParams(max_tokens=n) for n in (1, 1, 1, 9, 9, 9)]
    groups = ask(engine, device, [[5], np.arange(2, 13)], 3, sampling)
    next(groups)
    tables = engine.page_tables()
    assert sorted(tables) == [(1, 0), (1, 1), (1, 2)]
    shared = {tuple(table[:2]) for table in tables.values()}  # 10 tokens: 2 full pages
    own = [page for table in tables.values() for page in table[2:]]
    assert len(shared) == 1 and len(own) == len(set(own)) == 6
    groups.close()


def test_prompts_that_differ_early_share_nothing_later():
    engine, device = make(num_pages=64)
    prompt = np.arange(2, 19)
    other = prompt.copy()
    other[0] = 31
    list(ask(engine, device, [prompt], 1, SamplingParams(max_tokens=1)))
    list(ask(engine, device, [other], 1, SamplingParams(max_tokens=1), draw=1))
    assert engine.prefix_hits == 0
