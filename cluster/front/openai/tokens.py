"""Writes tokens and their log-probabilities in the form of OpenAI's answers."""

from dataclasses import dataclass
from typing import Any

from ...tokens.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's value for probability 0: JSON has no infinity

Json = dict[str, Any]


def finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names of tokens in log-probabilities: texts or ids."""

    tokenizer: Tokenizer
    as_ids: bool

    def legacy(self, token_id: int) -> str:
        """Text of a token; where its bytes are no text, the bytes as OpenAI writes them: "bytes:\\xe2\\x82"."""
        if self.as_ids:
            return f"token_id:{token_id}"
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def text(self, token_id: int) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_bytes(token_id).decode(errors="replace")

    def chat(self, token_id: int) -> Json:
        return {"token": self.text(token_id), "bytes": list(self.tokenizer.token_bytes(token_id))}
