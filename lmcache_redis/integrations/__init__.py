"""Connectors, one per engine. Only these modules know an engine."""
