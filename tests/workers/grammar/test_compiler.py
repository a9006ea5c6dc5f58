"""Grammars of each kind: what they allow, how wrong ones are refused, and what compiling costs."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from llguidance import LLTokenizer

from diptych.workers.common.errors import InvalidGrammar
from diptych.workers.common.request import ANY_JSON_OBJECT, MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from diptych.workers.grammar.compiler import MAX_CACHED, GrammarCompiler
from diptych.workers.grammar.tokens import read_tokenizer

from ...support.grammars import compiled, compiler, regex
from ...support.harness import TINY

TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}
GBNF = 'root ::= "a" item+\nitem ::= [0-9] | "x"'
LARK = 'start: "a" item+\nitem: /[0-9]/ | "x"'


def json_of(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def accepts(grammar: Grammar, text: str) -> bool:
    """Return whether the text is a whole answer by the grammar."""
    matcher = compiled(grammar).matcher(lambda _error: None)
    token_ids = [byte + 1 for byte in text.encode()]
    return matcher.state.try_consume_tokens(token_ids) == len(token_ids) and matcher.state.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (json_of({"type": "integer"}), ["12", "-3"], ["a", "1.5", '"1"']),
        (
            json_of({"type": "object", "properties": {"a": {"enum": [1]}}}),
            ["{}", '{"a": 1}', '{\n  "a":1\n}'],
            ['{"a":2}'],
        ),
        (ANY_JSON_OBJECT, ["{}", '{"a": [1, null]}'], ["[]", "1", "{"]),
        (regex("[a-c]{2}"), ["ab"], ["a", "abc", "xy"]),
        (
            Grammar(GrammarKind.CHOICE, '["yes", "no \\"so\\"", "\u00e9\\n", "\\u007f", "\U0001f600"]'),
            ["yes", 'no "so"', "\u00e9\n", "\x7f", "\U0001f600"],
            ["y", "no"],
        ),
        (Grammar(GrammarKind.GRAMMAR, LARK), ["a1", "ax2x"], ["a", "1"]),
        (Grammar(GrammarKind.GRAMMAR, GBNF), ["a1", "ax2x"], ["a", "1"]),
        (
            Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG)),
            ["any text", "so: <f=add>12</f> and <f=add>3</f>."],
            ["<f=add>x</f>", "<f=sub>1</f>"],
        ),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Grammar) else "",
)
def test_what_each_kind_allows(grammar: Grammar, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_whitespace_is_bounded_and_may_be_set_by_the_schema() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    assert not accepts(json_of(schema), "[" + " " * 40 + "1]")
    assert not accepts(json_of({**schema, "x-guidance": {"whitespace_flexible": False}}), "[1, 2]")
    assert accepts(json_of({**schema, "x-guidance": {"whitespace_pattern": " *"}}), "[" + " " * 40 + "1]")


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (GrammarKind.JSON_SCHEMA, "{", "cannot be compiled"),
        (GrammarKind.JSON_SCHEMA, "[1]", "must be an object"),
        (GrammarKind.JSON_SCHEMA, '{"type": "wat"}', "Invalid type: wat"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "minLength": 5, "maxLength": 3}', "Unsatisfiable"),
        (GrammarKind.JSON_SCHEMA, '{"not": {"type": "string"}}', "Unimplemented keys"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/nope"}', "does not exist"),
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.CHOICE, "[]", "1 to 4096 strings"),
        (GrammarKind.CHOICE, '["a", 1]', "strings"),
        (GrammarKind.CHOICE, '"a"', "array of strings"),
        (GrammarKind.GRAMMAR, "start: foo", "unknown name"),
        (GrammarKind.GRAMMAR, "root ::= nope", "nope"),
        (GrammarKind.STRUCTURAL_TAG, "[]", "must be an object"),
        (GrammarKind.STRUCTURAL_TAG, "{}", "structures must be an array"),
        (GrammarKind.STRUCTURAL_TAG, json.dumps({**TAG, "triggers": ["{"]}), "no trigger"),
    ],
)
def test_wrong_grammars_are_refused_in_the_compilers_words(kind: GrammarKind, text: str, why: str) -> None:
    with pytest.raises(InvalidGrammar, match=why) as caught:
        compiled(Grammar(kind, text))
    assert caught.value.status == 400 and kind.value in caught.value.message


@pytest.mark.parametrize("text", ["", "a" * (MAX_GRAMMAR_BYTES + 1), "\u00e9" * (MAX_GRAMMAR_BYTES // 2 + 1)])
def test_texts_without_a_character_and_too_long_ones_are_refused_before_they_are_compiled(text: str) -> None:
    with pytest.raises(InvalidGrammar, match=r"empty|more than"):
        regex(text).validate()


def test_a_deeply_nested_schema_is_refused() -> None:
    with pytest.raises(InvalidGrammar):
        compiled(Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 20_000 + "{}" + "}" * 20_000))


def test_a_grammar_is_compiled_once_until_many_others_were() -> None:
    here, first = compiler(), regex("a")
    assert here.cached(first) is None
    found = here.compile(first)
    assert here.compile(first) is here.cached(first) is found
    for i in range(MAX_CACHED):
        here.compile(regex(f"b{i}"))
    assert here.cached(first) is None


def test_threads_share_a_compiler() -> None:
    here, found = compiler(), []
    threads = [threading.Thread(target=lambda i=i: found.append(here.compile(regex(f"a{i % 4}")))) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and all(here.cached(regex(f"a{i}")) is not None for i in range(4))


def test_a_model_without_a_tokenizer_that_can_be_used_refuses_grammars(tmp_path: Path) -> None:
    with pytest.raises(InvalidGrammar, match=r"no tokenizer\.json"):
        GrammarCompiler.of_folder(tmp_path, 100, (0,)).compile(regex("a"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidGrammar, match=r"tokenizer\.json cannot be used"):
        GrammarCompiler.of_folder(tmp_path, 100, (0,)).compile(regex("a"))


def test_a_checkpoints_own_tokenizer_is_used() -> None:
    folder = Path(__file__).parents[3] / "examples" / "tiny"
    matcher = GrammarCompiler.of_folder(folder, 2048, (3, 2)).compile(regex("[0-9]+")).matcher(lambda _error: None)
    mask = np.unpackbits(np.frombuffer(matcher.state.compute_bitmask(), np.uint8), bitorder="little")
    tokens = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert {tokens.decode([i]) for i in np.flatnonzero(mask).tolist()} >= set("0123456789")
    assert all(tokens.decode([i]).isdecimal() for i in np.flatnonzero(mask).tolist())


def test_the_tokenizer_of_a_checkpoint_is_read_before_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with it is the first grammar's error."""
    reads, has_read = list[str](), threading.Event()

    def read(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
        reads.append(threading.current_thread().name)
        has_read.set()
        if len(reads) == 1:
            raise OSError("it cannot be read")
        return read_tokenizer(path, vocab_size, eos_token_ids)

    monkeypatch.setattr("diptych.workers.grammar.compiler.read_tokenizer", read)
    made = GrammarCompiler.of_folder(TINY, 2048, (3, 2))
    assert has_read.wait(60) and reads == ["diptych-grammars"]
    for _ in range(2):
        made.compile(regex("a*"))
    assert len(reads) == 2
