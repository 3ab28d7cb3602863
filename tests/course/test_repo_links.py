"""Course machinery. On the website, links to what it lacks lead to the repository, and a dead one causes a warning.

Without it, links to source files would be dead on the website although GitHub shows them.
"""

import logging
from types import SimpleNamespace

import pytest

markdown = pytest.importorskip("markdown")
from scripts.website import repo_links  # noqa: E402 (needs markdown)

REPO = "https://example.org/course"


def convert(text: str, page: str = "l0_the_loop/README.md") -> str:
    """Convert like mkdocs, which registers a processor that knows the current page."""
    md = markdown.Markdown(extensions=[repo_links.makeExtension(repo=REPO)])
    processor = markdown.treeprocessors.Treeprocessor(md)
    processor.file = SimpleNamespace(src_uri=page)
    md.treeprocessors.register(processor, "relpath", 0)
    return md.convert(text)


@pytest.mark.parametrize(
    ("link", "page", "path"),
    [
        ("../../mini_engine/checkpoint/config.py", "l0_the_loop/README.md", "mini_engine/checkpoint/config.py"),
        ("../README.md", "README.md", "README.md"),
        ("../README.md", "l0_the_loop/README.md", None),
        ("../../lessons/glossary.md", "l0_the_loop/README.md", None),
        ("picture.svg", "README.md", None),
        ("#section", "README.md", None),
        ("https://example.org/x", "README.md", None),
        ("mailto:someone@example.org", "README.md", None),
        ("/absolute", "README.md", None),
        ("../lessons-old/x.md", "README.md", "lessons-old/x.md"),
        ("loop.py#L3", "l10_device/README.md", "lessons/l10_device/loop.py"),
        ("l10_device/loop.py", "sources.md", "lessons/l10_device/loop.py"),
    ],
)
def test_a_link_is_outside_when_it_leaves_lessons_or_names_a_python_file(link, page, path):
    assert repo_links.outside_path(link, page) == path


def test_files_folders_and_pictures_get_the_repository_s_addresses(caplog):
    html = convert("[a](../../pyproject.toml#L3) [b](../../scripts) ![c](../../site/theme/assets/course.css)")
    assert f'href="{REPO}/blob/main/pyproject.toml#L3"' in html
    assert f'href="{REPO}/tree/main/scripts"' in html
    assert f'src="{REPO}/raw/main/site/theme/assets/course.css"' in html
    assert not caplog.records


@pytest.mark.parametrize("link", ["../../mini_engine/gone.py", "../../../elsewhere.md"])
def test_a_link_to_nothing_is_a_warning_that_mkdocs_counts(link, caplog):
    convert(f"[a]({link})")
    [record] = caplog.records
    assert record.levelno == logging.WARNING and record.name.startswith("mkdocs.")
    assert link in record.message and "l0_the_loop/README.md" in record.message
