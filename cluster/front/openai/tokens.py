"""Tokens and their log-probabilities as OpenAI's answers write them."""

from dataclasses import dataclass
from typing import Any

from ...tokens.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's number for "never": JSON has no infinity

Json = dict[str, Any]


def finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names of tokens in log-probabilities: their texts, or their ids."""

    tokenizer: Tokenizer
    as_ids: bool

    def legacy(self, token_id: int) -> str:
        """A token's text; where it is none by itself, its bytes as OpenAI writes them: "bytes:\\xe2\\x82"."""
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
