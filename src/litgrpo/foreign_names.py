"""Names of options in TRL, verl and transformers, for messages that name those of litgrpo."""

# {option: its names in TRL (GRPOConfig, arguments of GRPOTrainer), verl and transformers}. The last
# segments count: `num_generations`, `model.num_generations` and `actor_rollout_ref.rollout.n`.
FOREIGN_NAMES = {
    "run_dir": "output_dir out_dir folder default_local_dir experiment_name",
    "ckpt_path": "resume resume_from_checkpoint resume_from_path",
    "seed_everything": "seed",
    "model.pretrained": "model_name_or_path pretrained_model model",
    "model.rewards": "reward_funcs custom_reward_function custom_reward_function.path",
    "model.save_rollouts": "rollout_data_dir",
    "model.rewards.NAME.weight": "reward_weights",
    "model.group_size": "num_generations rollout.n group_size",
    "model.max_completion_length": "max_new_tokens max_completion_length response_length "
    "max_response_length",
    "model.max_iterations": "max_steps total_training_steps max_iterations",
    "model.optimizer": "optim weight_decay adam_beta1 adam_beta2 adam_epsilon",
    "model.optimizer.lr": "lr learning_rate optim.lr",
    "model.lr_scheduler": "lr_scheduler_type warmup_steps warmup_ratio",
    "model.lora": "peft_config lora_config",
    "model.lora.rank": "lora_rank lora_r r",
    "model.lora.alpha": "lora_alpha",
    "model.environment": "tools environment_factory multi_turn",
    "model.episode.max_turns": "max_tool_calling_iterations",
    "model.engine": "use_vllm vllm_mode cache_implementation vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout",
    "model.sampling": "generation_kwargs",
    "model.sampling.temperature": "temperature",
    "model.sampling.top_p": "top_p",
    "model.sampling.top_k": "top_k",
    "model.sampling.min_p": "min_p",
    "model.evaluation": "val_kwargs",
    "model.evaluation.num_samples": "num_generations_eval",
    "model.objective.kl_coef": "beta kl_coef kl_loss_coef use_kl_loss",
    "model.objective.kl_estimator": "kl_loss_type",
    "model.objective.kl_in_reward": "use_kl_in_reward kl_ctrl kl_ctrl.kl_coef kl_penalty",
    "model.objective.kl_bias_correction": "use_bias_correction_kl",
    "model.objective.surrogate": "loss_mode clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio "
    "ppo_kl_coef",
    "model.objective.log_ratio_coef": "dro_beta",
    "model.objective.surrogate.clip_low": "epsilon clip_ratio clip_ratio_low cliprange",
    "model.objective.surrogate.clip_high": "epsilon_high clip_ratio_high",
    "model.objective.surrogate.max_ratio": "delta clip_ratio_c",
    "model.objective.loss_aggregation": "loss_type loss_agg_mode",
    "model.objective.advantages": "adv_estimator multi_objective_aggregation",
    "model.objective.advantages.scale": "scale_rewards norm_adv_by_std_in_grpo",
    "model.objective.importance_sampling_level": "importance_sampling_level",
    "model.objective.importance_correction": "vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode calculate_log_probs",
    "model.objective.mask_truncated_completions": "mask_truncated_completions",
    "model.objective.top_entropy_quantile": "top_entropy_quantile",
    "model.objective.off_policy_mask_threshold": "off_policy_mask_threshold",
    "model.objective.entropy_coef": "entropy_coef entropy_coeff",
    "model.controllers.entropy": "use_adaptive_entropy entropy_target entropy_coef_delta "
    "entropy_coef_max",
    "model.controllers.reference": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    "model.update.epochs_per_rollout": "num_iterations ppo_epochs",
    "model.update.num_mini_batches": "steps_per_generation ppo_mini_batch_size",
    "model.update.micro_batch_size": "ppo_micro_batch_size_per_gpu micro_batch_size",
    "model.update.micro_batch_tokens": "gradient_accumulation_steps use_dynamic_bsz "
    "ppo_max_token_len_per_gpu",
    "model.update.max_grad_norm": "max_grad_norm grad_clip",
    "model.dynamic_sampling_attempts": "filter_groups",
    "model.overlong_buffer_frac": "overlong_buffer",
    "model.precision.dtype": "torch_dtype dtype model_init_kwargs",
    "model.precision.disable_dropout": "disable_dropout",
    "model.precision.gradient_checkpointing": "gradient_checkpointing "
    "enable_gradient_checkpointing",
    "data.train": "train_files dataset train_dataset",
    "data.val": "val_files eval_dataset",
    "data.batch_size": "batch_size train_batch_size per_device_train_batch_size "
    "generation_batch_size",
    "data.max_prompt_length": "max_prompt_length",
    "data.long_prompts": "filter_overlong_prompts",
    "data.shuffle": "shuffle_dataset",
    "data.pad_to_multiple_of": "pad_to_multiple_of",
    "data.chat": "chat_template_kwargs",
    "data.tokenizer": "processing_class tokenizer_name_or_path",
    "trainer.max_epochs": "num_train_epochs total_epochs",
    "trainer.logger": "project_name report_to",
    "trainer.precision": "bf16 fp16",
    "trainer.log_every_n_steps": "logging_steps",
    "trainer.val_check_interval": "eval_strategy eval_steps test_freq",
    "trainer.devices": "n_gpus_per_node",
    "trainer.num_nodes": "nnodes",
    "checkpoint.every_n_iterations": "save_steps save_freq",
    "checkpoint.keep_last": "save_total_limit",
    "completions.every_n_iterations": "log_completions",
    "completions.num_prompts": "num_completions_to_print",
}
# {foreign name: option}
OTHER_NAMES = {name: key for key, names in FOREIGN_NAMES.items() for name in names.split()}
OTHER_NAMES["model.path"] = "model.pretrained"  # verl: actor_rollout_ref.model.path


def other_name(key: str) -> str:
    """Return the name in litgrpo of an option of TRL, verl or transformers; "" if it is none.

    Example:
        >>> other_name("model.num_generations"), other_name("actor_rollout_ref.rollout.n")
        ('model.group_size', 'model.group_size')
    """
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((OTHER_NAMES[each] for each in ends if each in OTHER_NAMES), "")
