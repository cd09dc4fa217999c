"""`batching_strategy: odb` in LLaMA-Factory's v1 (`USE_V1=1 llamafactory-cli sft recipe.yaml`)."""
