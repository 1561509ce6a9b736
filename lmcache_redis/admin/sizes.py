"""Sizes, rates and times as people read them."""

from __future__ import annotations


def shown_bytes(size_bytes: float) -> str:
    """Two or three digits and a binary unit: 128 KiB, 1.5 GiB."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            value = size_bytes / factor
            return (
                f"{value:.0f} {unit}" if value >= 100 or value % 1 == 0 else f"{value:.1f} {unit}"
            )
    return f"{size_bytes:.0f} bytes"


def gigabytes(size_bytes: float) -> str:
    """Decimal gigabytes, as networks count: 1.05 GB."""
    return f"{size_bytes / 1e9:.2f} GB"


def shown_age(seconds: float) -> str:
    """The largest unit that fits, in words that sort by eye: 45 s, 12 min, 3.5 h, 8 days."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:.1f} days"
