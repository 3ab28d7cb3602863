"""Course machinery. The text of the API's pages: the engine's public API, extracted from the source's syntax tree.

`scripts.website.api_page` puts it into the pages when the website is built: a group into its page in lessons/api/, the
index of all names into lessons/api.md. `api_groups.py` lists which names are shown, and in which order. Everything else
(signatures, fields, defaults, docstrings, the commands' options, the server's routes) comes from the source, without
torch, so it cannot go stale.
"""

import ast
import re
import textwrap
from importlib import import_module
from typing import Any, TypeGuard

from scripts import ROOT
from scripts.pages.api_groups import GROUPS, Group

SECTION = re.compile(r"(Args|Returns|Raises|Attributes):$")
FIELD = re.compile(r"([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*): (\S.*)", re.DOTALL)
LONGEST_LINE = 80

COMMANDS = (
    ("generate", "mini_engine/cli/generate.py"),
    ("chat", "mini_engine/cli/chat.py"),
    ("serve", "mini_engine/cli/serve.py"),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def definitions(tree: ast.Module) -> list[ast.ClassDef | Function]:
    """Return the classes and functions at the top of a module."""
    return [node for node in tree.body if isinstance(node, ast.ClassDef | Function)]


def find(tree: ast.Module, name: str) -> ast.ClassDef | Function:
    """Return the class or function `name`. Raises LookupError if there is none."""
    for node in definitions(tree):
        if node.name == name:
            return node
    raise LookupError(f"there is no {name}")


def signature(node: Function) -> str:
    """Return `def name(…) -> …` without a body, one argument per line if one line would be too long."""
    flat = ast.unparse(ast.FunctionDef(node.name, node.args, [ast.Pass()], [], node.returns, lineno=0))
    flat = flat.removesuffix("pass").rstrip().removesuffix(":")
    flat = ("async " if isinstance(node, ast.AsyncFunctionDef) else "") + flat.replace("'", '"')
    flat = re.sub(r"(: [^=(),]+(?:\[[^=]*\])?[^=(),]*)=(?=\S)", r"\1 = ", flat)  # as ruff writes it
    if len(flat) <= LONGEST_LINE:
        return flat
    head, _, rest = flat.partition("(")
    inside, _, back = rest.rpartition(")")
    arguments = [f"    {part}," for part in split_arguments(inside)]
    return "\n".join([f"{head}(", *arguments, f"){back}"])


def split_arguments(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        quote = "" if sign == quote else quote or (sign if sign in "'\"" else "")
        depth += 0 if quote else (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def docstring(node: ast.Module | ast.ClassDef | Function) -> str:
    """Return the docstring, or "" if there is none."""
    return ast.get_docstring(node) or ""


def is_public(node: ast.AST) -> TypeGuard[Function]:
    return isinstance(node, Function) and not node.name.startswith("_")


def class_code(node: ast.ClassDef) -> str:
    """Return an object's construction: a dataclass's fields, an enum's values, or `__init__`."""
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    lines = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list] + [f"class {node.name}{bases}:"]
    fields = [ast.unparse(item).replace("'", '"') for item in node.body if isinstance(item, ast.AnnAssign | ast.Assign)]
    fields = [field for field in fields if not field.startswith("_")]
    made = next((item for item in node.body if isinstance(item, Function) and item.name == "__init__"), None)
    if made is not None:
        fields = signature(made).splitlines()
    return "\n".join(lines + [f"    {field}" for field in fields]) if fields else lines[-1].removesuffix(":")


def prose(docstring: str) -> list[str]:
    """Convert a docstring to Markdown: paragraphs unchanged, fields and sections as lists, indented text as blocks."""
    summary, *more = docstring.split("\n\n")
    out = [" ".join(summary.split())] if summary else []
    for paragraph in more:
        lines = paragraph.splitlines()
        if SECTION.match(lines[0]):
            out += [f"**{lines[0].rstrip(':')}**", bullets(textwrap.dedent("\n".join(lines[1:])).splitlines())]
        elif all(line.startswith("    ") for line in lines):
            out.append("```text\n" + textwrap.dedent(paragraph) + "\n```")
        elif FIELD.match(lines[0]):
            out.append(bullets(lines))
        else:
            out.append(paragraph if paragraph.startswith("- ") else " ".join(paragraph.split()))
    return out


def bullets(lines: list[str]) -> str:
    """Convert `name: words` lines to a list, joining continued lines. Several fields on one line stay together."""
    items: list[str] = []
    for line in lines:
        if FIELD.match(line) or not items:
            items.append(line)
        else:
            items[-1] += " " + line.strip()
    told = (FIELD.match(item) for item in items)
    return "\n".join(f"- `{m[1]}`: {m[2]}" if m else f"- {item}" for item, m in zip(items, told, strict=True))


def code(text: str) -> str:
    return f"```python\n{text}\n```"


def told(file: str, name: str, tree: ast.Module) -> list[str]:
    """Return the Markdown of one class, with its methods and properties, or one function."""
    node, module = find(tree, name), file.removesuffix(".py").replace("/", ".")
    parts = [f"## {name}", f"`from {module} import {name}` · [source](../../{file})"]
    if not isinstance(node, ast.ClassDef):
        return [*parts, code(signature(node)), *prose(docstring(node))]
    parts += [code(class_code(node)), *prose(docstring(node))]
    methods = [item for item in node.body if is_public(item)]
    marks = {item.name: [ast.unparse(decorator) for decorator in item.decorator_list] for item in methods}
    properties = [item for item in methods if "property" in marks[item.name]]
    if properties:
        rows = [f"- `{item.name}`: {' '.join(docstring(item).split())}" for item in properties]
        parts += ["**Properties**", "\n".join(rows)]
    methods = [item for item in methods if item not in properties]
    if methods:
        names = ", ".join(f"<code>{item.name}</code>" for item in methods)
        parts.append(f'<details markdown="1"><summary>Methods: {names}</summary>')
        for item in methods:
            parts.append(f'<h3 id="{slug(name)}.{item.name}"><code>{name}.{item.name}</code></h3>')
            above = "".join(f"@{mark}\n" for mark in marks[item.name])
            parts += [code(above + signature(item)), *prose(docstring(item))]
        parts.append("</details>")
    return parts


def slug(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


class Options:
    """Stands in for a command's parser and keeps the options that are added to it, as rows of a table."""

    def __init__(self) -> None:
        self.rows = ["| option | what it does |", "| --- | --- |"]

    def add_argument(self, *names: str, help: str = "", metavar: str = "", **given: Any) -> None:
        """Add a row: the spelling of an option, and its help or choices."""
        default = f" (default: {given['default']})" if "default" in given else ""
        words = (help or ", ".join(given.get("choices", ())) + default).replace("|", "\\|")
        shown = f"{', '.join(names)} {metavar}".strip()
        self.rows.append(f"| `{shown}` | {words} |")


def commands() -> list[str]:
    """Return the commands and their options."""
    parts: list[str] = []
    for name, file in COMMANDS:
        command, options = import_module(file.removesuffix(".py").replace("/", ".")), Options()
        command.add_arguments(options)
        said = (command.__doc__ or "").split(". ", 1)[1].split("\n\n")[0]
        parts += [
            f"## The command {name}",
            f"{' '.join(said.split())} · [source](../../{file})",
            "\n".join(options.rows),
        ]
    return [*parts, *routes()]


def routes() -> list[str]:
    """Return the server's routes, from the decorators in app.py."""
    rows = ["| route | what it returns |", "| --- | --- |"]
    sources = [(ROOT / "mini_engine/server" / name).read_text(encoding="utf-8") for name in ("app.py",)]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    for function in (node for node in nodes if isinstance(node, Function)):
        for call in function.decorator_list:
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and ast.unparse(call.func.value) == "app"
            ):
                method, path = call.func.attr.upper(), ast.literal_eval(call.args[0])
                rows.append(f"| `{method} {path}` | {docstring(function)} |")
    return [
        "## Routes",
        "The routes of `serve`. [Lesson 7](../l7_server/README.md) describes the errors.",
        "\n".join(rows),
    ]


def contract() -> list[str]:
    """Return the docstring of attention/contract.py: the contract that every kernel implements."""
    tree = ast.parse((ROOT / "mini_engine/attention/contract.py").read_text(encoding="utf-8"))
    _, _, rest = docstring(tree).partition("\n\n")
    shown = []
    for part in rest.split("\n\n"):
        head, _, listed = part.partition("\n- ")
        shown += [*prose("\n\n" + head), *(["- " + listed] if listed else [])]
    return ["## The contract", "From [`attention/contract.py`](../../mini_engine/attention/contract.py):", *shown]


def group(slug: str) -> str:
    """Return what a group's page shows of the source, as Markdown.

    Raises:
        KeyError: there is no such group.
    """
    shown = GROUPS[slug]
    parts = [shown.says, *(contract() if slug == "attention" else []), *(commands() if slug == "commands" else [])]
    for path, names in shown.files:
        file = f"mini_engine/{path}"
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        parts += [text for name in names for text in told(file, name, tree)]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """Return all groups with their names. Each name keeps the anchor that it had when the API was one page."""
    return "\n\n".join(part for shown in GROUPS.values() for part in listed(shown)) + "\n"


def listed(shown: Group) -> list[str]:
    """Return the index's part of one group."""
    page = f"api/{shown.slug}.md"
    names = [name for _, names in shown.files for name in names]
    links = [f"[`{name}`]({page}#{slug(name)}){{ #{slug(name)} .kv-symbol }}" for name in names]
    return [f"## [{shown.title}]({page})", shown.says.replace("](../", "]("), *([",\n".join(links)] if links else [])]
