"""Device memory: where chunks enter and leave an engine's paged KV cache.

1. A worker exports its KV cache: `blocks` finds the segments of its tensors; `cpu` or `cuda_ipc`
   makes the handles. Segments, `layout` and `handles` go to the agent.
2. The agent opens them (`context`): `mapping` maps shared memory, `cuda_ipc` memory of a GPU.
3. A gather or a scatter on the CPU: `plan` lists the copies of a chunk, `cpu` runs them.
4. On a GPU: `table` drives `cuda_kernels`, or `cuda_copies` uses torch alone; `cuda` orders
   kernels, copies to slots and the engine's events on CUDA streams.
"""
