"""Course machinery. The pages beside the lessons agree with the source, and glossary terms are linked.

Protects readers from a map, an API page, a table of lessons or a glossary link that is out of date.
"""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

from scripts.pages import api, module_tables

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.pages import Page
from lessons._course.places import Places

markdown = pytest.importorskip("markdown")
from scripts.website import glossary_terms  # noqa: E402 (needs markdown)

ROOT = Path(__file__).resolve().parents[2]
LESSONS = read_lessons(Places.find())
GLOSSARY = (ROOT / "lessons" / "glossary.md").read_text(encoding="utf-8")
TERMS = glossary_terms.read_terms(GLOSSARY)
FIRST_ROW = '| <a id="block"></a>block | slots in a row, `16` of them | 2 |'


# How the pieces fit


def test_the_life_of_a_request_names_what_is_there():
    section = Page.read(module_tables.PAGE).section("The life of one request")
    linked = re.findall(r"\[`([\w.]+)`\]\(\.\./(mini_engine/[\w/]+\.py)\)", section)
    assert len(linked) > 10
    for symbol, file in linked:
        assert is_defined(symbol, (ROOT / file).read_text(encoding="utf-8")), f"{file} defines no {symbol}"


def is_defined(symbol: str, source: str) -> bool:
    """Whether the source defines a class, function or method, including methods inherited within the file."""
    body = ast.parse(source).body
    for name in symbol.split("."):
        found = next((node for node in body if getattr(node, "name", "") == name), None)
        if found is None:
            return False
        body = found.body
    return True


# The API's pages


def test_each_name_of_the_api_has_one_page_and_the_index_leads_to_it():
    """An address of when the API was one page, api/#kvpool, finds its name in the index, so a name is there once."""
    shown = {slug: re.findall(r"^## (\w+)$", api.group(slug), re.MULTILINE) for slug in api.GROUPS}
    shown["commands"].remove("Routes")
    names = [name for names in shown.values() for name in names]
    assert len(names) == len(set(names)) > 150, "two groups show the same name"
    linked = re.findall(r"\[`(\w+)`\]\(api/(\w+)\.md#", api.index())
    assert linked == [(name, slug) for slug, names in shown.items() for name in names]


def test_each_group_of_the_api_has_a_page_by_its_title():
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "lessons" / "api").glob("*.md")}
    assert set(pages) == set(api.GROUPS), "lessons/api/ has a page for each group of scripts/pages/api_groups.py"
    for slug, group in api.GROUPS.items():
        assert pages[slug].startswith(f"# {group.title}\n") and f"<!-- api: {slug} -->\n" in pages[slug], slug


# The glossary


def convert(text: str, page: str = "l2_token_flat/README.md", glossary: str = FIRST_ROW) -> str:
    """Convert as mkdocs does: it registers a processor that knows which page this is."""
    md = markdown.Markdown(extensions=["tables", "toc"])
    finder = glossary_terms.Finder(glossary_terms.read_terms(glossary))
    md.treeprocessors.register(glossary_terms.GlossaryTerms(md, finder, frozenset(["glossary.md"])), "terms", 2)
    processor = markdown.treeprocessors.Treeprocessor(md)
    processor.file = SimpleNamespace(src_uri=page)
    md.treeprocessors.register(processor, "relpath", 0)
    return md.convert(text)


def test_every_row_of_the_glossary_is_read_and_leads_to_a_lesson():
    rows = [line for line in GLOSSARY.splitlines() if line.startswith("| ") and not re.match(r"\| (term|---) ", line)]
    assert len(rows) == len(TERMS) > 60, "a row begins with | <a id=…></a>term | meaning | lesson |"
    for row in rows:
        assert re.fullmatch(r"\d+", row.strip("| ").rpartition("|")[2].strip()), f"no lesson in {row!r}"


def test_no_word_has_two_rows_and_no_anchor_occurs_twice():
    ids = [term.id for term in TERMS]
    names = [name for term in TERMS for name in term.names]
    assert len(ids) == len(set(ids)) and len(names) == len(set(names))


def test_the_first_use_becomes_a_link_with_its_meaning_and_the_second_stays():
    html = convert("A block, and a block.")
    link = '<a class="term" href="../glossary.md#block" title="slots in a row, 16 of them">block</a>'
    assert html == f"<p>A {link}, and a block.</p>"


@pytest.mark.parametrize(
    "text",
    ["## A block", "`block`", "[a block](x.md)", "    block", "| block |\n| --- |\n| x |", "blocking", "sub-block"],
)
def test_headings_code_links_and_parts_of_words_stay(text):
    assert 'class="term"' not in convert(text)
