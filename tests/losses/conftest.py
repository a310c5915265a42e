"""Small batches for the tests of the losses."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rljax.batch import Batch


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
