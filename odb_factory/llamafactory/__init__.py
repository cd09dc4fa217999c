"""Glue between LLaMA-Factory and the rest of the package; loaded only in a process that imports `llamafactory`."""
