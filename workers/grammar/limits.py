"""Limits within which grammars are compiled and followed, the same in a router and in a worker."""

from llguidance import LLParserLimits

# A grammar that exceeds one ends with an error. Of one step: about 7 ms at most, before the others' masks are there.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=10_000,  # up to 2 KiB each, of every sequence
    max_grammar_size=200_000,
    verbose_errors=False,
)
