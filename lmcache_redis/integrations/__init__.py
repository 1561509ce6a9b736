"""Doors for engines. Each knows one engine; nothing below knows any."""
