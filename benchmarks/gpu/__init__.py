"""One CUDA GPU: Standard, packing, the public package and ODB train a model of Qwen3-VL-2B's shape."""
