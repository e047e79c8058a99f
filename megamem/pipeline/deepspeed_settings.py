"""What DeepSpeed is told."""

from __future__ import annotations

from typing import Any

from megamem.config.run import RunConfig

BUCKET = 2**25
"""Elements of the buffers through which ZeRO sums gradients and gathers weights: 128 MiB in FP32. DeepSpeed's own
default is 2 GB for each."""
LIVE = 10**9
"""Parameters that ZeRO 3 leaves gathered at most, in the hope that they are soon used again."""


def deepspeed_config(config: RunConfig, backwards: int) -> dict[str, Any]:
    """Return what DeepSpeed is told; everything it would otherwise assume is written out.

    backwards: calls of its `backward` in an optimizer step.
    """
    parallel, training = config.parallel, config.training
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": backwards,
        "gradient_clipping": config.optimizer.grad_clip if parallel.zero_stage else 0.0,  # see _clip_plain
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": parallel.zero_stage,
            # its own overlap waits for the device bucket by bucket; see gradient_sums.py
            "overlap_comm": False,
            "contiguous_gradients": True,
            # gradients go to the rank that updates them alone: half of an all-reduce's bytes
            "reduce_scatter": True,
            "use_multi_rank_bucket_allreduce": False,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": LIVE,
            "stage3_max_reuse_distance": LIVE,
            "stage3_param_persistence_threshold": 0,
        },
    }
    if training.precision == "bf16":
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
