"""Pure algorithms of Online Dynamic Batching: no torch, no processes, no clock."""
