# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo`: the main job on this machine, with nothing but the package and vLLM.

weights.py    SmolLM2-135M-Instruct as a folder, or a small model with random weights (model.py)
guide.py      long texts, and a question about each
agent.py      an agent in a process of its own
server.py     vLLM's server for OpenAI's API, and its client
run.py        engine one computes, everything but Redis ends, engine two loads
report.py     the tables, the plot and results.json

The benchmarks and the tests use `agent`, `model` and `engine` too: a vLLM engine without a server,
driven over a socket (child.py).
"""
