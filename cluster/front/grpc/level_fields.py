"""Level of a gRPC call, of the fields that Generate and Embed share."""

from collections.abc import Mapping

from ....proto import inference_pb2
from ....workers.common.errors import InvalidRequest
from ....workers.common.wire import times_of_level
from ...common.config import Admission
from ..levels import AskedLevel

_ADMISSION: Mapping[int, Admission | None] = {
    inference_pb2.ADMISSION_UNSPECIFIED: None,
    inference_pb2.ADMISSION_WAIT: "wait",
    inference_pb2.ADMISSION_REFUSE: "refuse",
}


def level_of(request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest) -> AskedLevel:
    """Level that a call asks for. Raises InvalidRequest."""
    if request.admission not in _ADMISSION:
        raise InvalidRequest("admission must be ADMISSION_WAIT, ADMISSION_REFUSE or absent", param="admission")
    ttft_s, tpot_s = times_of_level(request.level)
    return AskedLevel(request.service_tier or None, ttft_s, tpot_s, _ADMISSION[request.admission])
