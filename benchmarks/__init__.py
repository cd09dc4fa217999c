"""Measurements of Online Dynamic Batching; each module runs as `python -m benchmarks.NAME`."""
