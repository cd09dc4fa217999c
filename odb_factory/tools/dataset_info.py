"""LLaMA-Factory's `dataset_info.json`: names that several parts need; imports nothing."""

INFO_NAME = "dataset_info.json"

ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys of an entry that say that its data lie elsewhere than in a local file; LLaMA-Factory prefers them."""
