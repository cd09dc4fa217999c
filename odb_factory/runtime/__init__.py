"""Processes, communication and the data loader; works without transformers and without LLaMA-Factory.

A sample's way, one module for each stage:

1. `worker`: reads and observes one sample, serialises it (DataLoader workers)
2. `window`: reads ahead and holds what was read (a thread of the collate process)
3. `rounds`: groups the window, aligns with the other ranks (`exchange`), collates (main thread of the collate process)
4. `session`: receives the batches (the trainer process); `loader` hands them to the training loop

`collate_process` is where 2 and 3 run, `transport` how bytes get from one process to the next.
"""
