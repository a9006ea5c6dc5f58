"""The official client of the `server` that a file of tests has."""

from collections.abc import Generator

import openai
import pytest

from ....support.front import Served


@pytest.fixture
def client(server: Served) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as it:
        yield it
