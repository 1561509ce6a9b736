"""Connections that speak RESP."""
