"""Online Dynamic Batching for `transformers.Trainer`; knows nothing of LLaMA-Factory."""
