# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench packing`: how much shorter packed payloads are, and how fast packing is."""
