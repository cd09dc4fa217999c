"""Processes, communication and the data loader; works without transformers and without LLaMA-Factory."""
