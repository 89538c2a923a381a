"""`draftkit rl`: GRPO with speculative rollouts, and a drafter that keeps up with the policy."""
