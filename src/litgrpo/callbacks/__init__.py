"""Callbacks that show, record and limit a run.

They read what the steps return (`rollout`, `rewards`, `advantages`, `reports`) and the module's
public `policy`, `iteration`, `max_iterations` and `evaluation_report`, and change none of it. They
write to the trainer's `default_root_dir`, the run folder.
"""
