"""Engine-neutral clients of the agent: one for an engine's scheduler, one for each worker."""
