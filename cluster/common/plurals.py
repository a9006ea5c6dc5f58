"""Counts as a person writes them."""


def count(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`. `noun`: one whose plural is itself and an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
