# SPDX-License-Identifier: Apache-2.0
"""Processes for the demo, the benchmarks and the tests: as a user starts them.

agent.py      an agent in a process of its own
engine.py     a vLLM engine without a server, driven step by step over a socket (child.py)
processes.py  what ends with the command that started it
"""
