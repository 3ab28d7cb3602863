"""Course machinery. Films the front page's tree of chats as a loop, for posts and slides.

    python -m scripts.website.film            # film it, if what is shown has changed
    python -m scripts.website.film --check    # write nothing; exit 1 if it has

Chromium opens lessons/l8_radix/chats.html in the built site and shows each step of lesson 8's recorded run; each is
a picture of site/theme/assets/show/chats.webp. `chats.json` has a digest of what was filmed.
"""

import hashlib
import io
import json
import sys
import tempfile
from pathlib import Path

from scripts import ROOT
from scripts.pages.chats import EMBED, STYLE
from scripts.pages.generated import asks_for_check
from scripts.website.browser import build_sites, find_browser, launched, served

FILM, DIGEST = STYLE.with_name("chats.webp"), STYLE.with_name("chats.json")
WIDTH, HEIGHT = 640, 470
BRIEF, LONG, LAST = 130, 900, 4000  # milliseconds of a block, of a chat's arrival and sum, of the end
STEPS = "() => JSON.parse(document.querySelector('.kv-chats').dataset.steps)"
GO = "step => document.querySelector('.kv-chats').show(step)"


def digest() -> str:
    """Return a digest of everything that the film is made of."""
    shown = [EMBED, STYLE, STYLE.with_name("chats.js")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in shown)).hexdigest()[:16]


def is_old() -> bool:
    return not (FILM.exists() and DIGEST.exists()) or json.loads(DIGEST.read_text(encoding="utf-8")) != digest()


def film(browser, address: str) -> bytes:
    """Return the loop as an animated WebP."""
    from PIL.Image import open as decoded

    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, reduced_motion="reduce")
    page.goto(address)
    page.evaluate("() => document.fonts.ready")
    steps = page.evaluate(STEPS)
    pictures, times = [], []
    for i in range(len(steps)):
        page.evaluate(GO, i)
        pictures.append(decoded(io.BytesIO(page.screenshot())).convert("RGB"))
        rests = i + 1 < len(steps) and steps[i][2] != steps[i + 1][2]
        times.append(LONG if rests else BRIEF)
    times[-1] = LAST
    page.close()
    out = io.BytesIO()
    pictures[0].save(out, "WEBP", save_all=True, append_images=pictures[1:], duration=times, loop=0, lossless=True)
    return out.getvalue()


def main(argv: list[str] | None = None) -> int:
    check = asks_for_check(__doc__, argv)
    if check or not is_old():
        print("the film is out of date; to film again: python -m scripts.website.film" if is_old() else "up to date")
        return int(is_old())
    executable = find_browser()
    if executable is None:
        print("film: no browser found; put Chromium or Chrome on the PATH.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        build_sites({"http": Path(folder)})
        with served(Path(folder)) as base, launched(executable) as browser:
            FILM.write_bytes(film(browser, base + "l8_radix/chats.html"))
    DIGEST.write_text(json.dumps(digest()) + "\n", encoding="utf-8", newline="\n")
    print(f"filmed {FILM.relative_to(ROOT)}: {FILM.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
