"""draftkit: speculative drafters for RL rollouts, from corpus to measured speedup."""

__version__ = "0.1.0"
