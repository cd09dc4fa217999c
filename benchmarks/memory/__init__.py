"""Peak memory of the collate process under `window_bytes`, and what the bound costs in padding."""
