"""Numbers in the units a person reads."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """12s, 3m05s, 2h07m, 1d04h."""
    if not math.isfinite(seconds):
        return "n/a"
    s = max(0, round(seconds))
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"


def count(number: float) -> str:
    """950, 12.3k, 4.10M, 1.13B."""
    for limit, unit, digits in ((1e9, "B", 2), (1e6, "M", 2), (1e3, "k", 1)):
        if abs(number) >= limit:
            return f"{number / limit:.{digits}f}{unit}"
    return f"{number:.0f}"


def size(n_bytes: float) -> str:
    """Bytes in the unit a person reads: 512 MiB, 1.05 GiB."""
    for limit, unit, digits in ((2**30, "GiB", 2), (2**20, "MiB", 0), (2**10, "KiB", 0)):
        if abs(n_bytes) >= limit:
            return f"{n_bytes / limit:.{digits}f} {unit}"
    return f"{n_bytes:.0f} B"
