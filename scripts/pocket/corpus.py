"""Course machinery. The training text: facts in many phrasings, sequences, passages, stories and chats.

`build_corpus(seed)` is a pure function of its seed, so a test can search the exact text that the model was trained on.
"""

import random
from collections.abc import Iterable

from scripts.pocket.chats import group_into_chats, story_turn
from scripts.pocket.facts import Fact, Line, held_out_lines, load_facts, taught
from scripts.pocket.rhymes import fixed_answers
from scripts.pocket.stories import tell_story

PROFILE_COPIES = 8
STATEMENT_COPIES = 5
QUESTION_COPIES = 3
FIXED_COPIES = 14
FIXED_QUESTION_COPIES = 8
STORIES = 1400
STORY_QUESTIONS = 500
CHAT_LENGTHS = {1: 50, 2: 20, 3: 15, 5: 10, 30: 1}  # turns in a chat, and how often


def profiles(facts: Iterable[Fact]) -> list[str]:
    """Return one document per subject: its facts of one topic in canonical wording, always in the same order."""
    sentences: dict[tuple[str, str], list[str]] = {}
    for fact in facts:
        sentences.setdefault((fact.topic, fact.subject), []).append(fact.canonical)
    return [" ".join(lines) for lines in sentences.values()]


def mixed_statements(statements: list[Line], chooser: random.Random) -> list[str]:
    """Group shuffled statements into documents of one to five sentences."""
    sentences = [line.prompt + line.answer for line in chooser.sample(statements, len(statements))]
    documents = []
    while sentences:
        count = chooser.randint(1, 5)
        documents.append(" ".join(sentences[:count]))
        sentences = sentences[count:]
    return documents


def carelessly(question: str) -> str:
    """Return the question as people type it."""
    return question.lower().rstrip("?")


def build_corpus(seed: int = 0) -> list[str]:
    """Return all documents, shuffled. They contain chat markers but no <|endoftext|>, which goes between documents."""
    chooser = random.Random(seed)
    facts = load_facts()
    held_out = held_out_lines(facts)
    statements = [line for fact in facts for line in taught(fact.statements[1:], held_out.get(fact))]
    questions = [line for fact in facts for line in taught(fact.questions, held_out.get(fact))]
    fixed = fixed_answers()

    documents = profiles(facts) * PROFILE_COPIES + list(fixed.values()) * FIXED_COPIES
    documents += [tell_story(chooser) for _ in range(STORIES)]
    for _ in range(STATEMENT_COPIES):
        documents += mixed_statements(statements, chooser)
    turns = [(line.prompt, line.answer) for line in questions] * QUESTION_COPIES
    turns += [(carelessly(line.prompt), line.answer) for line in questions]
    turns += list(fixed.items()) * FIXED_QUESTION_COPIES
    turns += [story_turn(chooser) for _ in range(STORY_QUESTIONS)]
    documents += group_into_chats(
        turns, chooser, lambda c: c.choices(list(CHAT_LENGTHS), list(CHAT_LENGTHS.values()))[0]
    )
    chooser.shuffle(documents)
    return documents
