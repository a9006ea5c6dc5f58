"""Counts as a person writes them."""


def count(number: int, noun: str, nouns: str | None = None) -> str:
    """`1 worker`, `2 workers`. `nouns`: the plural, where it is not the noun and an s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"
