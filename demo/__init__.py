"""`scripts/demo`: the main job on this machine, with nothing but the package and vLLM.

model.py      writes a small model with random weights and a large KV cache per token
agent.py      an agent in a process of its own
engine.py     a vLLM engine in a process of its own, driven over a socket (child.py)
run.py        engine one computes, everything but Redis ends, engine two loads
report.py     the table, the plot and results.json

The benchmarks and the tests use `agent`, `engine` and `model` too.
"""
