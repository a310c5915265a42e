"""The keyword arguments that named objectives share, written once.

`@named(...)` adds them to an objective's signature, with that objective's defaults, so that
`inspect.signature`, `help` and the command line show every setting an objective takes. The
decorated function gets them as one `Keywords`, and its own arguments as usual:

    @named(low=0.2, high=0.2)
    def grpo(k: Keywords) -> Objective:
        return k.objective(k.normalize, chain(token_ratio(), k.window), sequence_mean())
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from rljax.losses.advantages import Advantage, group_normalize
from rljax.losses.base import Chain
from rljax.losses.estimators import Estimator
from rljax.losses.objective import Objective
from rljax.losses.ratios import Ratio
from rljax.losses.regularisers import kl
from rljax.losses.trust_regions import TrustRegion, ppo_clip
from rljax.losses.weights import Weights


@dataclasses.dataclass(frozen=True)
class Keywords:
    """The shared keyword arguments; those that an objective does not take keep their default.

    Attributes:
      clip_low: Window of the ratio below 1 (in log space below 0 for `gmpo`).
      clip_high: Window of the ratio above 1.
      dual_clip: For A < 0, J is at least dual_clip·A; None: no such bound.
      beta: Coefficient of the KL to the reference; 0: no reference is needed.
      kl_estimator: 'k1', 'k2' or 'k3'.
      kl_unbiased: Multiply the KL by the live ratio of the token, with its gradient.
      advantage_eps: Added to the standard deviation of a group's rewards.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    beta: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_unbiased: bool = False
    advantage_eps: float = 1e-6

    @property
    def window(self) -> ppo_clip:
        """PPO's clip with the window that was given."""
        return ppo_clip(self.clip_low, self.clip_high, self.dual_clip)

    @property
    def normalize(self) -> group_normalize:
        """GRPO's advantage."""
        return group_normalize(self.advantage_eps)

    def objective(
        self,
        advantage: Advantage | Chain,
        policy: Ratio | TrustRegion | Chain,
        weights: Weights,
        **others: Any,
    ) -> Objective:
        """The objective, with the KL penalty in the loss unless beta is 0."""
        penalty = (kl(self.beta, self.kl_estimator, self.kl_unbiased),) if self.beta else ()
        return Objective(advantage, policy, weights, regularisers=penalty, **others)


def named(
    low: float | None = None,
    high: float | None = None,
    *,
    dual: bool = True,
    eps: bool = True,
    **defaults: Any,
) -> Callable[[Callable[..., Objective]], Callable[..., Objective]]:
    """Gives a named objective the shared keyword arguments.

    In the signature the objective's own positional arguments come first, then the window, its own
    keyword-only arguments, the KL, and the advantage's eps. All may be given by keyword.

    Args:
      low: Default of clip_low; None: the objective takes no window.
      high: Default of clip_high.
      dual: Whether it takes dual_clip.
      eps: Whether it takes advantage_eps.
      **defaults: Defaults of beta, kl_estimator and kl_unbiased other than those of `Keywords`;
        the value `inspect.Parameter.empty` leaves that keyword out.

    Returns:
      The decorator.
    """
    shared = {f.name: f.default for f in dataclasses.fields(Keywords)} | defaults
    shared |= {"clip_low": low, "clip_high": high}
    window = ["clip_low", "clip_high", *(["dual_clip"] if dual else [])] if low is not None else []
    rest = ["beta", "kl_estimator", "kl_unbiased", *(["advantage_eps"] if eps else [])]
    rest = [name for name in rest if shared[name] is not inspect.Parameter.empty]
    types = inspect.get_annotations(Keywords)

    def keyword(name: str) -> inspect.Parameter:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Parameter(name, kind, default=shared[name], annotation=types[name])

    def decorate(build: Callable[..., Objective]) -> Callable[..., Objective]:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = list(inspect.signature(build).parameters.values())[1:]
        first = [p for p in own if p.kind == kind]
        later = [p.replace(kind=kind) for p in own if p.kind == inspect.Parameter.KEYWORD_ONLY]
        parameters = [*first, *map(keyword, window), *later, *map(keyword, rest)]
        signature = inspect.Signature(parameters, return_annotation=Objective)

        @functools.wraps(build)
        def make(*args: Any, **kwargs: Any) -> Objective:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            common = {name: given.pop(name) for name in (*window, *rest)}
            return build(Keywords(**common), **given)

        make.__signature__ = signature  # type: ignore[attr-defined]
        del make.__wrapped__  # help() would show the function within
        return make

    return decorate
