"""Whether the tokens of a response depend on each other in the policy half: found by trying.

The gradient of one token's J may reach the log-probabilities of other tokens (a ratio of the whole
response), and a gate may close for one token of a response and not for another. Both decide which
other terms an objective takes, so neither is declared: the policy half runs once on a small example
and its derivatives are looked at.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rljax.batch import Rows
from rljax.errors import InputError
from rljax.losses.base import PolicyOutputs, Step
from rljax.losses.sequences import SequenceLayout
from rljax.losses.trust_regions import policy_gradient

TOKENS = 3


@dataclasses.dataclass(frozen=True)
class Coupling:
    """What trying a policy half showed.

    Attributes:
      couples_tokens: The gradient of a token's J reaches other tokens of its response.
      gates_tokens: A gate may close for single tokens of a response.
      needs_advantages: Without an advantage there is no gradient.
    """

    couples_tokens: bool
    gates_tokens: bool
    needs_advantages: bool


@functools.lru_cache(maxsize=512)
def of_policy(policy: Any) -> Coupling:
    """Tries a policy half on a few responses of three tokens.

    Their log-ratios range from 0 to far outside any window and their advantages have either sign,
    so that a gradient that some window takes away is seen elsewhere. The derivative with respect to
    one token is marked with NaN, which no factor hides, not even 0.

    Args:
      policy: A transform, or a chain of them.

    Returns:
      What was found.

    Raises:
      ValueError: Its J does not have one entry a token or response.
    """
    with jax.ensure_compile_time_eval():
        rows, logp, entropy = _example()
    several = rows.tokens.shape[0]
    token = np.arange(TOKENS)[None] == (np.arange(several) % TOKENS)[:, None]

    def try_with(advantages: Array) -> Any:
        def j(logp: Float[Array, "R T"]) -> tuple[Array, Array]:
            step = Step(
                rows=rows,
                layout=SequenceLayout.of(rows),
                outputs=PolicyOutputs(logp, entropy=entropy, values=entropy, router=entropy),
                logp=logp,
                advantages=advantages,
                state={},
            )
            step = policy(step)
            if step.surrogate is None:
                step = policy_gradient()(step)
            surrogate = step.surrogate
            assert surrogate is not None
            gate = jnp.ones_like(logp) if step.gate is None else step.gate
            try:
                gained = jnp.broadcast_to(surrogate * gate, logp.shape)
                return gained, jnp.broadcast_to(gate, logp.shape)
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"{policy!r} must give J of shape [R, T] or [R, 1], got "
                    f"{jnp.shape(surrogate)} for [{several}, {TOKENS}]: give one for each token"
                ) from error

        return j

    @jax.jit
    def look(advantages: Array) -> tuple[Array, Array, Array]:
        nan = jnp.where(token, jnp.nan, 0.0)
        (_, gate), (reached, _) = jax.jvp(try_with(advantages), (logp,), (nan,))
        plain = jax.jvp(try_with(jnp.zeros_like(logp)), (logp,), (jnp.ones_like(logp),))[1][0]
        return jnp.isnan(reached) & ~token, gate, plain

    with jax.ensure_compile_time_eval():  # an objective may be made inside a jitted function
        reached, gate, plain = jax.tree.map(np.asarray, look(rows.advantages))
        advantages = np.asarray(rows.advantages)
    gate = gate[(advantages == advantages[:, :1]).all(axis=1)]
    return Coupling(
        couples_tokens=bool(reached.any()),
        gates_tokens=bool((gate != gate[:, :1]).any()),
        needs_advantages=bool((plain == 0).all()),
    )


def _example() -> tuple[Rows, Array, Array]:
    """Responses of three tokens; every field that a policy half may read is there."""
    rng = np.random.default_rng(0)
    # The gradient with respect to each of three tokens, for every sign and every distance.
    signs = np.array([[1.0] * 3, [-1.0] * 3, [1.0, -1.0, 1.0], [-1.0, 1.0, 1.0]])
    scales = np.array([0.0, 1e-5, 1e-2, 0.3, 2.0])
    sign, scale = (x.reshape(-1) for x in np.meshgrid(np.arange(len(signs)), scales))
    sign, scale = np.repeat(sign, TOKENS), np.repeat(scale, TOKENS)[:, None]
    shape = (len(sign), TOKENS)
    logp = -rng.uniform(0.2, 3.0, shape)

    def near() -> Array:
        return jnp.asarray(logp - scale * rng.normal(0.0, 1.0, shape), jnp.float32)

    index = jnp.broadcast_to(jnp.arange(TOKENS), shape)
    ones, inside = jnp.ones(shape, jnp.float32), jnp.ones(shape, bool)
    response = jnp.broadcast_to(jnp.arange(shape[0])[:, None], shape)
    entropy = jnp.asarray(rng.uniform(0.1, 2.0, shape), jnp.float32)
    rows = Rows(
        tokens=index,
        mask=inside,
        positions=index,
        segments=inside.astype(jnp.int32),
        sequence=response,
        group=jnp.zeros(shape, jnp.int32),
        keep=inside,
        advantages=jnp.asarray(signs[sign], jnp.float32),
        weights=ones,
        token_weights=ones,
        correction=ones,
        old_logp=near(),
        rollout_logp=near(),
        ref_logp=near(),
        teacher_logp=near(),
        values=entropy,
        returns=entropy,
        old_entropy=entropy,
    )
    return rows, jnp.asarray(logp, jnp.float32), entropy
