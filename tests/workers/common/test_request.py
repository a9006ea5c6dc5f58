from dataclasses import fields, replace

import pytest

from diptych.workers.common.errors import InvalidRequest
from diptych.workers.common.request import MAX_PREDICTION_TOKENS, SamplingParams

from ...support.sequences import make_request


def test_parameters_of_a_completion_differ_in_two_fields() -> None:
    given = SamplingParams(**{f.name: float(i) for i, f in enumerate(fields(SamplingParams)) if f.name != "logit_bias"})
    given = replace(given, logit_bias={3: 1.5})
    assert given.of_completion(71, 72) == replace(given, seed=71, max_tokens=72) != given


def test_a_prediction_is_bounded_and_of_the_vocabulary() -> None:
    predicted = replace(make_request([1, 2]), prediction=(3,) * MAX_PREDICTION_TOKENS)
    predicted.validate(4, 16)
    assert predicted.size == 2 + MAX_PREDICTION_TOKENS  # it is longer than the context
    for wrong in ((3,) * (MAX_PREDICTION_TOKENS + 1), (0, 4), (-1,)):
        with pytest.raises(InvalidRequest) as refused:
            replace(predicted, prediction=wrong).validate(4, 16)
        assert refused.value.param == "prediction"
