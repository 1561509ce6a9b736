# SPDX-License-Identifier: Apache-2.0
"""Device memory: copies between an engine's paged KV cache and slots.

1. A worker exports its KV cache: `blocks` finds the segments of its tensors; `cpu` or `export`
   makes the handles. The worker sends a `layout` (the segments) and the `handles` to the agent.
2. The agent opens them (`context`): `cpu` maps shared memory, `mapping` maps GPU memory.
3. A gather or a scatter on the CPU: `calls` lists the copies of a chunk, `cpu` makes them.
4. On a GPU: `cuda` waits for the engine's `signals` and moves chunks by `moving`, with copies or
   with `kernels`, on the streams of a `gpu`. Everything goes through the `driver`.
5. `distance` compares what was gathered with what is in other slots.
"""
