"""A sequence that joins a step which is launched ahead, as its runner computes it."""

from collections.abc import Sequence as SequenceOf

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.runner import Runner
from diptych.workers.core.sequence import KNOWN, Batch, SampledToken, ScheduledSequence, Sequence
from diptych.workers.kv.layout import blocks_for


def tokens_of_two(
    runner: Runner, prompts: SequenceOf[SequenceOf[int]], samplings: SequenceOf[SamplingParams], num_tokens: int
) -> list[list[int]]:
    """Tokens of two prompts. The second is computed first, and decodes on in the step that is launched while the first
    one's prompt is under way."""
    sequences: list[Sequence] = []
    next_block = 1
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        end = next_block + blocks_for(len(prompt) + num_tokens, runner.layout.block_size)
        request = Request(str(i), tuple(prompt), sampling, 600.0)
        table = list(range(next_block, end))
        sequences.append(Sequence(f"0/{i}", request, [*prompt], len(prompt), 600.0, i, block_table=table))
        next_block = end
    first, second = sequences
    found: dict[Sequence, list[int]] = {first: [], second: []}

    def accept(batch: Batch, sampled: SequenceOf[SampledToken]) -> None:
        for entry in batch.entries:
            entry.sequence.num_computed += entry.num_new
        for token in sampled:
            token.sequence.token_ids.append(token.token_id)
            found[token.sequence].append(token.token_id)

    prompt = Batch([ScheduledSequence(second, second.num_tokens)])
    accept(prompt, runner.launch(prompt).tokens())
    batch, previous_entries = Batch([ScheduledSequence(first, first.num_tokens)]), [0, KNOWN]
    under_way = runner.launch(batch)
    for _ in range(num_tokens - 1):
        ahead = Batch([ScheduledSequence(s, 1) for s in sequences], 2, previous_entries=previous_entries)
        launched = runner.launch(ahead)
        accept(batch, under_way.tokens())
        batch, under_way, previous_entries = ahead, launched, [0, 1]
    accept(batch, under_way.tokens())
    return list(found.values())
