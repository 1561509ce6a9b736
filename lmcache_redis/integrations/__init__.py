# SPDX-License-Identifier: Apache-2.0
"""Connectors, one per engine. Only these modules know an engine."""
