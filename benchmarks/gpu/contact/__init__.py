# SPDX-License-Identifier: Apache-2.0
"""First contact with a GPU: parts that say what holds there, in the order of what they are worth.

    facts       what the driver says of itself and of the GPU, and the machine's limits
    raw         memory and signals between two processes, by the driver alone
    model       a small transformer whose prefix goes through the agent and comes back
    ipc_close   closing the memory of a process that was killed in the middle of a copy
    batch_soak  many batches of scattered copies, each compared
    copies      GB/s by page size: with the kernel, by direct copies, and by their fallbacks
    pieces      memory that is shared by descriptors (cumem, expandable segments), and `model`
    marked      pytest -m cuda
    order       random fills with late signals, each gather and scatter compared
    busy        gathers beside a process that computes, and what they cost that process
    stall       what a registration and the pinning of the host pool do to the agent's other threads

Each part is a process (`child`) with a limit. `run` starts them, prints their figures and writes
them to disk as they come: a part that hangs, crashes or is late costs only its own rest.

`exporter` is the other process of most parts; `load` that of `busy`. `figures` has the criteria.
`pack` makes the folder that a machine without a package index or a compiler needs.
"""
