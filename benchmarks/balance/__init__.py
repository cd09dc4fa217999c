"""Lengths replayed through every way of batching: who keeps how many ranks busy with real tokens."""
