"""What watches a run and writes it down.

Callbacks read what the steps return and the module's public `policy`, `iteration`, `max_iterations`
and `evaluation_report`. They write to the trainer's `default_root_dir`, the run folder.
"""
