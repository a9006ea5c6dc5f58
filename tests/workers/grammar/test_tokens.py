"""Which tokens grammars take as text: what the checkpoint's tokenizer.json says, for grammars of every kind."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from llguidance import LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from diptych.workers.common.errors import InvalidGrammar
from diptych.workers.common.request import Grammar, GrammarKind
from diptych.workers.grammar.check import GrammarCheck
from diptych.workers.grammar.compiler import GrammarCompiler

TEXTS = ("<tool_call>", "</tool_call>", "<foo>", "[BAR]", "<é>")  # added tokens that are text
SPECIAL = ("<|end|>", "<|mark|>", "[MARK]")
NUM_MISSING = 2  # ids without a token
END = 256


class TextTokenizer:
    """A tokenizer with added tokens, and the compiler of grammars for it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.reference = LLTokenizer(str(folder / "tokenizer.json"))
        self.vocab_size = self.tokenizer.get_vocab_size() + NUM_MISSING
        self.compiler = GrammarCompiler.of_folder(folder, self.vocab_size, (END,))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def bytes_of(self, token_id: int) -> bytes:
        return self.reference.decode_bytes([token_id])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    made.add_tokens([tokenizers.AddedToken(text, special=False) for text in TEXTS])
    path = tmp_path_factory.mktemp("tokens")
    made.save(str(path / "tokenizer.json"))
    return TextTokenizer(path)


class Answer:
    """Answer by a grammar."""

    def __init__(self, checkpoint: TextTokenizer, grammar: Grammar) -> None:
        self.checkpoint = checkpoint
        self.matcher = checkpoint.compiler.compile(grammar).matcher(lambda error: pytest.fail(str(error)))
        self.token_ids: list[int] = []

    def allowed(self) -> list[int]:
        bits = allocate_token_bitmask(1, self.checkpoint.vocab_size)
        fill_next_token_bitmask(self.matcher.state, bits, 0)
        assert self.matcher.check()
        return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()

    def add(self, *token_ids: int) -> None:
        for token_id in token_ids:
            assert token_id in self.allowed()
            self.matcher.consume([token_id])
            self.token_ids.append(token_id)

    @property
    def text(self) -> bytes:
        return b"".join(map(self.checkpoint.bytes_of, self.token_ids))


def grammars(text: str) -> dict[str, tuple[Grammar, str]]:
    """Grammars of each kind that has the text, and what is the answer by it."""
    quoted, escaped = f'"{text}"', "".join(rf"\x{{{ord(char):x}}}" for char in text)
    tag = {"structures": [{"begin": text, "schema": {"const": 1}, "end": "!"}], "triggers": [text]}
    return {
        "regex": (Grammar(GrammarKind.REGEX, f"a{escaped}b"), f"a{text}b"),
        "choice": (Grammar(GrammarKind.CHOICE, json.dumps([text])), text),
        "Lark": (Grammar(GrammarKind.GRAMMAR, f'start: "a" {quoted} "b"'), f"a{text}b"),
        "GBNF": (Grammar(GrammarKind.GRAMMAR, f'root ::= "a" {quoted} "b"'), f"a{text}b"),
        "schema": (Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"const": text})), json.dumps(text, ensure_ascii=False)),
        "property": (
            Grammar(
                GrammarKind.JSON_SCHEMA,
                json.dumps({"properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}),
            ),
            json.dumps({text: 1}, ensure_ascii=False),
        ),
        "structural tag": (Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)), f"so: {text}1!"),
    }


KINDS = tuple(grammars("x"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [*TEXTS, *SPECIAL, "<other>", f"{SPECIAL[1]}{TEXTS[0]}{SPECIAL[2]}é"])
def test_a_grammar_may_have_any_text(checkpoint: TextTokenizer, text: str, kind: str) -> None:
    """Whatever tokens are chosen of those that are allowed, in steps or in runs."""
    grammar, expected = grammars(text)[kind]
    for seed in range(8):
        answer, rng = Answer(checkpoint, grammar), random.Random(seed)
        if kind == "structural tag":
            answer.add(*checkpoint.ids("so: "))
        while answer.text != expected.encode():
            rest = expected.encode()[len(answer.text) :]
            answer.add(
                rng.choice([i for i in answer.allowed() if i != END and rest.startswith(checkpoint.bytes_of(i))])
            )
            if rng.random() < 0.5:
                answer.matcher.find_run()
                answer.add(*answer.matcher.take_run(answer.token_ids[-1]))
        assert END in answer.allowed()
        assert not {checkpoint.tokenizer.token_to_id(each) for each in SPECIAL} & set(answer.token_ids)


@pytest.mark.parametrize("text", TEXTS)
def test_a_token_that_is_text_is_allowed_where_its_text_is(checkpoint: TextTokenizer, text: str) -> None:
    for pattern in (r"(?s:.*)", r"[^x]*", f"(<|{text[0] if text[0] != '[' else '.'}|.).*"):
        answer = Answer(checkpoint, Grammar(GrammarKind.REGEX, pattern))
        answer.add(checkpoint.tokenizer.token_to_id(text))
        assert answer.text == text.encode()
    answer = Answer(checkpoint, Grammar(GrammarKind.REGEX, r"[^>\]]*"))
    assert checkpoint.tokenizer.token_to_id(text) not in answer.allowed()


def test_special_tokens_and_ids_without_a_token_are_no_text(checkpoint: TextTokenizer) -> None:
    answer = Answer(checkpoint, Grammar(GrammarKind.REGEX, "(?s:.*)"))
    named = {checkpoint.tokenizer.token_to_id(text) for text in SPECIAL}
    missing = range(checkpoint.vocab_size - NUM_MISSING, checkpoint.vocab_size)
    assert set(answer.allowed()) & {*named, *missing} == {END}


@pytest.mark.parametrize("text", [*TEXTS, *SPECIAL[1:]])
def test_lark_names_any_token_by_its_id(checkpoint: TextTokenizer, text: str) -> None:
    token_id = checkpoint.tokenizer.token_to_id(text)
    answer = Answer(checkpoint, Grammar(GrammarKind.GRAMMAR, f'start: <[{token_id}]> "b"'))
    assert answer.allowed() == [token_id]
    answer.add(token_id, *checkpoint.ids("b"))
    assert answer.allowed() == [END]


@pytest.mark.parametrize("text", ["<tool_call>", "</tool_call>", "<foo>", "<é>", "<|mark|>"])
def test_lark_names_a_token_in_angle_brackets_by_its_text(checkpoint: TextTokenizer, text: str) -> None:
    """Not within a string, a regular expression or a comment."""
    token_id = checkpoint.tokenizer.token_to_id(text)
    lark = f'start: "<b>" {text} WORD /<c>/  // {text} "\nWORD: "\\"" | /<\\/d>/'
    answer = Answer(checkpoint, Grammar(GrammarKind.GRAMMAR, lark))
    answer.add(*checkpoint.ids("<b>"))
    assert answer.allowed() == [token_id]
    answer.add(token_id, *checkpoint.ids("</d><c>"))
    assert answer.allowed() == [END]
    GrammarCheck().check(Grammar(GrammarKind.GRAMMAR, lark))


def test_a_token_that_the_model_lacks_is_named(checkpoint: TextTokenizer) -> None:
    grammar = Grammar(GrammarKind.GRAMMAR, 'start: <nothing> "b"')
    GrammarCheck().check(grammar)  # it knows no model
    with pytest.raises(InvalidGrammar, match="<nothing>"):
        checkpoint.compiler.compile(grammar)


def test_forced_text_is_a_run_of_the_tokens_that_its_tokenizer_makes(checkpoint: TextTokenizer) -> None:
    answer = Answer(checkpoint, Grammar(GrammarKind.REGEX, "a<tool_call>b<foo>c"))
    answer.matcher.find_run()
    assert answer.matcher.take_run(checkpoint.ids("a")[0]) == checkpoint.ids("<tool_call>b<foo>c")
