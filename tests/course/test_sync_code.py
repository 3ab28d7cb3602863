"""Course machinery. Code blocks in the pages equal the engine's source and are kept up to date.

Protects readers from code on a page that the engine does not run.
"""

from scripts.pages.sync_code import SyncError, main, symbol_source

import pytest

SOURCE = '''"""Lesson 0."""

import functools

LIMIT: int = 3  # kept
A = B = 1


class Box:
    """A box."""

    size = 2

    @functools.cache
    @staticmethod
    def open(  # how
        x,
    ):
        """Open."""
        return """
    two
""" if x else None  # é

    async def close(self): ...
'''


@pytest.fixture
def root(tmp_path):
    (tmp_path / "mini_engine").mkdir()
    (tmp_path / "mini_engine/box.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def page(root, text: str, name: str = "README.md"):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def block(symbol: str, body: str = "old", indent: str = "") -> str:
    lines = [f"<!-- code: mini_engine/box.py{symbol} -->", "```python", *body.splitlines(), "```"]
    return "".join(f"{indent}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("symbol", "first", "last"),
    [
        ("Box.open", "@functools.cache", '""" if x else None  # é'),
        ("Box.close", "async def close(self): ...", "async def close(self): ..."),
        ("Box", "class Box:", "    async def close(self): ..."),
        ("LIMIT", "LIMIT: int = 3  # kept", "LIMIT: int = 3  # kept"),
        ("B", "A = B = 1", "A = B = 1"),
        ("Box.size", "size = 2", "size = 2"),
    ],
)
def test_a_symbol_is_its_source_dedented_with_its_decorators(symbol, first, last):
    lines = symbol_source(SOURCE, symbol).splitlines()
    assert (lines[0], lines[-1]) == (first, last)


@pytest.mark.parametrize("symbol", ["nothing", "Box.nothing", "LIMIT.real", "functools"])
def test_a_missing_symbol_is_named(symbol):
    with pytest.raises(SyncError, match=f"there is no {symbol}"):
        symbol_source(SOURCE, symbol)


def test_a_rewrite_puts_all_blocks_in_step_and_touches_nothing_else(root):
    text = "# é\n\n" + block("::Box.size") + "\nbetween\n\n" + block("::LIMIT", "") + "\n```python\nmine\n```\nend\n"
    path = page(root, text, "lessons/l0/README.md")
    assert main(["--root", str(root), "--check"]) == 1 and path.read_text(encoding="utf-8") == text
    assert main(["--root", str(root)]) == 0
    assert path.read_text(encoding="utf-8") == (
        "# é\n\n" + block("::Box.size", "size = 2") + "\nbetween\n\n" + block("::LIMIT", "LIMIT: int = 3  # kept")
        + "\n```python\nmine\n```\nend\n"
    )  # fmt: skip
    assert main(["--root", str(root), "--check"]) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (block("::Lid"), ":2: there is no Lid in mini_engine/box.py"),
        ("<!-- code: mini_engine/lid.py::Lid -->\n```python\n```\n", ":2: there is no file mini_engine/lid.py"),
        ("<!-- code: mini_engine/box.py::Box -->\ntext\n", ":1: no code block follows this comment"),
        ("<!-- code: mini_engine/box.py::Box -->\n```python\nnever closed\n", ":2: this block is never closed"),
    ],
)
def test_what_cannot_be_put_in_step_is_named_and_left_alone(root, capsys, text, words):
    path = page(root, text)
    for arguments in ([], ["--check"]):
        assert main(["--root", str(root), *arguments]) == 1
        assert "README.md" + words in capsys.readouterr().err
        assert path.read_text(encoding="utf-8") == text
