"""The planner: what Online Dynamic Batching will bring on a recipe's data, before anything is trained."""
