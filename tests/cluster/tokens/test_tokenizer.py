"""Encoding as Hugging Face does, decoding piece by piece to exactly the whole text."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from diptych.cluster.tokens.chat_template import ChatTemplate, PromptEnd
from diptych.cluster.tokens.detokenizer import MAX_HELD_TOKENS
from diptych.cluster.tokens.tokenizer import Tokenizer as DiptychTokenizer
from diptych.workers.common.errors import CheckpointError, InvalidRequest

from ...support.front import byte_tokenizer

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEXTS = [
    "Hello world",
    "  two  spaces\n\nand\ttabs",
    "naïve café — 你好，世界 🙂👩‍👩‍👧‍👦",
    "</s> in the middle <s>",
    "a" * 50,
    "1 + 1 = 2; x != y",
]
CORPUS = ["the quick brown fox jumps over the lazy dog", "Hello, world! 1 2 3", "two  spaces\n\nand\ttabs"] * 20


def bpe(**config: Any) -> Tokenizer:
    """A byte-level BPE of 400 tokens whose post-processor begins a text with <s>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def sentencepiece() -> Tokenizer:
    """A tokenizer like a converted Llama-2 one: metaspaces, byte tokens, the first space stripped."""
    words = ["▁", "▁a", "▁b", "a", "b", "▁Hello", "▁world", "lo"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    merges = [("▁", "a"), ("▁", "b")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def save(folder: Path, backend: Tokenizer, config: dict[str, Any] | None = None, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name.replace("_DOT_", ".")).write_text(text)
    return folder


def pieces(tokenizer: DiptychTokenizer, ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    machine = tokenizer.detokenizer(prompt)
    return [*(machine.push(i) for i in ids), machine.flush()]


def test_encodes_with_what_the_post_processor_adds(tmp_path: Path) -> None:
    backend = bpe()
    tokenizer = DiptychTokenizer.load(save(tmp_path, backend))
    for text in TEXTS:
        plain = tuple(backend.encode(text, add_special_tokens=False).ids)
        assert tokenizer.encode(text) == (0, *plain)
        assert tokenizer.encode(text, special=False) == plain


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    backend = bpe()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = DiptychTokenizer.load(save(tmp_path, backend))
    assert len(tokenizer.encode("a b c d e f g h")) == 16


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_equals_transformers(tmp_path: Path, flags: dict[str, bool]) -> None:
    transformers = pytest.importorskip("transformers")
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | tojson }}{{ eos_token }}{% endfor %}<|assistant|>"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
    }
    folder = save(tmp_path, bpe(), config | flags)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = DiptychTokenizer.load(folder)
    for text in TEXTS:
        assert list(ours.encode(text)) == theirs(text)["input_ids"]
        messages = [{"role": "user", "content": text}]
        rendered = ours.render_chat(messages)
        assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(ours.encode(rendered, special=False)) == expected
    rng = random.Random(1)
    for _ in range(50):
        ids = [rng.randrange(400) for _ in range(20)]
        assert "".join(pieces(ours, ids)) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("text", ["Once upon", "Once upon ", "  a\n", "<|assistant|>"])
def test_a_message_is_continued_as_by_transformers(tmp_path: Path, text: str, trims: bool) -> None:
    transformers = pytest.importorskip("transformers")
    content = "m.content | trim" if trims else "m.content"
    template = (
        f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ {content} }}}}{{{{ eos_token }}}}{{% endfor %}}<|end|>"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    folder = save(tmp_path, bpe(), config)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    ours = DiptychTokenizer.load(folder)
    assert ours.render_chat(messages, end=PromptEnd.OPEN_MESSAGE) == expected
    ended = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    assert ours.render_chat(messages, end=PromptEnd.MESSAGE) == ended
    assert messages[-1]["content"] == text


def test_a_message_that_the_template_does_not_show_is_not_continued() -> None:
    tokenizer = DiptychTokenizer(bpe(), {}, "{{ messages[0].content }}")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        tokenizer.render_chat(messages, end=PromptEnd.OPEN_MESSAGE)
    # Where the text is too long to be read, its length is what is wrong.
    assert tokenizer.render_chat(messages, end=PromptEnd.OPEN_MESSAGE, max_chars=1) == "Hi"


def test_characters_come_out_whole() -> None:
    tokenizer = byte_tokenizer()
    text = "h€🙂é!"
    got = pieces(tokenizer, list(text.encode()))
    assert [piece for piece in got if piece] == list(text)
    assert got == ["h", "", "", "€", "", "", "", "🙂", "", "é", "!", ""]


def test_what_never_becomes_a_character_is_replaced_once_that_is_certain() -> None:
    tokenizer = byte_tokenizer()
    assert pieces(tokenizer, [0xE2, 0x82]) == ["", "", "\ufffd"]
    assert pieces(tokenizer, [0xE2, 0x82, 0x41]) == ["", "", "\ufffdA", ""]
    assert pieces(tokenizer, list("\ufffd".encode())) == ["", "", "\ufffd", ""]


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=40))
def test_pieces_join_to_the_whole_text_byte_level(ids: list[int]) -> None:
    tokenizer = byte_tokenizer()  # ids from 260 on are no tokens at all
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=40))
def test_pieces_join_to_the_whole_text_trained(ids: list[int]) -> None:
    assert "".join(pieces(TRAINED, ids)) == TRAINED.decode(ids)


TRAINED = DiptychTokenizer(bpe(), {}, None)
PIECES = DiptychTokenizer(sentencepiece(), {}, None)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab é€🙂", max_size=30), cut=st.integers(0, 30))
@example(text="€🙂 ", cut=8)  # the last tokens of the prompt begin within a character
def test_pieces_join_to_the_whole_text_sentencepiece(text: str, cut: int) -> None:
    ids = PIECES.encode(text)
    # Cut between characters: a prompt does not end within one.
    while cut and PIECES.decode(ids[:cut]).endswith("\ufffd"):
        cut -= 1
    got = pieces(PIECES, list(ids[cut:]), ids[:cut])
    assert PIECES.decode(ids[:cut]) + "".join(got) == PIECES.decode(ids)
    assert not any("\ufffd" in piece for piece in got)


def test_the_space_before_the_first_word_is_kept_after_a_prompt() -> None:
    prompt, answer = PIECES.encode("a"), [PIECES.encode("b")[0]]
    assert pieces(PIECES, answer, prompt) == [" b", ""]
    assert pieces(PIECES, answer) == ["b", ""]


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 266), max_size=60))
def test_any_tokens_are_survived_and_not_held_for_long(ids: list[int]) -> None:
    machine = PIECES.detokenizer()
    shown = "".join(machine.push(i) for i in ids)
    assert len(machine.flush()) <= MAX_HELD_TOKENS * 8
    assert len(shown) <= 8 * len(ids)


def test_a_long_run_of_bytes_that_are_no_text_is_shown() -> None:
    got = pieces(PIECES, [3 + 0x80] * 100)
    assert "".join(got) == "\ufffd" * 100
    assert len(got[-1]) < MAX_HELD_TOKENS


def test_special_tokens_are_shown_where_they_are_named() -> None:
    shown = byte_tokenizer().detokenizer(shown=["<|user|>", "<|none|>", "A"])
    assert [shown.push(i) for i in (65, 258, 256)] == ["A", "<|user|>", ""]
    (a,), (b,) = PIECES.encode("a"), PIECES.encode("b")
    shown = PIECES.detokenizer(shown=["</s>"])
    assert "".join([*map(shown.push, (a, 1, 2, b)), shown.flush()]) == "a</s> b"
    assert "".join(pieces(PIECES, [a, 1, 2, b])) == "a b"
    assert (PIECES.special_id("</s>"), PIECES.special_id("▁a"), PIECES.special_id("x")) == (2, None, None)


def test_token_bytes() -> None:
    tokenizer = byte_tokenizer()
    assert [tokenizer.token_bytes(i) for i in (0, 10, 32, 65, 255)] == [b"\0", b"\n", b" ", b"A", b"\xff"]
    assert tokenizer.token_bytes(256) == b"<|end|>"
    assert tokenizer.token_bytes(100_000) == b""
    text = PIECES.encode("a é")
    assert b"".join(PIECES.token_bytes(i) for i in text) == " a é".encode()
    assert b"".join(TRAINED.token_bytes(i) for i in TRAINED.encode("naïve 🙂", special=False)) == "naïve 🙂".encode()


def test_an_added_token_with_a_space_stands_for_itself() -> None:
    backend = bpe()
    backend.add_tokens([AddedToken("hello there", special=False)])
    tokenizer = DiptychTokenizer(backend, {}, None)
    ids = [*tokenizer.encode("a", special=False), backend.token_to_id("hello there")]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "ahello there"


def test_special_tokens_have_an_id_by_their_text_and_added_ones_that_are_text_have_not() -> None:
    backend = bpe()
    backend.add_special_tokens(["[END]"])
    backend.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "[THINK]", "<think")])
    tokenizer = DiptychTokenizer(backend, {}, None)
    named = [tokenizer.special_id(text) for text in ("[END]", "<tool_call>", "[THINK]", "<think", "<other>", "a")]
    assert named == [backend.token_to_id("[END]"), None, None, None, None, None]


def test_a_named_token_is_special_even_where_the_file_does_not_say_so(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "</s>": 2}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = DiptychTokenizer.load(save(tmp_path, backend, {"eos_token": "</s>", "pad_token": "<absent>"}))
    assert tokenizer.decode([0, 2, 1]) == "ab"
    assert pieces(tokenizer, [0, 2, 1]) == ["a", "", "b", ""]


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tokenizer: neither tokenizer\.json nor"):
        DiptychTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
        DiptychTokenizer.load(tmp_path)
    save(tmp_path, bpe(), tokenizer_config_DOT_json="[1]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        DiptychTokenizer.load(tmp_path)
    save(tmp_path, bpe(), {"chat_template": "{% if %}"})
    with pytest.raises(CheckpointError, match="does not compile"):
        DiptychTokenizer.load(tmp_path).compile_template()


def chat(template: str, options: dict[str, Any] | None = None, **config: str) -> str:
    tokenizer = DiptychTokenizer(bpe(), config, template)
    return tokenizer.render_chat([{"role": "user", "content": "<Hé>"}], options)


def test_templates_know_what_they_know_in_transformers() -> None:
    assert chat("{{ bos_token }}{{ messages[0]['content'] }}", bos_token="<s>") == "<s><Hé>"
    assert chat("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<Hé>"}'
    assert chat("{% for m in messages %}\n  {% if true %}\nx{% endif %}\n{% endfor %}") == "x"
    assert chat("{% for m in messages %}{% break %}{% endfor %}a{% generation %}b{% endgeneration %}") == "ab"
    assert chat("{{ strftime_now('%Y') | length }}{{ add_generation_prompt }}{{ tools }}") == "4TrueNone"
    assert chat("{{ enable_thinking }}", {"enable_thinking": False}) == "False"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_fails_is_the_clients_error(template: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        chat(template)
    assert caught.value.param == "messages"


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ("su", "s:0;u:1;"),
        ("ssu", "s:0\n\n1;u:2;"),
        ("usu", "s:1;u:0;u:2;"),
        ("suasu", "s:0\n\n3;u:1;a:2;u:4;"),
    ],
)
def test_system_messages_that_a_template_refuses_are_a_part_of_the_first(roles: str, text: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]
    assert ChatTemplate(STRICT, {}).render(messages) == text
    lenient = ChatTemplate("{% for m in messages %}{{ m.role[0] }}{% endfor %}", {})
    assert lenient.render(messages) == roles, "where they are taken they keep their places"


def test_a_conversation_that_ends_with_a_system_message_is_refused_by_such_a_template() -> None:
    with pytest.raises(InvalidRequest, match="must be at the beginning"):
        ChatTemplate(STRICT, {}).render([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])


def test_template_options_cannot_replace_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="must not set"):
        chat("x", {"messages": []})


def test_where_the_template_is_found(tmp_path: Path) -> None:
    def rendered() -> str:
        return DiptychTokenizer.load(tmp_path).render_chat([{"role": "user", "content": "x"}])

    save(
        tmp_path, bpe(), {"chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": "a"}]}
    )
    assert rendered() == "a"
    save(tmp_path, bpe(), {"chat_template": "b"})
    assert rendered() == "b"
    save(tmp_path, bpe(), {"chat_template": "b"}, chat_template_DOT_json='{"chat_template": "c"}')
    assert rendered() == "c"
    save(tmp_path, bpe(), {"chat_template": "b"}, chat_template_DOT_jinja="d")
    assert rendered() == "d"


def test_a_model_without_a_template_says_so() -> None:
    tokenizer = DiptychTokenizer(bpe(), {}, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])
