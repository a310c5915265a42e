"""Metrics merge to what one pass over everything gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L

X = np.random.default_rng(0).normal(5, 2, 60).astype(np.float32)
Y = (0.5 * X + np.random.default_rng(1).normal(0, 1, 60)).astype(np.float32)
MASK = np.random.default_rng(2).random(60) < 0.7
EDGES = tuple(np.linspace(-2.0, 12.0, 15))


def metrics(cut):
    x, y, mask = jnp.asarray(X[cut]), jnp.asarray(Y[cut]), jnp.asarray(MASK[cut])
    return {
        "mean": L.Mean.of(x, mask),
        "max": L.Max.of(x, mask),
        "min": L.Min.of(x, mask),
        "std": L.Moments.of(x, mask, report="std"),
        "pearson": L.Moments.of(x, mask, y, report="pearson"),
        "ess": L.Moments.of(x, mask, report="ess"),
        "explained": L.Moments.of(x, mask, x - y, report="explained_variance"),
        "histogram": L.Histogram.of(x, mask, EDGES),
    }


def test_parts_merge_to_the_whole():
    parts = [metrics(slice(*ends)) for ends in ((0, 7), (7, 8), (8, 41), (41, 60))]
    whole, merged = L.finish(metrics(slice(None))), L.finish(L.merge(*parts))
    assert whole.keys() == merged.keys()
    for name, value in whole.items():
        assert merged[name] == pytest.approx(value, rel=1e-5), name


def test_values():
    x, y = X[MASK].astype(float), Y[MASK].astype(float)
    values = L.finish(metrics(slice(None)))
    assert values["mean"] == pytest.approx(x.mean(), rel=1e-6)
    assert values["std"] == pytest.approx(x.std(ddof=1), rel=1e-5)
    assert values["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-4)
    assert values["ess"] == pytest.approx(x.sum() ** 2 / (len(x) * (x**2).sum()), rel=1e-5)
    assert values["explained"] == pytest.approx(1 - np.var(x - y) / np.var(x), rel=1e-4)
    assert values["max"] == x.max() and values["min"] == x.min()
    assert values["histogram_p50"] == pytest.approx(np.median(x), abs=1.0)


def test_spread_far_from_zero_does_not_cancel():
    x = jnp.asarray(1e4 + np.array([0.0, 1, 2, 3]), jnp.float32)
    parts = [L.Moments.of(x[c], jnp.ones(2, bool), report="std") for c in (slice(2), slice(2, 4))]
    assert L.finish({"std": parts[0].merge(parts[1])})["std"] == pytest.approx(1.290994, rel=1e-4)


def test_what_counted_nothing_is_left_out():
    nothing = jnp.zeros(60, bool)
    x = jnp.full(60, jnp.nan)
    empty = {
        "mean": L.Mean.of(x, nothing),
        "max": L.Max.of(x, nothing),
        "std": L.Moments.of(x, nothing, report="std"),
        "histogram": L.Histogram.of(x, nothing, EDGES),
    }
    assert L.finish(empty) == {}
    merged = L.finish(L.merge(empty, metrics(slice(None))))
    assert merged["mean"] == L.finish(metrics(slice(None)))["mean"]


def test_names_missing_from_a_part_are_kept():
    merged = L.merge({"a": L.Mean(1.0, 2.0)}, {"b": L.Mean(3.0, 4.0)}, {"a": L.Mean(2.0, 2.0)})
    assert L.finish(merged) == {"a": 0.75, "b": 0.75}


def test_devices_reduce_to_the_whole():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    keys = metrics(slice(None)).keys()

    def local(x, y, mask):
        parts = {
            "mean": L.Mean.of(x, mask),
            "max": L.Max.of(x, mask),
            "min": L.Min.of(x, mask),
            "std": L.Moments.of(x, mask, report="std"),
            "pearson": L.Moments.of(x, mask, y, report="pearson"),
            "ess": L.Moments.of(x, mask, report="ess"),
            "explained": L.Moments.of(x, mask, x - y, report="explained_variance"),
            "histogram": L.Histogram.of(x, mask, EDGES),
        }
        assert parts.keys() == keys
        return L.all_reduce(parts, "data")

    reduced = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(spec("data"),) * 3, out_specs=spec())
    )(X, Y, MASK)
    whole = L.finish(metrics(slice(None)))
    for name, value in L.finish(reduced).items():
        assert value == pytest.approx(whole[name], rel=1e-5), name


def test_histograms_of_other_edges_do_not_merge():
    a, b = (L.Histogram(jnp.zeros(1), (0.0, top)) for top in (1.0, 2.0))
    with pytest.raises(ValueError, match="same edges"):
        a.merge(b)
