"""Course machinery. Draws the cards that links to the course show elsewhere, one for each lesson; and the icons.

    python -m scripts.website.cards            # write those that are missing or out of date
    python -m scripts.website.cards --check    # write nothing; exit 1 if there is one

A card is 1,200 by 630 pixels: title, summary and picture of the lesson, in the site's font, drawn by Chromium. Cards
are committed, because the site is also built where there is no browser; `cards.json` has a digest of what each shows.
"""

import base64
import hashlib
import io
import json
import re
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

from scripts import ROOT
from scripts.pages.generated import asks_for_check
from scripts.website.browser import find_browser, launched

from lessons._course.catalog import read_lessons
from lessons._course.places import Places

THEME = ROOT / "site" / "theme" / "assets"
FOLDER = THEME / "cards"
DIGESTS = FOLDER / "cards.json"
WIDTH, HEIGHT, COLORS = 1200, 630, 96
ICONS = {"favicon-32.png": 32, "apple-touch-icon.png": 180}
PICTURES = {  # the most telling one
    "l0_the_loop": "the-loop.svg",
    "l1_contiguous": "reserved.svg",
    "l2_token_flat": "pool.svg",
    "l3_block_tensor": "tables.svg",
    "l4_sampler": "six-steps.svg",
    "l5_scheduler": "batch.svg",
    "l6_text": "bytes.svg",
    "l7_server": "mailboxes.svg",
    "l8_radix": "tree.svg",
    "l9_speed": "step.svg",
    "l10_device": "three-ways.svg",
    "l11_hybrid": "states.svg",
    "l12_tiers": "tiers.svg",
    "l13_machines": "replicas.svg",
    "l14_speculation": "guesses.svg",
    "l15_windows": "windows.svg",
    "l16_latents": "latents.svg",
    "l17_bits": "bits.svg",
    "l18_ranks": "ranks.svg",
    "l19_handover": "handover.svg",
    "l20_agents": "agents.svg",
}
STYLE = """
@font-face { font-family: "Plex Sans"; src: url(%s) format("woff2"); font-weight: 100 700 }
@font-face { font-family: "Plex Mono"; src: url(%s) format("woff2") }
@font-face { font-family: "Plex Mono"; src: url(%s) format("woff2"); unicode-range: U+2190-25FF }
* { box-sizing: border-box } p, pre, h1 { margin: 0 }
body { display: grid; grid-template-columns: 384px 1fr; gap: 36px; width: 1200px; height: 630px; margin: 0;
  padding: 50px 40px 50px 54px; background: #fbfcfd; color: #1d2633; font: 25px/1.4 "Plex Sans" }
.words { display: flex; flex-direction: column; align-items: flex-start }
.logo { width: 40px; margin-bottom: 14px } .kicker { margin-bottom: auto; color: #535f72 }
h1 { margin-bottom: 18px; font-size: 50px; font-weight: 600; line-height: 1.12; letter-spacing: -0.02em }
.says { margin-bottom: auto; color: #535f72 }
.picture { align-self: center; padding: 20px; background: #fff; border: 1px solid #d5dae2; border-radius: 18px }
.picture svg { display: block; width: 100%%; max-height: 490px } .picture text { font-family: "Plex Sans" }
"""


@dataclass(frozen=True)
class Card:
    """The contents of one card. name: its file's, without a suffix. picture: an SVG."""

    name: str
    kicker: str
    title: str
    says: str
    picture: Path

    @property
    def digest(self) -> str:
        """Return a digest of everything that the card is drawn from."""
        shown = self.picture.read_text(encoding="utf-8")
        return hashlib.sha256("\n".join((self.kicker, self.title, self.says, shown, STYLE)).encode()).hexdigest()[:16]

    @property
    def html(self) -> str:
        """Return the card as a page."""
        svg = self.picture.read_text(encoding="utf-8")
        shown = re.sub(r' font-family="[^"]*"', "", svg[svg.index("<svg") :])
        words = f"<p class=kicker>{escape(self.kicker)}</p><h1>{escape(self.title)}</h1>"
        words += f"<p class=says>{escape(self.says)}</p>"
        return (
            f"<!doctype html><meta charset=utf-8><style>{with_fonts()}</style>"
            f"<div class=words>{logo()}{words}</div><div class=picture>{shown}</div>"
        )


def data_url(path: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def with_fonts() -> str:
    """Return the style sheet with the site's fonts in it."""
    names = (
        "plex-sans/ibm-plex-sans-latin-wght-normal.woff2",
        "plex-mono/IBMPlexMono-Regular-Latin1.woff2",
        "plex-mono/IBMPlexMono-Regular-Pi.woff2",
    )
    return STYLE % tuple(data_url(THEME / "vendor" / name, "font/woff2") for name in names)


def logo() -> str:
    return (THEME / "favicon.svg").read_text(encoding="utf-8").replace("<svg ", '<svg class="logo" ', 1)


def cards() -> list[Card]:
    """Return the cards of the front page, the ladder and all lessons."""
    docs = ROOT / "lessons"
    says = "An LLM inference engine's KV cache, from scratch: 40 tokens per second become 3,201. The same tokens."
    ten = "Six pictures: tokens, keys and values, a cache, blocks, a tree of your own chats, and the bill."
    found = [
        Card("course", "The KV course", "Build the KV cache of an LLM engine", says, docs / "l8_radix" / "chats.svg"),
        Card(
            "ten-minutes",
            "In ten minutes",
            "Why your second message is cheaper",
            ten,
            docs / "ten-minutes" / "tokens.svg",
        ),
        Card("ladder", "The KV course", "What each lesson bought", says, docs / "ladder" / "ladder.svg"),
    ]
    for lesson in read_lessons(Places.find()):
        picture = lesson.page.parent / PICTURES[lesson.id]
        kicker = f"LLM inference, lesson {lesson.number}"
        found.append(Card(lesson.id, kicker, lesson.title, lesson.summary, picture))
    return found


def old(found: list[Card]) -> list[Card]:
    """Return the cards that are missing or out of date."""
    known = json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.exists() else {}
    return [card for card in found if known.get(card.name) != card.digest or not path_of(card).exists()]


def path_of(card: Card) -> Path:
    return FOLDER / f"{card.name}.png"


def small(png: bytes) -> bytes:
    """Return the picture in few colours, a quarter of the bytes; flat drawings need no more."""
    from PIL.Image import open as decoded

    out = io.BytesIO()
    decoded(io.BytesIO(png)).convert("RGB").quantize(COLORS).save(out, "PNG", optimize=True)
    return out.getvalue()


def shoot(browser, html: str, width: int, height: int, *, clear: bool = False) -> bytes:
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_content(html)
    page.evaluate("() => document.fonts.ready")
    taken = page.screenshot(omit_background=clear)
    page.close()
    return taken


def draw_icon(browser, name: str, size: int) -> None:
    """Draw the site's icon; for a phone's home screen it gets a background and a margin."""
    ground, margin = ("#fbfcfd", size // 8) if name.startswith("apple") else ("transparent", 0)
    style = f"<style>body{{margin:{margin}px;background:{ground}}}svg{{display:block;width:100%}}</style>"
    (THEME / name).write_bytes(shoot(browser, f"<!doctype html>{style}{logo()}", size, size, clear=not margin))


def main(argv: list[str] | None = None) -> int:
    check = asks_for_check(__doc__, argv)
    found = cards()
    stale = old(found)
    if check or not stale:
        print(
            f"out of date: {', '.join(card.name for card in stale)}" if stale else f"{len(found)} cards are up to date"
        )
        return 1 if stale else 0
    executable = find_browser()
    if executable is None:
        print("cards: no browser found; put Chromium or Chrome on the PATH.", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    with launched(executable) as browser:
        for name, size in ICONS.items():
            draw_icon(browser, name, size)
        for card in stale:
            path_of(card).write_bytes(small(shoot(browser, card.html, WIDTH, HEIGHT)))
            print(f"drew {path_of(card).relative_to(ROOT)}: {path_of(card).stat().st_size:,} bytes")
    digests = {card.name: card.digest for card in found}
    DIGESTS.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n", encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
