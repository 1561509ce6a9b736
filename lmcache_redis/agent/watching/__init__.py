"""What schedulers are told of chunks that come and go, for events to routers.

    watches   keeps the open WATCH of each scheduler, and answers it
    journal   what one scheduler has not been told yet

Nothing here runs, and the pool notes nothing, unless a scheduler watches.
"""
