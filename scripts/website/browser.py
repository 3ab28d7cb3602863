"""Course machinery. The website in a browser: build it, serve it, open its pages.

For the tests of the site (tests/course/site_fixtures.py). Playwright drives an installed Chromium or Chrome and never
downloads a browser.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_MS = 90_000  # on a busy machine
PHONE, DESKTOP = 390, 1280


@dataclass(frozen=True)
class Site:
    """A build of the website. base: the address of its folder, with a trailing slash."""

    folder: Path
    base: str
    is_file: bool

    @classmethod
    def on_disk(cls, folder: Path) -> "Site":
        """Return a build that is read without a server."""
        return cls(folder, folder.as_uri() + "/", is_file=True)

    @property
    def pages(self) -> list[str]:
        """The pages' sources, relative to lessons/: `README.md`, `l2_token_flat/README.md`, `glossary.md`."""
        docs = ROOT / "lessons"
        found = (path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
        return sorted(name for name in found if self.path(name).exists())

    def path(self, source: str) -> Path:
        """Return the file built from a page's source."""
        return self.folder / (self.place(source) + "index.html" if self.is_folder(source) else self.place(source))

    def url(self, source: str = "README.md") -> str:
        """Return the address of the page built from `source`, by default the home page. A fragment (#…) stays."""
        source, mark, fragment = source.partition("#")
        index = "index.html" if self.is_file and self.is_folder(source) else ""
        return self.base + self.place(source) + index + mark + fragment

    def is_folder(self, source: str) -> bool:
        return not self.is_file or Path(source).name == "README.md"

    def place(self, source: str) -> str:
        if Path(source).name == "README.md":
            return source.removesuffix("README.md")
        return source.removesuffix(".md") + (".html" if self.is_file else "/")


class BuildError(RuntimeError):
    """A strict build failed; the message contains mkdocs' output."""


def build(folder: Path, *, offline: bool, config: Path = ROOT / "mkdocs.yml") -> subprocess.Popen:
    """Start a strict build of the site into `folder`."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(folder)]
    env = os.environ | {"OFFLINE": str(offline).lower(), "NO_MKDOCS_2_WARNING": "1", "PYTHONIOENCODING": "utf-8"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=subprocess.STDOUT, encoding="utf-8")


def build_sites(folders: dict[str, Path], **options) -> None:
    """Build the site strictly, in parallel, into folders: `http` for a server, `file` for reading from disk."""
    jobs = {kind: build(folder, offline=kind == "file", **options) for kind, folder in folders.items()}
    said = {kind: job.communicate()[0] for kind, job in jobs.items()}
    for kind, job in jobs.items():
        if job.returncode:
            raise BuildError(f"python -m mkdocs build --strict failed (for {kind}):\n{said[kind]}")


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve `folder` on this machine, on a free port. Yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def find_browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


@contextlib.contextmanager
def launched(executable: str) -> Iterator:
    """Yield a headless Chromium driven by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--disable-dev-shm-usage"] + (["--no-sandbox"] if getattr(os, "geteuid", lambda: 1)() == 0 else [])
        browser = playwright.chromium.launch(executable_path=executable, args=flags)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visitor:
    """A browser tab that records what must not happen: requests to other hosts, errors in the console."""

    page: "Page"
    base: str
    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("request", self.see_request)
        self.page.on("console", self.see_message)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def see_request(self, request) -> None:
        if not request.url.startswith((self.base, "data:", "blob:", "about:")):
            self.outside.append(request.url)

    def see_message(self, message: "ConsoleMessage") -> None:
        if message.type == "error":
            self.errors.append(message.text)

    @property
    def complaints(self) -> list[str]:
        return [f"requested {url}" for url in self.outside] + [f"console: {text}" for text in self.errors]

    def forget(self) -> None:
        self.outside.clear()
        self.errors.clear()


@contextlib.contextmanager
def visiting(browser, site: Site, *, scheme: str = "light", width: int = 1280, **options) -> Iterator[Visitor]:
    """Yield a new tab. scheme: the system's preference, `light` or `dark`. width: in pixels; 390 is a phone."""
    size = {"width": width, "height": 844 if width < 600 else 900}
    context = browser.new_context(color_scheme=scheme, viewport=size, **options)
    try:
        yield Visitor(context.new_page(), site.base)
    finally:
        context.close()
