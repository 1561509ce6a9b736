# SPDX-License-Identifier: Apache-2.0
"""How fast chunks move between memory and Redis, with our client and with others.

1. `run` starts a server, and for each client a process of its own (`process`), so that each has
   its own memory and CPU time, and can be killed if it hangs.
2. `cases` defines what is measured, and in which order: clients take turns within each round.
3. `messages` are the requests to a process (`worker`), which does the work with one client
   (listed in `peers`, defined in `client`, `clients` and `ceiling`) and answers with the time it
   took. `values` is the memory that chunks are stored from and loaded into.
4. `rows` keeps the samples and computes their medians.
5. `compare` compares ours at its default setting with each peer at its best, and with the
   targets; `plot` draws that.
"""
