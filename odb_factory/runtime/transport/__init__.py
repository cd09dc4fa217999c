"""How bytes travel between the processes of a rank.

Whatever travels is serialised first (`runtime.serialise`). Small content goes through the pipe or socket itself. Of
large content only a reference does, and the receiver copies from the sender's memory:

- `connection`: messages through the socket between trainer and collate process
- `process_memory`: references to another process's memory, and reading it, which may be forbidden
- `shared_memory`: memory that the collate process and the trainer share, in which batches are made
- `samples`: from the workers into the window: pipe or process memory
- `batches`: from the collate process to the trainer: socket, process memory or shared memory

None leaves anything behind: no file, no descriptor for each tensor, nothing in `/dev/shm`.
"""
