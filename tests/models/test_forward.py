"""The forward pass: results do not depend on layout, mesh or chunks."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import mesh as meshes
from rljax import models
from rljax.models import forward

V, ROWS, T = 53, 8, 16

DENSE = models.decoder(
    vocab_size=V,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=24,
    tie_embeddings=False,
)
# Sixteen experts: 128 tokens then go the sorted way.
MIXTURE = models.decoder(
    vocab_size=V,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=8,
    num_experts=16,
    top_k=2,
    tie_embeddings=False,
)
# All that any family's attention and experts can have.
RICH_ATTENTION = models.Attention(
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    bias=True,
    output_bias=True,
    qk_norm="full",
    sinks=True,
    window=3,
)
RICH_EXPERTS = models.Experts(
    num_experts=16,
    top_k=2,
    intermediate_size=8,
    router=models.Router(bias=True),
    bias=True,
    activation="clamped",
    shared_size=12,
    shared_gated=True,
)
RICH = models.ModelConfig(
    vocab_size=V,
    hidden_size=16,
    stacks=(models.Stack((models.Block(RICH_ATTENTION, RICH_EXPERTS),), 1),),
)
LATENT_ATTENTION = models.LatentAttention(
    num_heads=4,
    q_rank=None,
    kv_rank=8,
    nope_dim=4,
    rope_dim=4,
    value_dim=6,
    rope_scaling=models.Yarn(4.0, 8),
    scale_weight=0.7,
)
LATENT_EXPERTS = models.Experts(
    num_experts=16,
    top_k=2,
    intermediate_size=8,
    router=models.Router(
        scoring="sigmoid", groups=4, top_groups=2, scale=2.5, correction_bias=True
    ),
    shared_size=8,
)
LATENT = models.ModelConfig(
    vocab_size=V,
    hidden_size=16,
    stacks=(models.Stack((models.Block(LATENT_ATTENTION, LATENT_EXPERTS),), 1),),
)
CONFIGS = {"dense": DENSE, "mixture": MIXTURE, "rich": RICH, "latent": LATENT}


@pytest.fixture(scope="module")
def params(random_params):
    return {name: random_params(config) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def batch():
    """Rows of two packed sequences, of 1 to 7 and 4 to 8 tokens, then padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (ROWS, T))
    segments = np.zeros((ROWS, T), np.int32)
    for row in range(ROWS):
        first, second = rng.integers(1, 8), rng.integers(4, 9)
        segments[row, :first] = 1
        segments[row, first : first + second] = 2
    return jnp.asarray(tokens), jnp.asarray(segments)


@functools.partial(jax.jit, static_argnums=1)
def run_logits(params, config, tokens, segments):
    return models.logits(params, config, tokens, None, segments)


def unset(config):
    shape = (ROWS, T, len(config.mixture_layers), max(config.top_k, 1))
    return jnp.full(shape, -1, jnp.int32)


def loss(params, config, tokens, segments, routing):
    """Something that every log-probability and entropy goes into, each with its own weight."""
    logp, entropy, router = models.score_tokens(
        params,
        config,
        models.Inputs(
            tokens, segments=segments, routing=routing if config.mixture_layers else None
        ),
        temperature=0.8,
        chunk=48,
    )
    weight = jnp.cos(jnp.arange(logp.size)).reshape(logp.shape)
    return jnp.sum(weight * logp + 0.1 * entropy), (logp, entropy, router)


run_loss = functools.partial(jax.jit, static_argnums=1)(jax.value_and_grad(loss, has_aux=True))


def assert_close(got, want, tolerance):
    """Every leaf within `tolerance` of the other, relative to its largest value."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        scale = max(np.abs(b).max(), 1e-3)
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance * scale, path


# Log-probabilities.


@pytest.mark.parametrize("chunk", [5, 48, 1024])
def test_log_probabilities_are_those_of_the_logits(params, batch, chunk):
    tokens, segments = batch
    temperature = 0.7
    logp, entropy = jax.jit(
        functools.partial(models.token_logprobs, temperature=temperature, chunk=chunk),
        static_argnums=1,
    )(params["dense"], DENSE, tokens, None, segments)
    z = np.asarray(run_logits(params["dense"], DENSE, tokens, segments), np.float64) / temperature
    all_logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    follows = np.asarray((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0))
    want = np.take_along_axis(all_logp[:, :-1], np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(logp[:, 1:], np.where(follows, want, 0), atol=2e-6)
    want = -(np.exp(all_logp) * all_logp).sum(-1)[:, :-1]
    np.testing.assert_allclose(entropy[:, 1:], np.where(follows, want, 0), atol=2e-6)
    assert logp.dtype == entropy.dtype == jnp.float32
    # The first token of a row, of a second sequence, and padding have no log-probability.
    assert not logp[:, 0].any() and not entropy[:, 0].any() and not logp[segments == 0].any()
    assert (logp[:, 1:][~follows] == 0).all()


def test_wanted_tokens_alone_are_scored(params, batch):
    tokens, segments = batch
    wanted = np.asarray(segments == 2)
    score = functools.partial(jax.jit, static_argnames=("config", "max_scored_tokens"))(
        functools.partial(models.score_tokens, chunk=48)
    )
    plain, entropies, _ = score(params["dense"], DENSE, models.Inputs(tokens, segments=segments))
    for most in (None, 5):
        logp, entropy, _ = score(
            params["dense"],
            DENSE,
            models.Inputs(tokens, segments=segments),
            score_mask=wanted,
            max_scored_tokens=most,
        )
        if most == 5:
            # A bound that is broken shows; it never turns into a log-probability of 0.
            many = (wanted[:, 1:] & (plain[:, 1:] != 0)).sum(1) > 5
            assert many.any() and not many.all()
            assert np.array_equal(np.isnan(logp).any(1), many)
            logp, entropy, wanted = logp[~many], entropy[~many], wanted[~many]
            plain, entropies = plain[~many], entropies[~many]
        np.testing.assert_allclose(logp, np.where(wanted, plain, 0), atol=1e-6)
        np.testing.assert_allclose(entropy, np.where(wanted, entropies, 0), atol=1e-6)


def test_temperature_must_be_positive(params, batch):
    with pytest.raises(ValueError, match=r"temperature=0\.0 must be above 0"):
        models.token_logprobs(params["dense"], DENSE, *batch, temperature=0.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_array_of_all_logits_is_ever_formed(params, batch, name):
    tokens, segments = batch
    config = CONFIGS[name]
    step = jax.make_jaxpr(jax.grad(loss, has_aux=True), static_argnums=1)
    jaxpr = step(params[name], config, tokens, segments, unset(config))

    def shapes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (v.aval.shape for v in eqn.outvars)
            for value in jax.tree.leaves(
                eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from shapes(inner)

    rows = [np.prod(s[:-1], dtype=int) for s in shapes(jaxpr.jaxpr) if s and s[-1] == V]
    assert max(rows) == 43  # the chunk, of 128 tokens


# Padding and packing.


@pytest.mark.smoke
@pytest.mark.parametrize("name", CONFIGS)
def test_contents_of_padding_and_of_other_sequences_change_no_bit(params, batch, name):
    tokens, segments = batch
    other = (tokens + 1 + jnp.arange(T)) % V
    want = np.asarray(run_logits(params[name], CONFIGS[name], tokens, segments))
    for changed in (0, 1, 2):
        mixed = jnp.where(segments == changed, other, tokens)
        got = np.asarray(run_logits(params[name], CONFIGS[name], mixed, segments))
        kept = np.asarray(segments != changed)
        assert np.array_equal(got[kept], want[kept])
        assert not np.array_equal(got[~kept], want[~kept])


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_alone_with_less_padding(params, batch, name):
    tokens, segments = batch
    packed = run_logits(params[name], CONFIGS[name], tokens, segments)
    rows = [(r, np.asarray(segments[r]) == s) for r in range(ROWS) for s in (1, 2)]
    alone = np.zeros((2 * ROWS, 8), np.int32)
    there = np.zeros((2 * ROWS, 8), np.int32)
    for i, (r, mine) in enumerate(rows):
        alone[i, : mine.sum()], there[i, : mine.sum()] = np.asarray(tokens[r])[mine], 1
    found = run_logits(params[name], CONFIGS[name], jnp.asarray(alone), jnp.asarray(there))
    for i, (r, mine) in enumerate(rows):
        np.testing.assert_allclose(found[i, : mine.sum()], packed[r][mine], atol=5e-6)


def test_a_broken_sequence_leaves_the_others_alone(params, batch):
    tokens, segments = batch
    config, good = MIXTURE, params["mixture"]
    # Token 0 stands in second sequences only, and its embedding is not finite.
    tokens = jnp.where(segments == 2, 0, jnp.maximum(tokens, 1))

    def others(embed, bad):
        p = {**good, "embed": embed.at[0].set(bad)}
        logits = models.logits(p, config, tokens, None, segments)
        mine = (segments == 1)[:, :, None]
        return jnp.sum(jnp.where(mine, logits, 0) ** 2), logits

    step = jax.jit(jax.value_and_grad(others, has_aux=True))
    (_, want), want_gradient = step(good["embed"], 1.0)
    first, second = np.asarray(segments == 1), np.asarray(segments == 2)
    for bad in (jnp.nan, jnp.inf):
        (_, got), gradient = step(good["embed"], bad)
        assert np.array_equal(got[first], want[first])
        assert np.array_equal(gradient[1:], want_gradient[1:])
        # It is not hidden from its own sequence.
        assert np.isnan(got[second]).all()


# Routing.


def test_replaying_its_own_routing_changes_nothing(params, batch):
    tokens, segments = batch
    p = params["mixture"]
    (value, (logp, _, live)), gradients = run_loss(p, MIXTURE, tokens, segments, unset(MIXTURE))
    (again, (replayed, _, router)), same = run_loss(p, MIXTURE, tokens, segments, live.experts)
    assert value == again and np.array_equal(logp, replayed)
    assert_close(same, gradients, 1e-6)
    assert np.array_equal(router.experts, live.experts)
    assert not live.flips.any() and not router.flips.any()


def test_what_the_routers_did(params, batch):
    tokens, segments = batch
    _, (_, _, router) = run_loss(params["mixture"], MIXTURE, tokens, segments, unset(MIXTURE))[0]
    counted = np.asarray(segments > 0)
    assert router.tokens == counted.sum()
    chosen = np.asarray(router.experts)
    assert chosen.shape == (ROWS, T, 2, 2) and (chosen >= 0).all()
    for layer in range(2):
        load = np.bincount(chosen[:, :, layer][counted].ravel(), minlength=16)
        assert np.array_equal(router.load[layer], load)
    assert (router.entropy > 0).all() and (router.entropy < counted.sum() * np.log(16)).all()


def test_replayed_experts_follow_their_tokens_and_flips_are_counted(params, batch):
    tokens, segments = batch
    p = params["mixture"]
    live = run_loss(p, MIXTURE, tokens, segments, unset(MIXTURE))[0][1][2].experts
    # Three tokens of sequences and one of padding get another pair of experts in layer 1.
    routing = np.array(unset(MIXTURE))
    places = [(0, 0), (3, 2), (5, 1), (0, T - 1)]
    assert all(segments[r, t] > 0 for r, t in places[:3]) and segments[0, T - 1] == 0
    for r, t in places:
        own = set(np.asarray(live[r, t, 1]).tolist())
        routing[r, t, 1] = sorted(set(range(16)) - own)[:2]
    (_, (_, _, router)), _ = run_loss(p, MIXTURE, tokens, segments, jnp.asarray(routing))
    assert router.flips.tolist() == [0, 3]
    used = np.asarray(router.experts)
    assert np.array_equal(used, np.where(routing >= 0, routing, live))
    # The same pair in another order is no flip.
    (_, (_, _, router)), _ = run_loss(p, MIXTURE, tokens, segments, live[..., ::-1])
    assert not router.flips.any()


def test_routers_learn_through_replay(params, batch):
    tokens, segments = batch
    p = params["mixture"]
    routing = jnp.broadcast_to(jnp.asarray([3, 11]), unset(MIXTURE).shape)
    _, gradients = run_loss(p, MIXTURE, tokens, segments, routing)
    router = gradients["stacks"][0][0]["feed_forward"]["router"]
    # Weights are live probabilities of experts 3 and 11: their columns move, and with the
    # normalisation over the two, no other.
    moved = np.abs(router).sum((0, 1)) > 1e-7
    assert np.flatnonzero(moved).tolist() == [3, 11]
    up = gradients["stacks"][0][0]["feed_forward"]["up"]
    unused = [e for e in range(16) if e not in (3, 11)]
    assert (np.asarray(up)[:, unused] == 0).all() and np.abs(up[:, 3]).max() > 0


def test_replayed_experts_of_probability_zero_get_finite_weights(params, batch):
    tokens, segments = batch
    p = jax.tree.map(lambda x: x, params["mixture"])
    p["stacks"][0][0]["feed_forward"]["router"] *= 1e4
    routing = jnp.broadcast_to(jnp.asarray([3, 11]), unset(MIXTURE).shape)
    (value, _), gradients = run_loss(p, MIXTURE, tokens, segments, routing)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


# Ways to compute the same.


def test_rematerialised_is_equal(params, batch):
    tokens, segments = batch
    p = params["mixture"]
    want = run_loss(p, MIXTURE, tokens, segments, unset(MIXTURE))
    remat = dataclasses.replace(MIXTURE, remat=True)
    got = run_loss(p, remat, tokens, segments, unset(MIXTURE))
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_sharded_equals_one_device(params, batch, name):
    tokens, segments = batch
    config = CONFIGS[name]
    (value, (logp, entropy, _)), gradients = run_loss(
        params[name], config, tokens, segments, unset(config)
    )
    logits = run_logits(params[name], config, tokens, segments)
    mesh = meshes.make(data=2, fsdp=4)
    p = jax.device_put(params[name], models.shardings(config, mesh))
    assert len(p["stacks"][0][0]["attention"]["q"].sharding.device_set) == 8
    rows = meshes.shard_rows((tokens, segments, unset(config)), mesh)
    with jax.set_mesh(mesh):
        (value8, (logp8, entropy8, _)), gradients8 = run_loss(p, config, *rows)
        logits8 = run_logits(p, config, *rows[:2])
    np.testing.assert_allclose(logits8, logits, atol=4e-6)  # 3.2e-6 with JAX 0.12.0.1
    np.testing.assert_allclose(logp8, logp, atol=3e-6)
    np.testing.assert_allclose(entropy8, entropy, atol=3e-6)
    np.testing.assert_allclose(value8, value, rtol=1e-5)
    # Sums over rows run in another order: within 1e-5 of each weight's largest gradient.
    assert_close(gradients8, gradients, 1e-5)


@pytest.mark.parametrize("name", ["rich", "latent"])
def test_long_rows_are_split_over_context(params, batch, name):
    """Packed rows, and rows whose second sequence sees the first as its prompt."""
    tokens, segments = batch
    config = CONFIGS[name]
    prefix = jnp.where((segments == 2) & (jnp.arange(ROWS)[:, None] % 2 == 0), 1, 0)

    def shared(params, tokens, segments, prefix):
        logp, entropy, _ = models.score_tokens(
            params,
            config,
            models.Inputs(tokens, segments=segments, prefix=prefix),
            max_scored_tokens=8,
            score_mask=segments == 2,
        )
        weight = jnp.cos(jnp.arange(logp.size)).reshape(logp.shape)
        return jnp.sum(weight * logp + 0.1 * entropy), (logp, entropy)

    step = jax.jit(jax.value_and_grad(shared, has_aux=True))
    (_, want), want_gradients = step(params[name], tokens, segments, prefix)
    mesh = meshes.make(fsdp=2, context=4)
    p = jax.device_put(params[name], models.shardings(config, mesh))
    with jax.set_mesh(mesh):
        (_, got), gradients = step(p, *meshes.shard_rows((tokens, segments, prefix), mesh))
    np.testing.assert_allclose(got[0], want[0], atol=3e-6)
    np.testing.assert_allclose(got[1], want[1], atol=3e-6)
    assert_close(gradients, want_gradients, 1e-5)


def test_tensor_parallel_gathers_no_weights_and_forms_no_logits(params, batch):
    """What XLA made of the program, by its collectives."""
    tokens, segments = batch
    config = dataclasses.replace(DENSE, vocab_size=52)
    p = params["dense"] | {"embed": params["dense"]["embed"][:52]}
    p["output"] = params["dense"]["output"][:, :52]
    mesh = meshes.make(devices=jax.devices()[:4], fsdp=2, tensor=2)
    p = jax.device_put(p, models.shardings(config, mesh))
    with jax.set_mesh(mesh):
        given = p, config, *meshes.shard_rows((tokens % 52, segments, unset(config)), mesh)
        program = run_loss.lower(*given).compile().as_text()
    # Devices 0 and 1 share a place on fsdp, 2 and 3 the other.
    over_fsdp = {"{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)"}
    gathers = re.findall(r" all-gather\(.*replica_groups=([^ ]*), ", program)
    assert gathers and set(gathers) <= over_fsdp
    # No array has all of the vocabulary.
    assert not re.search(r"\[(\d+,)*52[],]", program)
    # Of activations [rows, T, width]: the embedding, two a layer, and backwards two a layer and
    # the logits'.
    reduced = re.findall(r"f32\[([\d,]+)\][^=]* all-reduce\(", program)
    sizes = [math.prod(int(n) for n in shape.split(",")) for shape in reduced]
    per_device = ROWS // 2 * T * config.hidden_size
    assert sizes.count(per_device) == 2 + 4 * config.num_layers


def test_few_rows_run_under_a_mesh_too(params):
    mesh = meshes.make(data=2, fsdp=4)
    tokens = jnp.asarray([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    want = run_logits(params["dense"], DENSE, tokens, jnp.ones_like(tokens))
    p = jax.device_put(params["dense"], models.shardings(DENSE, mesh))
    with jax.set_mesh(mesh):
        got = run_logits(p, DENSE, tokens, jnp.ones_like(tokens))
    np.testing.assert_allclose(got, want, atol=3e-6)


def test_embedding_gradient_adds_up_in_float32(params):
    """One token, a thousand times over, in bfloat16: its gradient is the sum of all of them."""
    config = dataclasses.replace(DENSE, dtype="bfloat16")
    tokens = jnp.full((1, 1000), 7)

    def f(embed):
        x = forward.embed({"embed": embed}, config, tokens)
        return jnp.sum(x.astype(jnp.float32))

    gradient = jax.grad(f)(params["dense"]["embed"])
    assert (gradient[7] == 1000).all()
