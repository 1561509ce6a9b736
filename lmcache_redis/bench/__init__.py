"""Benchmarks: what is claimed about speed comes from here, with the machine named."""
