"""Course machinery. Updates the code blocks in the pages, which mirror the engine's source.

A block under `<!-- code: mini_engine/kv/token_flat.py::FlatKvPool.set_kv -->` contains that symbol's source: a
function, a method, a class or a constant, with its decorators, dedented. Without `::symbol` it contains the whole file.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts import ROOT

from lessons._course.pages import Block, Page, find_pages

MARK = "code:"


class SyncError(ValueError):
    """The reason a block cannot be updated, in one sentence."""


def symbol_source(source: str, symbol: str) -> str:
    """Return the source of `symbol` (`function`, `Class.method`, `CONSTANT`), with decorators, dedented.

    Raises:
        SyncError: there is no such symbol.
    """
    node = symbol_node(source, symbol)
    first, last = lines_of(node)
    lines = source.splitlines()[first - 1 : last]
    return "\n".join(line.removeprefix(" " * node.col_offset) for line in lines)


def symbol_node(source: str, symbol: str) -> ast.stmt:
    """Return the statement that defines `symbol`. Raises SyncError if there is none."""
    *outer, last = symbol.split(".")
    body = ast.parse(source).body
    for name in outer:
        body = getattr(definition(body, name, symbol), "body", [])
    return definition(body, last, symbol)


def lines_of(node: ast.stmt) -> tuple[int, int]:
    """Return the first and the last line of a definition, with its decorators, counted from 1."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return first, node.end_lineno or first


def definition(body: list[ast.stmt], name: str, symbol: str) -> ast.stmt:
    """Return the statement of `body` that defines `name`, a part of `symbol`. Raises SyncError if there is none."""
    for node in body:
        if name in names_of(node):
            return node
    raise SyncError(f"there is no {symbol}")


def names_of(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def wanted(reference: str, root: Path) -> list[str]:
    """Return the lines that a block marked with `reference` must contain.

    Raises:
        SyncError: the file or the symbol does not exist.
    """
    file, _, symbol = reference.partition("::")
    path = root / file
    if not path.is_file():
        raise SyncError(f"there is no file {file}")
    source = path.read_text(encoding="utf-8")
    try:
        return (symbol_source(source, symbol) if symbol else source.rstrip()).splitlines()
    except SyncError as error:
        raise SyncError(f"{error} in {file}") from None


def marked_blocks(page: Page) -> Iterator[tuple[Block, str]]:
    """Yield the page's blocks under a `code:` comment, and what each comment names."""
    for block in page.blocks:
        if block.comment.startswith(MARK):
            yield block, block.comment.removeprefix(MARK).strip()


def lone_marks(page: Page) -> Iterator[int]:
    """Yield the lines of `code:` comments that no block follows."""
    opened = {block.line for block in page.blocks}
    for number, line in page.prose:
        if line.strip().startswith("<!-- " + MARK):
            following = next((n for n in range(number + 1, len(page.lines) + 1) if page.lines[n - 1].strip()), None)
            if following not in opened:
                yield number


def sync(page: Page, root: Path) -> tuple[list[str], list[str]]:
    """Return the page's lines with every marked block updated, and a complaint for each block that was stale."""
    lines, complaints = list(page.lines), []
    for number in lone_marks(page):
        complaints.append(f"{shown(page.path, root)}:{number}: no code block follows this comment")
    for block, reference in reversed(list(marked_blocks(page))):
        place = f"{shown(page.path, root)}:{block.line}"
        try:
            fresh = wanted(reference, root)
        except SyncError as error:
            complaints.append(f"{place}: {error}")
            continue
        if not block.closed:
            complaints.append(f"{place}: this block is never closed")
        elif list(block.lines) != fresh:
            complaints.append(f"{place}: the block no longer equals {reference}")
            new = [(block.indent + line).rstrip() for line in fresh]
            lines[block.line : block.line + len(block.lines)] = new
    return lines, sorted(complaints)


def shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def main(argv: list[str] | None = None) -> int:
    """Update the blocks, or with --check only compare. Returns 1 if a block is stale or cannot be updated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a block is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: this one)")
    args = parser.parse_args(argv)
    left = 0
    for path in find_pages(args.root):
        page = Page.read(path)
        lines, complaints = sync(page, args.root)
        if lines != page.lines and not args.check:
            path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
            print(f"updated: {shown(path, args.root)}")
            _, complaints = sync(Page.read(path), args.root)
        left += len(complaints)
        print(*complaints, sep="\n", end="\n" if complaints else "", file=sys.stderr)
    if left and args.check:
        print("to update them: python -m scripts.pages.sync_code", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
