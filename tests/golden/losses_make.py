"""Makes losses.json: advantages and losses of other systems for the batches that stand in it.

Needs Python with torch, verl 0.9.1 and trl 1.16.0 (nothing of rljax), and takes the inputs from the
file itself (mask, old, new, ref, mu, rewards, group, values: random numbers of two seeds), so that
running it again must give the same file up to rounding:

    python tests/golden/losses_make.py

All losses use the advantages of group_normalize (eps 1e-6). From verl: the advantages, dapo (clip
.2/.28, token mean), dapo_dual1_5 (dual clip 1.5), gspo (.02/.03), sapo, gmpo (.4/.4), dppo_tv
(δ .15 and cap 20, taken against mu) and kl_cov (coefficient 1, a tenth of the tokens). From TRL:
grpo_nokl and grpo_kl (clip .2, β 0 or .04, plain k3), grpo_kl_unbiased (live ratio × k3),
deepseek_v32 (the same, with the off-policy mask at .1 against mu), dr_grpo (constant 16),
cispo_cap2 and vespo.
"""

import collections
import json
import types
from pathlib import Path

import numpy as np
import torch
import verl.trainer.ppo.core_algos as verl
from trl.trainer.grpo_trainer import GRPOTrainer
from verl.trainer.config import AlgoConfig
from verl.workers.config import ActorConfig

FILE = Path(__file__).parent / "losses.json"


def advantages(case, rewards, mask):
    """verl's advantages, [8, 11] each, and GAE's returns."""
    group = np.array(case["group"])
    values = torch.tensor(case["values"])
    gae, returns = verl.compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
    config = AlgoConfig(gamma=0.99)
    found = {
        "group_normalize": verl.compute_grpo_outcome_advantage(rewards, mask, group),
        "group_center": verl.compute_grpo_outcome_advantage(
            rewards, mask, group, norm_adv_by_std_in_grpo=False
        ),
        "leave_one_out": verl.compute_rloo_outcome_advantage(rewards, mask, group),
        "reinforce_plus_plus": verl.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, config
        ),
        "reinforce_plus_plus_baseline": (
            verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, group)
        ),
        "gae": (gae,),
    }
    return {name: value[0] for name, value in found.items()}, returns * mask


def verl_losses(case, new, a, mask):
    """verl's policy losses by name."""
    old, mu = torch.tensor(case["old"]), torch.tensor(case["mu"])

    def config(low=0.2, high=0.2, dual=1e9, **policy):
        made = ActorConfig(
            strategy="fsdp",
            rollout_n=4,
            ppo_micro_batch_size_per_gpu=8,
            clip_ratio=low,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=dual,
        )
        for name, value in policy.items():
            object.__setattr__(made.policy_loss, name, value)
        return made

    def run(function, settings, mode, anchor=old):
        return function(anchor, new, a, mask, mode, settings)[0]

    by_sequence, by_token = "seq-mean-token-mean", "token-mean"
    return {
        "dapo": run(verl.compute_policy_loss_vanilla, config(0.2, 0.28), by_token),
        "dapo_dual1_5": run(verl.compute_policy_loss_vanilla, config(0.2, 0.28, 1.5), by_token),
        "gspo": run(verl.compute_policy_loss_gspo, config(0.02, 0.03), by_sequence),
        "sapo": run(verl.compute_policy_loss_sapo, config(), by_sequence),
        "gmpo": run(verl.compute_policy_loss_geo_mean, config(0.4, 0.4), by_sequence),
        "dppo_tv": run(verl.compute_policy_loss_dppo_tv, config(0.15, 0.15, 20.0), by_token, mu),
        "kl_cov": run(
            verl.compute_policy_loss_kl_cov, config(kl_cov_ratio=0.1, ppo_kl_coef=1.0), by_token
        ),
    }


def trl_loss(case, new, a, mask, loss_type, **settings):
    """TRL's loss, computed by its trainer's own method on a stand-in for the trainer."""
    trainer = types.SimpleNamespace(
        loss_type=loss_type,
        beta=settings.get("beta", 0.0),
        epsilon_low=0.2,
        epsilon_high=settings.get("epsilon_high", 0.2),
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=settings.get("threshold"),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        use_vllm=loss_type == "vespo",
        vllm_importance_sampling_correction=True,
        max_completion_length=16,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=types.SimpleNamespace(
            delta=None,
            use_bias_correction_kl=settings.get("unbiased", False),
            steps_per_generation=1,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
    )
    old, mu = torch.tensor(case["old"]), torch.tensor(case["mu"])
    nothing = torch.zeros((8, 0), dtype=torch.long)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": a[:, 0],
        "old_per_token_logps": old,
        "ref_per_token_logps": torch.tensor(case["ref"]),
        "sampling_per_token_logps": mu,
        "importance_sampling_ratio": torch.where(mask > 0, (old - mu).exp(), 1.0),
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def trl_losses(case, new, a, mask):
    """TRL's losses by name."""
    kinds = {
        "grpo_nokl": ("grpo", {}),
        "grpo_kl": ("grpo", {"beta": 0.04}),
        "grpo_kl_unbiased": ("grpo", {"beta": 0.04, "unbiased": True}),
        "deepseek_v32": ("grpo", {"beta": 0.04, "unbiased": True, "threshold": 0.1}),
        "dr_grpo": ("dr_grpo", {}),
        "cispo_cap2": ("cispo", {"epsilon_high": 2.0}),
        "vespo": ("vespo", {}),
    }
    return {
        name: trl_loss(case, new, a, mask, kind, **settings)
        for name, (kind, settings) in kinds.items()
    }


def remake(case):
    """A case with everything computed anew from its inputs."""
    mask = torch.tensor(case["mask"], dtype=torch.float32)
    last = mask.sum(1).long() - 1
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(8), last] = torch.tensor(case["rewards"])
    a, returns = advantages(case, rewards, mask)
    found = {}
    for losses in (verl_losses, trl_losses):
        new = torch.tensor(case["new"], requires_grad=True)
        for name, loss in losses(case, new, a["group_normalize"], mask).items():
            (gradient,) = torch.autograd.grad(loss, new, retain_graph=True)
            found[name] = {"value": loss.item(), "grad": (gradient * mask).tolist()}
    return {
        **case,
        "returns": returns.tolist(),
        "advantages": {name: value.tolist() for name, value in a.items()},
        "losses": found,
    }


if __name__ == "__main__":
    contents = json.loads(FILE.read_text())
    contents["cases"] = [remake(case) for case in contents["cases"]]
    FILE.write_text(json.dumps(contents) + "\n")
