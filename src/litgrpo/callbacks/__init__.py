"""Callbacks that show, record, adapt and limit a run.

They read `outputs["iteration"]`, an `Iteration`, which `GRPO.training_step` returns, and the public
attributes of the module (`litgrpo.protocol`). They write to the trainer's `default_root_dir`, the
run folder. Only `litgrpo.callbacks.adaptive` changes the training: coefficients of the objective.
"""
