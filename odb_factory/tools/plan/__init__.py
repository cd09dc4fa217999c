"""The planner: predicts what Online Dynamic Batching gains on a recipe's data, before any training."""
