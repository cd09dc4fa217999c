"""The planner: predicts what Online Dynamic Batching gains on a recipe's data, before any training."""

MOST_SEED = 2**32 - 1
"""numpy's largest seed; LLaMA-Factory seeds numpy, too."""
