"""Device memory: IPC handles, layouts, copy plans (pure), CPU and CUDA copies."""
