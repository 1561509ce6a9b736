"""First contact with a GPU: three calls of at most nine minutes that say what holds there.

    raw      memory and signals between two processes, by the driver alone
    model    a small transformer whose prefix goes through the agent and comes back
    stall    what a registration and the pinning of the host pool do to the agent's other threads
    copies   GB/s by page size: with the kernel, by direct copies, and by their fallbacks
    busy     the same beside a process that computes, and what it costs that process
    order    random fills with late signals, each gather and scatter compared

`exporter` is the other process of `raw`, `stall` and `order`; `load` that of `busy`. `figures` has
the criteria. The machine needs one GPU and torch, and no network (`figures.CARRIED`).
"""
