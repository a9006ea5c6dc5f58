from dataclasses import fields, replace

from diptych.workers.common.request import SamplingParams


def test_parameters_of_a_completion_differ_in_two_fields() -> None:
    given = SamplingParams(**{f.name: float(i) for i, f in enumerate(fields(SamplingParams)) if f.name != "logit_bias"})
    given = replace(given, logit_bias={3: 1.5})
    assert given.of_completion(71, 72) == replace(given, seed=71, max_tokens=72) != given
