"""Engine-neutral adapters: what a scheduler and its workers say to the agent of their node."""
