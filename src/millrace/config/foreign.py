"""Other names of our keys: those of other frameworks, and our own former names.

An unknown key gets our present name as the suggestion.

docs/glossary.md has them in tables, with what differs.
"""

from __future__ import annotations

from typing import Any

FOREIGN = {
    ours: names.split()
    for ours, names in {
        "steps": (
            "max_steps total_training_steps total_train_steps num_train_epochs total_epochs max_epochs "
            "num_episodes num_rollout"
        ),
        "model.path": (
            "model_name_or_path pretrain model_name actor_rollout_ref hf_checkpoint tokenizer_path model_path"
        ),
        "model.dtype": "torch_dtype bf16 param_dtype",
        "model.recompute": (
            "gradient_checkpointing enable_gradient_checkpointing gradient_checkpointing_enable "
            "activation_checkpointing recompute_granularity ac"
        ),
        "task.path": (
            "dataset dataset_name train_files prompt_data prompt_dataset data_path data train_dataset"
        ),
        "task.prompt": "prompt_key input_key",
        "task.answer": "label_key ground_truth answer_key",
        "task.chat": "apply_chat_template",
        "reward.path": (
            "reward_funcs reward_fn custom_reward_function custom_rm_path remote_rm_url remote_url "
            "reward_function"
        ),
        "batch.prompts": (
            "batch_size train_batch_size rollout_batch_size per_device_train_batch_size ppo_mini_batch_size "
            "mini_batch_size generation_batch_size global_batch_size consumer_batch_size"
        ),
        "batch.group_size": "num_generations n n_samples n_samples_per_prompt rollouts_per_example",
        "batch.token_budget": (
            "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu micro_batch_size "
            "micro_train_batch_size gradient_accumulation_steps max_tokens_per_gpu max_tokens_per_mb"
        ),
        "sampling.max_tokens": (
            "max_completion_length max_completion_tokens max_new_tokens max_response_length response_length "
            "generate_max_len rollout_max_response_len"
        ),
        "rollout.max_sequence_tokens": (
            "max_prompt_length prompt_max_len max_model_len seq_len max_length max_len vllm_max_model_length "
            "rollout_max_context_len rollout_max_prompt_len"
        ),
        "rollout.slots": "max_num_seqs max_running_requests sglang_max_running_requests",
        "rollout.replicas": "vllm_num_engines num_engines num_rollout_workers num_infer_replicas",
        "algorithm.kind": "loss_type adv_estimator advantage_estimator estimator",
        "algorithm.kl": "beta kl_coef kl_loss_coef init_kl_coef init_coef kl_ctl",
        "algorithm.clip_low": "epsilon clip_ratio clip_ratio_low eps_clip clip_eps cliprange",
        "algorithm.clip_high": "epsilon_high clip_ratio_high eps_clip_low_high eps_clip_high eps_clip_higher",
        "algorithm.scale": "scale_rewards norm_adv_by_std_in_grpo disable_grpo_std_normalization no_std_norm",
        "algorithm.normalize": "loss_agg_mode",
        "algorithm.correction": (
            "vllm_importance_sampling_clip_max vllm_importance_sampling_cap rollout_is_threshold "
            "tis_imp_ratio_cap is_correction_threshold tis_clip"
        ),
        "algorithm.ratio": "importance_sampling_level",
        "algorithm.truncated": "mask_truncated_completions overlong_filter",
        "algorithm.overlong": "overlong_buffer overlong_buffer_len overlong_reward_penalty",
        "algorithm.entropy": "entropy_coeff entropy_coef ent_coef entropy_bonus",
        "algorithm.kl_estimator": "kl_loss_type kl_penalty kl_estimator_type",
        "algorithm.kl_in": "use_kl_in_reward use_kl_loss",
        "algorithm.clip_dual": "clip_ratio_c c_clip delta",
        "algorithm.correction_of": "rollout_is importance_sampling_mode",
        "algorithm.second_moment": "m2_threshold",
        "algorithm.resample": "dynamic_sampling filter_groups max_num_gen_batches",
        "algorithm.discount": "gamma",
        "algorithm.gae_lambda": "lam lambd",
        "algorithm.value_clip": "cliprange_value value_clip_range",
        "algorithm.value_lr": "critic_learning_rate critic_lr",
        "adapter.rank": "lora_r lora_rank",
        "adapter.alpha": "lora_alpha",
        "adapter.targets": "lora_target_modules target_modules",
        "batch.epochs": "ppo_epochs num_iterations update_epochs num_ppo_epochs",
        "batch.minibatches": "steps_per_generation ppo_n_minibatches num_mini_batches num_minibatches",
        "optimizer.rule": "optim optimizer_type",
        "optimizer.decay": "lr_scheduler_type lr_scheduler warmup_style lr_decay_style scheduler_type",
        "optimizer.decay_steps": "lr_decay_steps lr_decay_iters",
        "optimizer.lr_end": "min_lr_ratio min_lr min_lr_rate",
        "optimizer.lr": "learning_rate actor_learning_rate",
        "optimizer.betas": "adam_beta1 adam_beta2 adam_betas beta1 beta2 betas1 betas2",
        "optimizer.eps": "adam_epsilon",
        "optimizer.warmup_steps": (
            "lr_warmup_steps warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio warmup_steps_proportion"
        ),
        "optimizer.grad_clip": "max_grad_norm max_norm clip_grad gradient_clipping",
        "schedule.staleness_max": (
            "max_staleness max_off_policy_steps staleness_threshold max_head_offpolicyness async_queue_size "
            "max_async_level async_level"
        ),
        "checkpoints.every": "save_steps save_freq save_interval freq_steps interval",
        "checkpoints.keep": "save_total_limit max_actor_ckpt_to_keep max_ckpt_num max_num keep_last",
        "observe.wandb": "report_to logger use_wandb project_name project wandb_project",
    }.items()
}
"""Present names and, where a framework renamed a key, the former ones."""

OURS = {name: ours for ours, names in FOREIGN.items() for name in names}
"""Our keys, by the last part of the other framework's name."""

RENAMED = {"sampling.choices": "sampling.token_masks"}
"""Former names of our own keys. `config.json` of an older run may hold them."""


def with_present_names(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` of an older run, each former key under its present name."""
    for former, present in RENAMED.items():
        table, _, name = former.rpartition(".")
        if name in tree.get(table, {}):
            section = dict(tree[table])
            section[present.rpartition(".")[2]] = section.pop(name)
            tree = tree | {table: section}
    return tree
