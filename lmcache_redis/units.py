# SPDX-License-Identifier: Apache-2.0
"""Ages, sizes and names, as people read them. `settings` has sizes as they are typed."""

from __future__ import annotations

from typing import Any


def shown_age(seconds: float) -> str:
    """An age in the largest suitable unit: 45 s, 12 min, 3.5 h, 8.0 days."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:.1f} days"


def shown_bytes(size_bytes: float) -> str:
    """Two or three digits and a binary unit: 128 KiB, 1.5 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        value = size_bytes / 1024**power
        if value >= 1:
            return f"{value:.{0 if value >= 100 or value % 1 == 0 else 1}f} {unit}"
    return f"{size_bytes:.0f} bytes"


def gigabytes(size_bytes: float) -> str:
    """Decimal gigabytes, as networks count: 1.05 GB."""
    return f"{size_bytes / 1e9:.2f} GB"


def printable(text: str) -> str:
    """The text with control characters escaped: a terminal does what others write."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_document(found: Any) -> Any:
    """A JSON document with every text `printable`."""
    if isinstance(found, str):
        return found if found.isprintable() else printable(found)
    if isinstance(found, dict):
        return {printable(str(name)): printable_document(each) for name, each in found.items()}
    if isinstance(found, list):
        return [printable_document(each) for each in found]
    return found
