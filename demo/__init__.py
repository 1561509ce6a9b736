# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo`: the main job on this machine, with nothing but the package and vLLM.

weights.py    SmolLM2-135M-Instruct as a folder, or a small model with random weights (model.py)
guide.py      long texts, and a question about each
server.py     vLLM's server for OpenAI's API, and its client
run.py        engine one computes, everything but Redis ends, engine two loads
report.py     the tables, the plot and results.json

The agent's process is that of `testkit`, which the benchmarks and the tests use too.
"""
