"""How fast chunks move between memory and Redis, ours and the peers', side by side.

The way of one figure:

1. `run` starts a server and for each client a process of its own (`process`), so that each has
   its own memory, its own CPU time, and can be ended if it hangs.
2. `cases` says what is measured and in which order: clients take turns within each round.
3. `messages` carries one request at a time to the process (`worker`), which does the work with
   one client (`peers` says which there are; they are in `clients` and `ceiling`), and answers
   with the time it took.
4. `rows` keeps the samples and makes medians of them.
5. `compare` sets ours at its default setting beside each peer at its best, and beside the
   targets; `plot` draws that.
"""
