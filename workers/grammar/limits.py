"""Limits within which grammars are compiled and followed, the same in a router and in a worker."""

from llguidance import LLParserLimits

# The compiler recurses as deeply as rules follow each other. What a router's check passes, with the smaller stack, a
# worker can compile.
CHECK_STACK_BYTES = 16 << 20
COMPILE_STACK_BYTES = 64 << 20

# A grammar that exceeds one ends with an error. Of one step: about 7 ms at most, before the others' masks are there.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=10_000,  # up to 2 KiB each, of every sequence
    max_grammar_size=200_000,
    verbose_errors=False,
)
