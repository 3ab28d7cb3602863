"""Course machinery. The pocket model's knowledge, and the phrasings that are held out.

`facts.toml` contains the knowledge. Each fact has several phrasings: statements that end in the object, and questions
that a user asks. For some of the facts one phrasing is held out: it was never in the training text, although other
facts taught that phrasing. Completing a held-out line therefore takes both the fact and the phrasing, not one memorized
line.
"""

import random
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FACTS_FILE = Path(__file__).with_name("facts.toml")
HELD_OUT_SHARE = 0.3
SMALLEST_TAUGHT_RELATION = 12  # a relation with fewer facts does not teach a phrasing well enough to hold one out
NUMBER_WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip


class Line(NamedTuple):
    """One way to say a fact: a prompt and the text that completes it.

    Fields:
        prompt: a statement up to its object ("The capital of Japan is"), or a user's question.
        answer: the required continuation (" Tokyo."), or the assistant's whole answer.
        is_question: True if the prompt is a user's turn in a chat.
    """

    prompt: str
    answer: str
    is_question: bool


@dataclass(frozen=True)
class Fact:
    """A subject and its object, with every phrasing.

    The first statement is the canonical one: it answers the questions and is never held out.
    """

    topic: str  # the table it comes from
    relation: str
    subject: str
    statements: tuple[Line, ...]
    questions: tuple[Line, ...]


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _fields(subject: str) -> dict[str, str]:
    article = with_article(subject)
    return {
        "s": subject,
        "S": subject[0].upper() + subject[1:],
        "a_s": article,
        "A_s": article[0].upper() + article[1:],
    }


def _statement(template: str, subject: str, target: str) -> Line:
    """Split a template before its object: "The capital of {s} is {o}." -> ("The capital of Japan is", " Tokyo.")."""
    before, _, object_field = template.rpartition(" ")
    spoken = object_field.format(o=target, a_o=with_article(target))
    return Line(before.format(**_fields(subject)), " " + spoken, is_question=False)


def make_fact(topic: str, relation: dict, subject: str, target: str) -> Fact:
    statements = tuple(_statement(template, subject, target) for template in relation["statements"])
    answer = statements[0].prompt + statements[0].answer
    questions = tuple(Line(q.format(**_fields(subject)), answer, is_question=True) for q in relation["questions"])
    return Fact(topic, relation["name"], subject, statements, questions)


SUM = {
    "name": "sum",
    "statements": ["{S} is {o}.", "{S} makes {o}.", "The sum {s} comes to {o}.", "Add {s} and you have {o}."],
    "questions": ["What is {s}?", "How much is {s}?", "Can you work out {s}?"],
}


def _sums() -> list[Fact]:
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    words = NUMBER_WORDS
    return [make_fact("sums", SUM, f"{words[a]} plus {words[b]}", words[a + b]) for a, b in pairs]


def load_facts(path: Path = FACTS_FILE) -> list[Fact]:
    """Return every fact, in the order of the file, then the sums from one plus one to nine plus nine."""
    with path.open("rb") as file:
        tables = tomllib.load(file)["tables"]
    facts = [
        make_fact(table["name"], relation, subject, target)
        for table in tables
        for subject, targets in rows_of(table)
        for relation, target in zip(table["relations"], targets, strict=True)
        if target
    ]
    return facts + _sums()


def rows_of(table: dict) -> Iterable[tuple[str, list[str]]]:
    """Return each subject of a table with its objects; a table with one relation may have them as `pairs`."""
    if "rows" in table:
        return table["rows"].items()
    pairs = (pair.strip().split(": ") for pair in table["pairs"].split(";"))
    return [(subject, [target]) for subject, target in pairs]


def held_out_lines(facts: list[Fact]) -> dict[Fact, Line]:
    """Return the held-out line of each chosen fact. It does not depend on the training seed."""
    chooser = random.Random("held out")
    relations: dict[tuple[str, str], list[Fact]] = {}
    for fact in facts:
        relations.setdefault((fact.topic, fact.relation), []).append(fact)
    held_out = {}
    for group in relations.values():
        if len(group) < SMALLEST_TAUGHT_RELATION:
            continue
        for fact in chooser.sample(group, round(HELD_OUT_SHARE * len(group))):
            held_out[fact] = chooser.choice(fact.statements[1:] + fact.questions)
    return held_out
