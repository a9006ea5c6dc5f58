"""Messages of the tokens of a step: columns become messages as they are; only the notes are read one by one."""

from ...proto import worker_pb2
from ..common.wire import FINISH_TO_PROTO
from ..engine.events import StepTokens, TokenNote
from .router_links import RouterLinks, parts_of


def send_tokens(links: RouterLinks, step: int, tokens: StepTokens) -> None:
    """Send the tokens of a step: columns become messages as they are; only the notes are read one by one."""
    by_link: dict[int, tuple[list[int], list[int]]] = {}  # entries, handles
    for entry, key in enumerate(tokens.keys):
        number, handle = parts_of(key)
        entries, handles = by_link.setdefault(number, ([], []))
        entries.append(entry)
        handles.append(handle)
    for number, (entries, handles) in by_link.items():
        link = links.at(number)
        if link is not None:
            link.send(worker_pb2.WorkerMessage(step=step_events(step, tokens, entries, handles)))
            for entry in entries:
                if entry in tokens.notes and tokens.notes[entry].finish is not None:
                    link.keys.pop(tokens.keys[entry], None)


def step_events(step: int, tokens: StepTokens, entries: list[int], handles: list[int]) -> worker_pb2.StepEvents:
    """Make the message with the tokens of these entries."""
    message = worker_pb2.StepEvents(
        step=step,
        handles=handles,
        token_ids=[tokens.token_ids[i] for i in entries],
        positions=[tokens.positions[i] for i in entries],
        finish_reasons=[FINISH_TO_PROTO[None]] * len(entries),
    )
    if tokens.notes:
        for row, entry in enumerate(entries):
            note = tokens.notes.get(entry)
            if note is not None:
                _add_note(message, row, note)
    return message


def _add_note(message: worker_pb2.StepEvents, row: int, note: TokenNote) -> None:
    message.finish_reasons[row] = FINISH_TO_PROTO[note.finish]
    if note.logprob is not None:
        message.logprobs.append(
            worker_pb2.TokenLogprobs(
                entry=row,
                logprob=note.logprob,
                top_token_ids=[i for i, _ in note.top],
                top_logprobs=[p for _, p in note.top],
            )
        )
    if note.num_cached is not None:
        message.cached.add(
            entry=row, num_tokens=note.num_cached, num_stored=note.num_stored, num_pulled=note.num_pulled
        )
    if note.timings is not None:
        message.timings.append(note.timings.to_proto(row))
    if note.num_drafted:
        message.verified.append(
            worker_pb2.Verified(entry=row, num_drafted=note.num_drafted, num_accepted=note.num_accepted)
        )
