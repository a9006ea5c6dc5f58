"""What of the drafts of a step's sequences goes to a router."""

from diptych.proto import worker_pb2
from diptych.workers.common.request import FinishReason
from diptych.workers.engine.events import StepTokens, TokenNote
from diptych.workers.server.step_events import step_events


def test_verified_drafts_are_sent_with_the_entry_that_they_are_noted_at() -> None:
    tokens = StepTokens(["a", "a", "b", "c"], [5, 6, 7, 8], [1, 2, 9, 4])
    tokens.notes = {
        1: TokenNote(num_drafted=4, num_accepted=1),
        2: TokenNote(num_cached=3, num_stored=8, num_pulled=2),
        3: TokenNote(FinishReason.STOP, num_drafted=2),
    }
    message = step_events(7, tokens, [1, 2, 3], [71, 72, 73])
    assert list(message.verified) == [
        worker_pb2.Verified(entry=0, num_drafted=4, num_accepted=1),
        worker_pb2.Verified(entry=2, num_drafted=2),
    ]
    assert list(message.cached) == [worker_pb2.CachedTokens(entry=1, num_tokens=3, num_stored=8, num_pulled=2)]
    assert [(event.key, event.num_drafted, event.num_accepted) for event in tokens] == [
        ("a", 0, 0),
        ("a", 4, 1),
        ("b", 0, 0),
        ("c", 2, 0),
    ]
