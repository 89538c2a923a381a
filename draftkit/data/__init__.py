"""prepare: RL prompts to an in-domain drafting corpus, and the batches made from it."""
