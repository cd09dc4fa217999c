"""Public datasets made ready for LLaMA-Factory: fetched or read from a local copy, converted, checked, reported."""
