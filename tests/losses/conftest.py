"""Small batches for the tests of the losses."""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import losses as L
from rljax.batch import Batch, Rows


@pytest.fixture(scope="session")
def golden():
    """Batches with advantages and losses as verl and TRL compute them."""
    path = Path(__file__).parents[1] / "golden" / "losses.json"
    return json.loads(path.read_text())["cases"]


@pytest.fixture(scope="session")
def make_batch():
    """A batch from nested lists; the masked tokens of a row are its first ones by default."""

    def make(rewards, lengths=None, group=None, width=None, **fields):
        rewards = np.asarray(rewards, np.float32)
        lengths = [1] * len(rewards) if lengths is None else lengths
        width = max([*lengths, 1]) if width is None else width
        mask = fields.pop("mask", np.arange(width) < np.asarray(lengths)[:, None])
        mask = np.asarray(mask, bool)
        return Batch(
            tokens=jnp.zeros(mask.shape, jnp.int32),
            mask=jnp.asarray(mask),
            group=jnp.asarray(np.zeros(len(rewards), int) if group is None else group),
            rewards=jnp.asarray(rewards),
            **{k: v if v is None else jnp.asarray(v) for k, v in fields.items()},
        )

    return make


@pytest.fixture(scope="session")
def surrogate():
    """J of each token and its gradient, for a policy half alone.

    Every input is [R, T] or a list (one row), T at most 8: all runs share one shape.
    """

    def shaped(x, fill=0.0):
        x = np.atleast_2d(np.asarray(x, np.float32))
        whole = np.full((2, 8), fill, np.float32)
        whole[: x.shape[0], : x.shape[1]] = x
        return jnp.asarray(whole), x.shape

    def run(policy, logp, old=None, advantages=1.0, **fields):
        logp, shape = shaped(logp)
        inside = np.zeros((2, 8), bool)
        inside[: shape[0], : shape[1]] = True
        advantages, _ = shaped(np.broadcast_to(advantages, shape))
        ones = jnp.ones((2, 8))
        index = jnp.broadcast_to(jnp.arange(2)[:, None], (2, 8))
        rows = Rows(
            tokens=index,
            mask=jnp.asarray(inside),
            positions=index,
            segments=jnp.asarray(inside, jnp.int32),
            sequence=index,
            group=index,
            keep=jnp.asarray(inside),
            advantages=advantages,
            weights=ones,
            token_weights=ones,
            correction=ones,
            old_logp=None if old is None else shaped(old)[0],
            **{name: shaped(value)[0] for name, value in fields.items()},
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of token weights, which stand for themselves here
            objective = L.Objective(L.uniform(), policy, L.token_sum())

        def loss(weights, logp):
            return objective.loss(logp, rows.replace(weights=weights))

        (j, gradient), stats = jax.grad(loss, (0, 1), has_aux=True)(ones, logp)
        cut = np.s_[: shape[0], : shape[1]]
        return -np.asarray(j)[cut], -np.asarray(gradient)[cut], L.finish(stats)

    return run
