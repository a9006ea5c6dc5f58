"""Settings of traces, and OpenTelemetry's variables."""

import pytest

from diptych.workers.common.errors import ConfigError
from diptych.workers.telemetry.sampling import TraceSampler
from diptych.workers.telemetry.settings import TraceSettings, trace_settings
from diptych.workers.telemetry.trace_context import SpanContext, new_trace_id

ENDPOINT = "http://collector:4318"


@pytest.mark.parametrize(
    ("endpoint", "environ", "is_on"),
    [
        (None, {}, False),
        (ENDPOINT, {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ENDPOINT}, True),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (None, {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}, False),
        (ENDPOINT, {"OTEL_SDK_DISABLED": "true"}, False),
        (None, {"OTEL_SERVICE_NAME": "x"}, False),
    ],
)
def test_traces_are_off_unless_somebody_asks_for_them(
    endpoint: str | None, environ: dict[str, str], is_on: bool
) -> None:
    found = trace_settings(endpoint, None, None, environ)
    assert (found is not None) == is_on
    if found is not None:
        assert (found.endpoint, found.protocol) == (endpoint, "http/protobuf")


def test_settings_of_the_cluster_win_over_variables() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER": "always_off",
        "OTEL_BSP_MAX_QUEUE_SIZE": "7",
        "OTEL_BSP_SCHEDULE_DELAY": "250",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "3",
    }
    asked = trace_settings(ENDPOINT, "grpc", 0.5, environ)
    assert asked == TraceSettings("grpc", ENDPOINT, TraceSampler(0.5), 7, 3, 0.25)
    unasked = trace_settings(ENDPOINT, None, None, environ)
    assert unasked is not None
    assert (unasked.protocol, unasked.sampler) == ("http/protobuf", TraceSampler(0.0, follows_parent=False))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin': only otlp is there"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json': use"),
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "OTEL_TRACES_SAMPLER is 'jaeger_remote'"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1.5"}, "a ratio between 0 and 1"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "OTEL_BSP_MAX_QUEUE_SIZE is '0': it must be a whole number above 0"),
    ],
)
def test_wrong_variables_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trace_settings(None, None, None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT} | environ)


@pytest.mark.parametrize(
    ("name", "argument", "alone", "after_sampled", "after_unsampled"),
    [
        (None, None, 1.0, 1.0, 0.0),
        ("always_on", None, 1.0, 1.0, 1.0),
        ("always_off", None, 0.0, 0.0, 0.0),
        ("traceidratio", "0.25", 0.25, 0.25, 0.25),
        ("parentbased_always_off", None, 0.0, 1.0, 0.0),
        ("parentbased_traceidratio", "0.25", 0.25, 1.0, 0.0),
        ("parentbased_traceidratio", None, 1.0, 1.0, 0.0),
    ],
)
def test_samplers(
    name: str | None, argument: str | None, alone: float, after_sampled: float, after_unsampled: float
) -> None:
    environ = {"OTEL_TRACES_SAMPLER": name or "", "OTEL_TRACES_SAMPLER_ARG": argument or ""}
    settings = trace_settings(ENDPOINT, None, None, environ)
    assert settings is not None
    ids = [f"{new_trace_id()[:16]}{i << 54:016x}" for i in range(1024)]  # spread over the range of the last 64 bits
    for is_sampled, share in ((None, alone), (True, after_sampled), (False, after_unsampled)):
        parent = None if is_sampled is None else SpanContext("1" * 32, "1" * 16, is_sampled)
        assert sum(settings.sampler.samples(parent, each) for each in ids) == share * 1024
