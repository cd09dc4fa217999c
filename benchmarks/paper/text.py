"""Names and numbers as the tables show them."""

from __future__ import annotations

from benchmarks.rows import Row, Value, hardware_in_words

NAMES = {"ultrachat": "UltraChat", "llava": "LLaVA", "sharegpt4o": "ShareGPT4o", "mm_mix": "MM-Mix", "all": "all three"}


def place(row: Row) -> str:
    """Model, nodes and, where it is not the paper, the source of a row."""
    settings = row.settings
    words = f"{settings['model']}, {settings['nodes']} node{'' if settings['nodes'] == 1 else 's'}"
    return words + (", public package" if settings.get("source") == "public" else "")


def hardware_of(row: Row) -> str:
    """What it was measured on; a row that was read from another run says so itself."""
    return str(row.settings.get("hardware") or hardware_in_words(row))


def number(value: Value) -> float:
    assert isinstance(value, int | float), value
    return float(value)


def short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def span(low: Value, high: Value) -> str:
    if low is None or high is None:
        return ""
    first, last = short(number(low)), short(number(high))
    return first if first == last else f"{first} to {last}"
