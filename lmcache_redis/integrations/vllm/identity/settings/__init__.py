"""Every setting of the supported versions of vLLM, with a verdict.

    pairs     in the identity, or refused
    left_out  changes no byte of a chunk, and why
    reading   the values of an engine

Settings are named by the class of vllm.config that has them. ``environment`` stands for the
variables of vllm.envs, ``os.environ`` for those that kernels read without it. A test compares the
tables with the installed vLLM, and ``scripts/test --matrix`` with each supported version: a setting
without a verdict fails.
"""
