"""The processes that read prompts, as the router starts and ends them."""

import asyncio

import psutil

from diptych.cluster.tokens.prompt_encoder import PromptEncoder
from diptych.cluster.tokens.prompt_encoding import ChatPrompt
from diptych.cluster.tokens.task_process import ProcessLimits
from diptych.workers.common.errors import Unavailable

from ...support.front import CONTEXT, byte_tokenizer

LOOP = "{% for i in range(99999) %}"
ENDLESS = LOOP * 3 + "{% endfor %}" * 3
CHAT = ChatPrompt([{"role": "user", "content": "hi"}])


async def test_no_process_starts_for_a_chat_that_waits_while_the_encoder_is_closed() -> None:
    children = psutil.Process().children
    before = len(children())
    encoder = PromptEncoder(byte_tokenizer(ENDLESS), ProcessLimits())
    await encoder.start()
    asks = [asyncio.create_task(encoder.encode_chat(CHAT, CONTEXT)) for _ in range(2)]
    for _ in range(10):  # the first one runs, the second waits for it
        await asyncio.sleep(0)
    await encoder.close()
    first, second = await asyncio.gather(*asks, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(second, Unavailable)
    assert len(children()) == before
