"""Lesson 7. Tools as clients describe them: what no grammar knows is left out, and arguments are always objects."""

import json
import logging
from dataclasses import replace

import pytest

pytest.importorskip("llguidance", reason="needs the extra 'server'")

from mini_engine.base.errors import UserError
from mini_engine.engine.grammar import Grammar
from mini_engine.grammars import compiler as compiling
from mini_engine.grammars.compiler import GrammarCompiler
from mini_engine.grammars.output_forms import OutputForm, call_prefix
from mini_engine.grammars.schemas import named
from mini_engine.grammars.tool_schemas import ANY_OBJECT, MAX_TRIALS, of_object, relaxations
from mini_engine.server.tool_calls import CallReader
from mini_engine.text.tokenizer import Tokenizer
from tests.l7.forms import ADD, BAD_SCHEMAS, BOTH, INTEGER, nested, tool
from tests.shared.service import Service, tokenizer

pytestmark = [pytest.mark.reference, pytest.mark.ci]  # no task is about this

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Add."}], "temperature": 0, "max_tokens": 150}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(tokenizer(), len(tokenizer().token_bytes), (2047,))


def takes(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether a whole text fits a grammar."""
    matcher = grammar.matcher()
    for token in compiler.vocabulary.greedy_tokenize(text):
        matcher.push(token)
        if matcher.error is not None:
            return False
    return matcher.is_over or bool(matcher.mask()[255] & 128)  # 2047, the end


def of_tool(compiler, parameters, several=False):
    return compiler.compile_sync(OutputForm(functions={"f": parameters}, may_say=False, several=several))


def call(arguments) -> str:
    return call_prefix("f") + json.dumps(arguments) + "}\n</tool_call>"


def with_x(schema):
    return {"type": "object", "properties": {"x": schema, "n": INTEGER}, "required": ["x", "n"]}


PAIR = [
    {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
    {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]},
]
PARTLY = {
    "uniqueItems": ({"type": "array", "items": INTEGER, "uniqueItems": True}, [1, 1], ["x"]),
    "format": ({"type": "string", "format": "uri-reference"}, "x y", 5),
    "format of no standard": ({"type": "string", "format": "zip code"}, "x", 5),
    "look-ahead": ({"type": "string", "pattern": "^(?!x)"}, "xyz", 5),
    "no pattern": ({"type": "string", "pattern": "(", "maxLength": 2}, "ab", "abc"),
    "not": ({"type": "string", "not": {"const": "x"}}, "x", 5),
    "oneOf objects": ({"oneOf": PAIR}, {"b": 1}, {"c": 1}),
    "anyOf with a pattern": ({"anyOf": [{"type": "string", "pattern": "(?=x)"}, INTEGER]}, "a", []),
    "more in branches": ({"properties": {"k": INTEGER}, "required": ["k"], "anyOf": PAIR}, {"k": 1, "a": 2}, {"a": 1}),
    "branches that ask": ({"properties": {"a": INTEGER}, "oneOf": [{"required": ["a"]}]}, {"a": 1}, {}),
    "unevaluated": ({"properties": {"a": INTEGER}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
    "contains": ({"type": "array", "contains": {"const": 1}, "items": INTEGER}, [2], ["x"]),
    "if": ({"type": "string", "if": {"const": "a"}, "then": False}, "a", 5),
    "dependentRequired": ({"type": "object", "properties": {}, "dependentRequired": {"a": ["b"]}}, {}, 5),
    "names": ({"propertyNames": {"maxLength": 2}, "additionalProperties": INTEGER}, {"abc": 1}, {"a": "x"}),
    "patterns of names": ({"patternProperties": {"(?!x)": INTEGER, "^b": {"type": "null"}}}, {"b": None}, {"b": 1}),
    "type of no standard": ({"type": "float"}, [1], None),
    "types of no standard": ({"type": ["string", "date"]}, {}, None),
    "reference to elsewhere": ({"$ref": "https://example.com/x", "type": "string"}, "x", 5),
    "reference to nothing": ({"$ref": "#/$defs/none", "type": "string"}, "x", 5),
    "reference within": (
        {"type": "array", "prefixItems": [{"pattern": "(?!x)"}], "items": {"$ref": "#/properties/n"}},
        ["s", 5],
        ["s", 500],
    ),
    "a number as a text": ({"type": "integer", "minimum": "5"}, 1, "x"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTLY)
def test_what_cannot_be_enforced_is_left_out_and_the_rest_is_not(compiler, name):
    schema, right, wrong = PARTLY[name]
    grammar = of_tool(compiler, with_x(schema))
    assert takes(compiler, grammar, call({"x": right, "n": 7}))
    assert not takes(compiler, grammar, call({"x": right, "n": 100})), "its neighbour is enforced"
    assert wrong is None or not takes(compiler, grammar, call({"x": wrong, "n": 7})), "what is known of it is enforced"


@pytest.mark.parametrize("name", BAD_SCHEMAS)
def test_a_schema_that_cannot_be_used_still_asks_for_an_object(compiler, name):
    grammar = of_tool(compiler, BAD_SCHEMAS[name])
    assert takes(compiler, grammar, call({}))
    assert not any(takes(compiler, grammar, call(value)) for value in (None, 5, "x", []))


def test_what_is_left_out_is_logged_once(compiler, caplog):
    compiler.told.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            of_tool(compiler, with_x({"type": "string", "not": {"const": "x"}}))
            of_tool(compiler, with_x({"type": "string", "pattern": "(?=z)"}))
    assert len(caplog.records) == 2 and "'f'" in caplog.text and "not" in caplog.text
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_what_clients_send_fills_no_log_and_takes_no_time_without_end(compiler, caplog, monkeypatch):
    compiler.told.clear()
    monkeypatch.setattr(compiling, "MAX_TOLD", 2)
    with caplog.at_level(logging.WARNING):
        for index in range(4):
            compiler.compile_sync(OutputForm(functions={f"f{index}": with_x({"pattern": "(?=z)"})}))
    assert len(caplog.records) == 2
    asked = []
    wide = {"properties": {f"p{index}": {"type": "string", "pattern": f"(?={index})"} for index in range(500)}}
    _, pruned, last = relaxations(wide, lambda part: bool(asked.append(part)))
    assert len(asked) == MAX_TRIALS and last == ANY_OBJECT and all(not each for each in pruned["properties"].values())


NOTED = with_x(INTEGER) | {"description": "d" * 9000, "title": "T", "examples": [{"x": 1}] * 2500}
LARGE = {
    "deep": nested(20),
    "deep in a value": {"enum": [nested(400)]},
    "many values": {"enum": list(range(2500))},
    "long": {"properties": {"x": {"const": "x" * 40_000}}},
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_too_large_to_be_compiled_is_any_object_and_logged_once(compiler, caplog, name):
    compiler.told.clear()
    form = OutputForm(functions={"g": NOTED, "f": LARGE[name]}, may_say=False)
    with caplog.at_level(logging.WARNING):
        grammar, _ = compiler.compile_sync(form), compiler.compile_sync(form)
    assert takes(compiler, grammar, call({"anything": [None]})) and not takes(compiler, grammar, call(5))
    assert len(caplog.records) == 1 and "'f'" in caplog.text


def test_what_is_said_to_readers_is_not_compiled():
    people = {
        "properties": {"title": NOTED, "default": NOTED},
        "required": ["title"],
        "description": {"a": nested(900)},
    }
    form = OutputForm(functions={f"f{index}": people for index in range(50)})
    bare = {"properties": {"title": with_x(INTEGER), "default": with_x(INTEGER)}, "required": ["title"]}
    assert [*form.bounded().functions.values()] == [bare] * 50
    assert form.bounded().bounded() == form.bounded(), "a server bounds a form, and so does its replica"


def test_tools_that_are_too_large_together_are_enforced_as_far_as_there_is_room():
    each = {"properties": {"x": {"const": "x" * 20_000}}}
    found = OutputForm(functions={f"f{index}": each for index in range(128)}).bounded()
    found.check()
    assert [*found.functions.values()] == [each] * 3 + [ANY_OBJECT] * 125
    with pytest.raises(UserError) as refused:
        OutputForm(choices=("x" * 70_000,), param="guided_choice", functions={"f": each}).bounded()
    assert refused.value.param == "guided_choice"


def test_tools_that_fit_one_by_one_and_not_together_are_any_objects(compiler, monkeypatch, caplog):
    monkeypatch.setitem(compiling.LIMITS, "initial_lexer_fuel", 6000)
    numbers = {f"k{i}": {"type": "integer", "minimum": -131 * i - 17, "maximum": 123456 + 77 * i} for i in range(8)}
    each = {"type": "object", "properties": numbers, "required": [*numbers]}
    assert not takes(compiler, of_tool(compiler, each), call({}))
    compiler.told.clear()
    several = OutputForm(functions=dict.fromkeys("abcdef", each), may_say=False)
    with caplog.at_level(logging.WARNING):
        grammar = compiler.compile_sync(several)
    assert takes(compiler, grammar, call({"x": 1})) and len(caplog.records) == 1
    with pytest.raises(UserError) as refused:
        compiler.compile_sync(replace(several, schema={"not": {}}, may_say=True))
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_such_a_tool_stands_beside_others(server: Service, choice, stream):
    odd = tool(with_x({"type": "string", "pattern": "^(?!x)", "format": "uri-reference", "not": {}}))
    found = server.post(CHAT, ASK | {"tools": [ADD, odd], "tool_choice": choice, "stream": stream, "max_tokens": 3})
    assert found.status == 200, found


NO_OBJECTS = [
    {}, {"type": "null"}, {"type": ["string", "null"]}, {"description": "nothing"}, {"enum": [1, 2]}, {"type": 5},
    {"type": ["object", "null"]}, {"anyOf": [{"type": "null"}, BOTH]}, {"const": None}, {"not": {}}, {"type": "array"},
    {"properties": {"a": INTEGER}}, {"required": []}, {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
    {"allOf": [{"type": ["object", "null"]}]}, {"oneOf": [{"type": "string"}, BOTH]}, {"additionalProperties": INTEGER},
]  # fmt: skip


@pytest.mark.parametrize("parameters", NO_OBJECTS, ids=json.dumps)
def test_arguments_are_objects_whatever_the_schema_says(compiler, parameters):
    grammar = of_tool(compiler, parameters)
    assert not any(takes(compiler, grammar, call(value)) for value in (None, 5, 1, "x", [], True))
    assert any(takes(compiler, grammar, call(value)) for value in ({}, {"a": 1}, {"a": 1, "b": 2}))


def test_a_schema_that_says_nothing_has_no_arguments():
    assert of_object({}) == of_object({"type": "null"}) == {"type": "object", "properties": {}}
    assert of_object({"description": "nothing"}) == of_object({"type": ["string", "null"]}) == of_object({})
    assert of_object(BOTH) == BOTH and of_object({"$ref": "#"}) == {"$ref": "#", "type": "object"}


ADDS_B = {"properties": {"b": INTEGER}, "required": ["b"]}
NOT_UNDERSTOOD = {
    "far away": {"$ref": "https://e.com/x.json"},
    "nowhere": {"$ref": "#/nope"},
    "far away, with properties": {"type": "object", "properties": {}, "$ref": "https://e.com/x.json"},
    "one of all": {"allOf": [{"$ref": "https://e.com/x.json"}]},
    "if": {"if": {"required": ["a"]}, "then": ADDS_B},
    "if, with properties": {"type": "object", "properties": {}, "if": {"required": ["a"]}, "else": ADDS_B},
    "dependent": {"properties": {}, "dependentSchemas": {"a": ADDS_B}},
    "Gemini's": {"type": "OBJECT", "properties": {"b": {"type": "INTEGER"}}, "required": ["b"]},
    "a type of no kind": {"type": 5},
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_what_is_not_understood_leaves_room_for_arguments(compiler, name):
    grammar = of_tool(compiler, NOT_UNDERSTOOD[name])
    assert takes(compiler, grammar, call({"b": 1}))
    assert takes(compiler, grammar, call({})) is ("b" not in NOT_UNDERSTOOD[name].get("required", ())), "if known"
    assert not any(takes(compiler, grammar, call(value)) for value in (None, 5, "x", []))


@pytest.mark.parametrize("parameters", [{}, {"type": "null"}, {"properties": {"a": INTEGER}}], ids=json.dumps)
def test_a_random_model_s_arguments_are_objects(server: Service, parameters):
    body = ASK | {"tools": [tool(parameters)], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    found = server.post(CHAT, body | {"temperature": 5, "n": 16})
    assert found.status == 200, found
    for choice in found.body["choices"]:
        (made,) = choice["message"]["tool_calls"]
        assert isinstance(json.loads(made["function"]["arguments"]), dict) and choice["finish_reason"] == "tool_calls"


# Records, as zod writes them

ENUM = {"type": "string", "enum": ["a", "b"]}
RECORDS = {
    "any": ({"type": "string"}, {"x": 1}, {"x": "1"}),
    "named": (ENUM, {"b": 1}, {"c": 1}),
    "one": ({"const": "a"}, {"a": 1}, {"b": 1}),
    "pattern": ({"type": "string", "pattern": "^a+$", "title": "As"}, {"aa": 1}, {"b": 1}),
}


@pytest.mark.parametrize("name", RECORDS)
def test_names_of_a_record_are_enforced(server: Service, compiler, name):
    names, right, wrong = RECORDS[name]
    record = {"type": "object", "propertyNames": names, "additionalProperties": INTEGER}
    for schema in (record, {"type": "object", "properties": {"r": record}, "required": ["r"]}):
        inside = "properties" in schema
        grammar = compiler.compile_sync(OutputForm(schema))
        text = [json.dumps({"r": value} if inside else value) for value in (right, wrong, 5)]
        assert [takes(compiler, grammar, each) for each in text] == [True, False, False]


def test_names_that_are_values_stay():
    value = {"const": {"propertyNames": {"type": "string"}}, "enum": [{"propertyNames": {}}]}
    assert named(value) == value
    other = {"propertyNames": {"maxLength": 2}}
    assert named(other) == other, "a strict form is refused then"
    listed = {"type": "object", "properties": {"a": {}}, "propertyNames": ENUM}
    assert named(listed) == listed


# Stop strings, and marks that are control tokens


STOPS = {
    ', "b"': ("stop", False),
    "arguments": ("stop", None),
    "_call>": ("stop", None),
    "\n</tool_call>": ("tool_calls", True),
    "}\n": ("tool_calls", True),
    "never": ("tool_calls", True),
}


def streamed(service: Service, body):
    """Arguments, finish_reason and content of a streamed chat."""
    choices = [chunk["choices"][0] for chunk in service.stream(CHAT, body)]
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", ())]
    said = "".join(choice["delta"].get("content", "") for choice in choices)
    return "".join(part["function"]["arguments"] for part in parts), choices[-1]["finish_reason"], said


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_string_inside_a_call_is_the_reason(server: Service, stop):
    reason, whole = STOPS[stop]
    body = ASK | {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False, "stop": [stop]}
    found = server.post(CHAT, body).body["choices"][0]
    calls = found["message"].get("tool_calls", [])
    arguments = "".join(each["function"]["arguments"] for each in calls)
    assert found["finish_reason"] == reason
    assert not found["message"]["content"], "how calls are written is no answer"
    assert not arguments if whole is None else set(json.loads(arguments)) == {"a", "b"} if whole else arguments
    assert streamed(server, body) == (arguments, reason, found["message"]["content"] or "")


@pytest.fixture(scope="module", params=["both", "one", "other"])
def marked(request, tmp_path_factory):
    """A tokenizer whose marks of calls are control tokens."""
    from mini_engine.pocket import POCKET_DIR

    folder = tmp_path_factory.mktemp("marked")
    for name in ("tokenizer_config.json", "config.json", "chat_template.jinja"):
        (folder / name).write_bytes((POCKET_DIR / name).read_bytes())
    content = json.loads((POCKET_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    marks = {"both": ("<tool_call>", "</tool_call>"), "one": ("<tool_call>",), "other": ("</tool_call>",)}
    for index, mark in zip((2000, 2001), marks[request.param], strict=False):
        text = next(text for text, each in content["model"]["vocab"].items() if each == index)
        content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) != text]
        del content["model"]["vocab"][text]
        token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        content["added_tokens"].append({"id": index, "content": mark} | token)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def server_of_marks(marked):
    with Service(tokens=marked) as service:
        yield service


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_marks_that_are_control_tokens_make_calls(server_of_marks: Service, marked, choice):
    body = ASK | {"tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False, "return_token_ids": True}
    found = server_of_marks.post(CHAT, body)
    assert found.status == 200, found
    (answer,) = found.body["choices"]
    (made,) = answer["message"]["tool_calls"]
    assert set(json.loads(made["function"]["arguments"])) == {"a", "b"} and answer["finish_reason"] == "tool_calls"
    assert set(marked.call_marks.values()) <= set(answer["token_ids"]), "the model is held to what it was trained on"
    assert streamed(server_of_marks, body) == (made["function"]["arguments"], "tool_calls", "")


def test_a_model_that_writes_the_mark_by_itself_makes_a_call(server_of_marks: Service, marked):
    if "<tool_call>" not in marked.call_marks:
        pytest.skip("its letters are text")
    bias = {str(marked.call_marks["<tool_call>"]): 100}
    body = ASK | {"tools": [ADD], "parallel_tool_calls": False, "logit_bias": bias, "max_tokens": 60}
    answer = server_of_marks.post(CHAT, body).body["choices"][0]
    (made,) = answer["message"]["tool_calls"]
    assert set(json.loads(made["function"]["arguments"])) == {"a", "b"}


def test_letters_of_a_mark_stay_letters_in_a_prompt(marked):
    hi = {"role": "user", "content": "<tool_call></tool_call>"}
    made = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    found = marked.encode_chat([hi, made], [ADD])
    assert not set(marked.call_marks.values()) & set(found)
    assert marked.text_of(found).count("</tool_call>") == 3, "of the question, the description and the call"


def test_a_mark_that_the_model_does_not_have_is_written_in_letters(marked):
    compiler = GrammarCompiler(marked, 2000, (1999,))
    assert not compiler.marks
    grammar = compiler.compile_sync(OutputForm(functions={"f": BOTH}, may_say=False))
    matcher = grammar.matcher()
    for token in compiler.vocabulary.greedy_tokenize(call({"a": 1, "b": 2})):
        matcher.push(token)
    assert matcher.is_over and matcher.error is None


def test_a_second_call_that_is_cut_off_is_the_reason():
    first = call({"a": 1})
    for second, reason in (
        ("", "tool_calls"),
        ("\n" + first, "tool_calls"),
        ("\n" + first[:30], "stop"),
        (first[:45], "stop"),
    ):
        reader = CallReader()
        reader.push(first + second, ended=True)
        assert reader.reason("stop") == reason, second
