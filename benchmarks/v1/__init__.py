"""LLaMA-Factory's v1: its own strategies beside ours; see README of `benchmarks/`."""
