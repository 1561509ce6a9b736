"""Device memory: copies between an engine's paged KV cache and slots.

1. A worker exports its KV cache: `blocks` finds the segments of its tensors; `cpu` or `cuda_ipc`
   makes the handles. The worker sends a `layout` (the segments) and the `handles` to the agent.
2. The agent opens them (`context`): `cpu` maps shared memory, `cuda_ipc` maps GPU memory.
3. A gather or a scatter on the CPU: `calls` lists the copies of a chunk, `cpu` makes them.
4. On a GPU: `table` drives `cuda_kernels`, which `cuda_copies` chooses or refuses; `cuda` orders
   kernels, copies to slots and the engine's events on CUDA streams.
5. `distance` compares what was gathered with what is in other slots.
"""
