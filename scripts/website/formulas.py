"""Course machinery. A Markdown extension for the website: a formula is text before KaTeX typesets it.

Where no script runs, a reader sees `X ← X + O W<sub>O</sub>` and not TeX. The source goes into `data-tex`, from where
assets/js/math.js takes it. Only the little TeX of the course's pages is known; any other command keeps its name.
"""

import re
from html import escape, unescape

from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

FORMULA = re.compile(r'(<(span|div) class="arithmatex")>\\[(\[](.*?)\\[)\]]</\2>', re.DOTALL)
SIGNS = {
    "gets": "←", "cdot": "·", "odot": "⊙", "times": "×", "top": "⊤", "sqrt": "√", "varphi": "φ", "theta": "θ",
    "epsilon": "ε", "beta": "β", "le": "≤", "ge": "≥", "approx": "≈", "infty": "∞", "sum": "Σ", "leftarrow": "←",
    "lVert": "‖", "rVert": "‖", "lvert": "|", "rvert": "|", "dots": "…", "qquad": "\u2003", "cr": "; ", "Big": "",
}  # fmt: skip
SIMPLE = r"\{([^{}]*)\}"


def as_text(tex: str) -> str:
    """Return a formula as HTML without TeX."""
    text = re.sub(r"\\(?:mathrm|text)" + SIMPLE, r"\1", unescape(tex).strip())
    text = re.sub(r"\\(?:begin|end)\{bmatrix\}", lambda found: "[]"["end" in found[0]], text)
    text = escape(re.sub(r"\\[,;: ]", " ", text.replace("&", ", ")), quote=False)
    for mark, tag in (("_", "sub"), ("^", "sup")):
        inner = rf"{re.escape(mark)}(?:{SIMPLE}|(\\[A-Za-z]+|\S))"
        text = re.sub(inner, lambda f, t=tag: f"<{t}>{f[1] or f[2]}</{t}>", text)
    text = re.sub(r"\\d?frac" + SIMPLE + SIMPLE, lambda found: f"{grouped(found[1])} / {grouped(found[2])}", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda found: SIGNS.get(found[1], found[1] + " "), text)
    return text.replace("{", "(").replace("}", ")")


def grouped(part: str) -> str:
    """Return one side of a fraction, in parentheses if it is a sum or has several words."""
    return f"({part})" if " " in part else part


class Formulas(Postprocessor):
    def run(self, text: str) -> str:
        def replaced(found: re.Match) -> str:
            shown = ' data-display=""' if found[2] == "div" else ""
            tex = escape(unescape(found[3]).strip())
            return f'{found[1]} data-tex="{tex}"{shown}>{as_text(found[3])}</{found[2]}>'

        return FORMULA.sub(replaced, text)


class FormulasExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.postprocessors.register(Formulas(md), "formulas", -20)


def makeExtension(**settings) -> FormulasExtension:
    return FormulasExtension(**settings)
