"""`batching_strategy: odb` in LLaMA-Factory's v1 (`USE_V1=1 llamafactory-cli sft recipe.yaml`)."""

LOGGER = "llamafactory.v1.odb_factory"
"""Name of our logger: below v1's own, so that it has its handler and its level."""
