"""Benchmark `train`: every way of batching through a whole training, same model, data and memory."""
