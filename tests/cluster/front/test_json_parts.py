"""Answers as JSON: in one go, or in parts."""

from diptych.cluster.front.json_parts import to_json, to_small_json


async def test_a_small_answer_is_written_as_a_large_one_is() -> None:
    answer = {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": 'é "x"\n', "logprobs": None, "token_ids": [1, 2], "empty": [], "none": {}}],
        "usage": {"prompt_tokens": 3, "timings": [{"total_s": 0.125}]},
    }
    assert to_small_json(answer) == await to_json(answer)
