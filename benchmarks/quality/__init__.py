"""What the way of batching does to what a model learns: loss and exact answers after the same samples."""
