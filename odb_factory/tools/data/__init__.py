"""Prepares public datasets for LLaMA-Factory: download or local copy, conversion, checks, report."""
