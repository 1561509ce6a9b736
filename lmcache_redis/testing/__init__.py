# SPDX-License-Identifier: Apache-2.0
"""For authors of a tier: tests of every promise of `tiers.Tier`, and a tier to try caches with.

tier_contract   `TierContract`: a class of tests to inherit from, for pytest
memory_tier     `MemoryTier`: the simplest tier that keeps the contract, and can be broken

Nothing else of the package imports these, and they import no test framework.
"""
