"""Ways to look at an objective: its composition, its gradient by token, all of them in a table."""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, Float

from rljax.batch import Batch
from rljax.errors import InputError
from rljax.losses import additions, named
from rljax.losses.base import PolicyOutputs, parts
from rljax.losses.objective import Objective
from rljax.losses.ratios import Ratio
from rljax.losses.regularisers import kl
from rljax.losses.shaping import kl_in_reward


class Description(str):
    """Text that a notebook shows as it is."""

    def __repr__(self) -> str:
        return str(self)


def describe(objective: Objective) -> Description:
    """Spells an objective's composition, one part a line.

    Args:
      objective: Any objective.

    Returns:
      The text; a notebook shows it with its line breaks, elsewhere print it.
    """
    policy = parts(objective.policy)
    lines = {
        "shaping": objective.shaping,
        "masks": objective.masks,
        "advantage": parts(objective.advantage),
        "corrections": objective.corrections,
        "weights": (objective.weights,),
        "ratio": tuple(t for t in policy if isinstance(t, Ratio)),
        "trust region": tuple(t for t in policy if not isinstance(t, Ratio)),
        "regularisers": objective.regularisers,
        "critic": () if objective.critic is None else (objective.critic,),
    }
    spelt = [f"{name:<13} {' -> '.join(map(repr, ts))}" for name, ts in lines.items() if ts]
    return Description("\n".join([*spelt, f"{'needs':<13} {_listed(objective.needs)}"]))


def token_gradient(
    objective: Objective, batch: Batch, logp: Float[Array, "B T"] | PolicyOutputs
) -> Float[Array, "B T"]:
    """∂loss/∂logp of each token: what an objective does with a batch.

    Args:
      objective: Any objective without batch-scoped terms.
      batch: The whole rollout batch, which is the optimizer batch too.
      logp: Live log-probabilities, or all of the live policy's outputs.

    Returns:
      The gradient, 0 outside the mask; negative where a step raises the token's probability.
    """
    outputs = logp if isinstance(logp, PolicyOutputs) else PolicyOutputs(logp)
    rows, _ = objective.prepare(batch)

    def loss(logp: Float[Array, "B T"]) -> Float[Array, ""]:
        return objective.loss(outputs.replace(logp=logp), rows, objective.init_state())[0]

    return jax.grad(loss)(outputs.logp)


def table() -> str:
    """Sets the named objectives side by side, as a Markdown table, from their code.

    Returns:
      One row an objective, with its defaults; arguments without a default are shown by name.
    """
    head = (
        "objective",
        "advantage",
        "critic",
        "ratio",
        "trust region",
        "KL (default β)",
        "shaping, masks, corrections",
        "weights",
        "prepare needs",
        "loss needs",
        "source",
    )
    lines = [_row(head), _row("---" for _ in head)]
    lines.extend(_row(_cells(make)) for make in named.ALL)
    return "\n".join(lines) + "\n"


def settings_matrix() -> dict[str, dict[str, str]]:
    """What becomes of each additional setting under each named objective, by trying all of them.

    Returns:
      By objective and setting: 'yes' (as it is), 'by response' (the sequence-level form),
      'instead of ...' (in place of the clipping window), or 'no: ' with the reason.
    """
    return {
        make.__name__: {name: _outcome(_plain(make), name) for name in additions.SETTINGS}
        for make in named.ALL
    }


def settings_table() -> str:
    """The matrix of `settings_matrix` as a Markdown table; reasons are numbered below it.

    Returns:
      One row an objective, one column a setting.
    """
    matrix, reasons = settings_matrix(), list[str]()
    lines = [_row(["objective", *(f"`{s}`" for s in additions.SETTINGS)])]
    lines.append(_row("---" for _ in range(len(additions.SETTINGS) + 1)))
    for objective, outcomes in matrix.items():
        cells = [f"`{objective}`"]
        for outcome in outcomes.values():
            if outcome.startswith("no: "):
                if outcome not in reasons:
                    reasons.append(outcome)
                outcome = f"no ({reasons.index(outcome) + 1})"
            cells.append(outcome)
        lines.append(_row(cells))
    notes = [f"{i}. `{reason.removeprefix('no: ')}`" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes]) + "\n"


def _outcome(objective: Objective, setting: str) -> str:
    """What `Objective.adding` makes of one setting."""
    (term,) = additions.additional(**{setting: 0.5})
    try:
        made = objective.adding(term)
    except InputError as refusal:
        return f"no: {refusal}"
    old = [*objective.corrections, *objective.masks, *objective.regularisers]
    new = [*made.corrections, *made.masks, *made.regularisers]
    (found,) = [t for t in new if t not in old]
    by_response = getattr(found, "level", "token") == "sequence"
    replaced = [t for t in parts(objective.policy) if t not in parts(made.policy)]
    said = ["by response"] if by_response else []
    said += [f"instead of `{type(t).__name__}`" for t in replaced]
    return ", ".join(said) or "yes"


def _plain(make: Callable[..., Objective]) -> Objective:
    """A named objective with its defaults."""
    return make(**_required(make))


def _required(make: Callable[..., Objective]) -> dict[str, float]:
    """Values for arguments without a default."""
    parameters = inspect.signature(make).parameters
    return {n: 1.0 for n, p in parameters.items() if p.default is inspect.Parameter.empty}


def _cells(make: Callable[..., Objective]) -> list[str]:
    parameters = inspect.signature(make).parameters
    required = _required(make)
    plain = make(**required)
    beta = parameters["beta"].default if "beta" in parameters else None
    with_kl = plain if beta is None else make(**required, beta=1.0)
    policy = parts(plain.policy)
    trust = [t for t in policy if not isinstance(t, Ratio)]
    return [
        f"`{make.__name__}`",
        _spelt(parts(plain.advantage)),
        _spelt(() if plain.critic is None else (plain.critic,)),
        _spelt([t for t in policy if isinstance(t, Ratio)]),
        _spelt(trust),
        _placed_kl(with_kl, beta),
        _spelt([*plain.shaping, *plain.masks, *plain.corrections]),
        _spelt([plain.weights], required),
        _listed(plain.prepare_needs),
        _listed(plain.loss_needs),
        ", ".join(
            f"[{number}](https://arxiv.org/abs/{number})"
            for number in dict.fromkeys(re.findall(r"arXiv:(\d+\.\d+)", make.__doc__ or ""))
        ),
    ]


def _placed_kl(objective: Objective, beta: float | None) -> str:
    places = [
        *(f"{t.estimator} in the reward" for t in objective.shaping if isinstance(t, kl_in_reward)),
        *(
            f"{'live ratio × ' if t.unbiased else ''}{t.estimator} in the loss"
            for t in objective.regularisers
            if isinstance(t, kl)
        ),
    ]
    return f"{', '.join(places)} ({beta:g})" if places else ""


def _spelt(transforms: Any, named_values: dict[str, float] | None = None) -> str:
    return ", ".join(f"`{_short(t, named_values or {})}`" for t in transforms)


def _short(transform: Any, named_values: dict[str, float]) -> str:
    """A transform with its arguments; switches at their default are left out."""
    arguments = []
    for field in fields(transform):
        value = getattr(transform, field.name)
        if value is None or (field.name in _QUIET and value == field.default):
            continue
        if field.name in named_values:
            shown = field.name
        elif isinstance(value, float):
            shown = "∞" if math.isinf(value) else f"{value:g}"
        else:
            shown = repr(value)
        arguments.append(f"{field.name}={shown}")
    return f"{type(transform).__name__}({', '.join(arguments)})"


_QUIET = frozenset(
    {"anchor", "center", "coef", "ddof", "eps", "keep_denominator", "level", "normalize"}
    | {"truncated", "weights"}
)


def _listed(needs: frozenset[str]) -> str:
    return ", ".join(sorted(needs)) or "nothing"


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def document() -> str:
    """The page docs/losses.md."""
    return _PAGE.format(table=table(), settings=settings_table())


def write(path: str | Path = "docs/losses.md") -> None:
    """Writes that page.

    Args:
      path: Where to, from the repository's root.
    """
    Path(path).write_text(document(), encoding="utf-8")


_PAGE = """\
# Objectives side by side

Generated from `rljax/losses/named.py` by
`python -c "from rljax.losses import views; views.write()"`; do not edit by hand.

An objective is maximised; the loss is a sum over tokens, `Σ -w·c·J + Σ penalties`. Read a row as:
where advantages come from, whether there is a critic, which ratio, what keeps the policy close,
where the KL to the reference is taken (and its default coefficient β; with 0 no reference is
needed), what is shaped, masked or corrected before, what a token weighs, and what must be supplied
to each half. Every name is a transform of `rljax.losses`; its docstring has the formula.

{table}
`old`, `rollout`, `ref`, `teacher`, `values`, `components` are the batch's `old_logp`,
`rollout_logp`, `ref_logp`, `teacher_logp`, `values` and `score_components`. `prepare` runs once on
a rollout batch and refuses a missing field; `loss` reads what it needs from the rows that `prepare`
made. Where only the loss needs `old`, it may be left out if each rollout batch gives one update:
the live policy is then its own anchor, and every ratio is 1.

## Additional settings

Settings that any objective may have (`Objective.adding`; in training, the flags of these names).
*yes*: as described for the term. *by response*: the objective has one ratio for a whole response,
so the term judges responses too: `truncated_is` takes the product of the importance weights over
the response, `top_entropy` ranks responses by the mean entropy of their tokens, `clip_cov` and
`kl_cov` go by the covariance of a response's advantage and its log-probability per token.
*instead of ...*: the term replaces that part of the trust region. *no*: refused, for the reason
below the table.

{settings}
## The loss is 0. Is it broken?

No. On the first update of a batch the live policy is the one that sampled, so every ratio is 1 and
nothing is clipped. Advantages that are centred in their group then cancel, and under
`sequence_mean` the loss is 0 (under `token_mean` it is not, where lengths differ). The gradient is
not 0, and the gradient is what trains: look at the reward, at `policy/grad_norm` and at
`group/frac_zero_std`.
"""
