"""The order of a response's events as a state machine."""

from typing import Any

LAST = {"response.completed", "response.incomplete", "response.failed"}
# Of an item: events of its text, and the field that holds the whole text.
TEXT = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


def assert_order(events: list[Any]) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[:2]:
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
        assert event["response"]["usage"] is None
    assert events[-1]["type"] in LAST
    rest, items = events[2:-1], list[Any]()
    while rest:
        item, rest = _item(rest, len(items))
        items.append(item)
    final = events[-1]["response"]
    assert final["output"] == items and final["usage"] is not None
    assert {event["response"]["id"] for event in (*events[:2], events[-1])} == {final["id"]}
    assert all(item["status"] == "completed" for item in items[:-1])


def _item(events: list[Any], index: int) -> tuple[Any, list[Any]]:
    """Check the events of one item. Returns it, and the events after it."""
    added = events[0]
    assert added["type"] == "response.output_item.added" and added["output_index"] == index
    item = added["item"]
    kind, field = TEXT[item["type"]]
    has_part = item["type"] in ("message", "reasoning")
    assert item["status"] == "in_progress" and not item.get("content") and not item.get(field)
    end = next(i for i, event in enumerate(events) if event["type"] == "response.output_item.done")
    inner, done = events[1:end], events[end]
    assert done["output_index"] == index and done["item"]["id"] == item["id"]
    assert all((event["item_id"], event["output_index"]) == (item["id"], index) for event in inner)
    if has_part:
        assert all(event["content_index"] == 0 for event in inner)
        first, last, inner = inner[0], inner[-1], inner[1:-1]
        assert (first["type"], last["type"]) == ("response.content_part.added", "response.content_part.done")
        assert first["part"]["text"] == "" and done["item"]["content"] == [last["part"]]
    *deltas, whole = inner
    assert {event["type"] for event in deltas} <= {f"{kind}.delta"} and whole["type"] == f"{kind}.done"
    text = "".join(event["delta"] for event in deltas)
    assert whole[field] == text == (done["item"]["content"][0]["text"] if has_part else done["item"][field])
    if item["type"] == "function_call":
        assert whole["name"] == item["name"]
    if item["type"] == "message":
        logprobs = [each for event in deltas for each in event["logprobs"]]
        assert logprobs == whole["logprobs"] == done["item"]["content"][0]["logprobs"]
    return done["item"], events[end + 1 :]
