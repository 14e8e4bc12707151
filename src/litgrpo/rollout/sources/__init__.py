"""Sources of rollouts: where the completions come from that an iteration trains on."""
