"""The byte-level BPE tokenizer that both models share, and its chat template."""

from collections.abc import Iterator
from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .documents import Chat, Document, Documents

VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
PAD, BOS, END_OF_TEXT, END_OF_TURN = "<|pad|>", "<|bos|>", "<|endoftext|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (PAD, BOS, END_OF_TEXT, END_OF_TURN, *(f"<|{role}|>" for role in ROLES))
NUM_SAMPLES = 12_000
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- set role = 'system' if message['role'] == 'developer' else message['role'] -%}
    {%- if role not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('this model knows the roles system, user and assistant, not ' + role) -}}
    {%- endif -%}
    {{- '<|' + role + '|>' + message['content'] | trim + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def train_tokenizer(documents: Documents, seed: int) -> PreTrainedTokenizerFast:
    """A tokenizer of VOCAB_SIZE tokens; a plain text gets a BOS before it, a chat gets it from the template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(islice(documents.stream(seed), NUM_SAMPLES)), trainer)
    bos_id = bpe.token_to_id(BOS)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=[END_OF_TEXT, *(f"<|{role}|>" for role in ROLES)],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _texts(documents: Iterator[Document]) -> Iterator[str]:
    for document in documents:
        if isinstance(document, Chat):
            yield from (message["content"] for message in document.messages)
        else:
            yield document.text
