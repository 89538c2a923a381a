"""train-drafter: the loop, the optimizer, checkpoints."""
