"""Keys of answers of the gRPC API, and the numbers of their messages."""

from ....proto import inference_pb2
from ....workers.common.errors import InvalidRequest
from ..retries.answer_key import AnswerKey


def key_of_message(request: inference_pb2.GenerateRequest, owner: str) -> AnswerKey | None:
    """Key of a call; None: it has none. `owner`: name of its API key. Raises InvalidRequest."""
    key, num_seen = request.idempotency_key, request.last_event_id
    if not key:
        if num_seen:
            raise InvalidRequest("last_event_id needs the idempotency_key of the call that it continues")
        return None
    asked = inference_pb2.GenerateRequest()
    asked.CopyFrom(request)
    asked.ClearField("idempotency_key")
    asked.ClearField("last_event_id")
    asked.ClearField("timeout_s")  # a client that asks again has less time left
    return AnswerKey.of(key, owner, b"grpc\n", asked.SerializeToString(deterministic=True), num_seen=num_seen)


class MessageIds:
    """Numbers of the messages of an answer; those that the client has seen are left out."""

    def __init__(self, key: AnswerKey | None) -> None:
        self._key = key
        self._num = 0

    def add_to(self, message: inference_pb2.GenerateResponse) -> bool:
        """Number a message, where the answer has a key. Returns whether it is to be sent."""
        if self._key is None:
            return True
        self._num += 1
        message.event_id = self._num
        return self._num > self._key.num_seen
