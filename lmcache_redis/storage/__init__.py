"""Tiers of chunks, each usable alone.

interface   what every tier can do
tensors     tensors as bytes and back
"""
