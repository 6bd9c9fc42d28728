"""Amounts of memory as `oomph` prints them."""

from __future__ import annotations


def show_size(count: float) -> str:
    """Three significant digits, as in the tables of `oomph`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            value = count / unit
            decimals = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{decimals}f} {name}"
    return f"{int(count)} B"
