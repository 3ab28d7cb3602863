"""Course machinery. Search in a reader's own words, and in Zensical's build of the same site.

Protects readers who know what they want and not yet what the course calls it.
"""

import re
import shutil
import subprocess
import sys

from scripts import ROOT
from scripts.website.browser import served

import pytest

TYPED = {  # what a reader types: the page that must come first
    "quantization": "l17_bits/",
    "install": "",
    "requirements": "",
    "fragmentation": "l2_token_flat/",
    "FlashAttention": "l3_block_tensor/",
    "temperature": "l4_sampler/",
    "throughput": "l5_scheduler/",
    "detokenization": "l6_text/",
    "OpenAI API": "l7_server/",
    "prompt caching": "l8_radix/",
    "RadixAttention": "l8_radix/",
    "memory bandwidth": "l9_speed/",
    "CUDA graph": "l10_device/",
    "Mamba": "l11_hybrid/",
    "offloading": "l12_tiers/",
    "load balancing": "l13_machines/",
    "speculative decoding": "l14_speculation/",
    "sliding window": "l15_windows/",
    "DeepSeek": "l16_latents/",
    "tensor parallelism": "l18_ranks/",
    "disaggregation": "l19_handover/",
    "grading": "teachers/",
    "benchmark": "ladder/",
}
FIRST = ".md-search-result__item:first-child a"


def first_of(page) -> str:
    """Return the address of the first result, once it has stayed the same for a while."""
    before, now = "", page.locator(FIRST).first.get_attribute("href")
    while now != before:
        page.wait_for_timeout(400)
        before, now = now, page.locator(FIRST).first.get_attribute("href")
    return re.split("[?#]", now)[0]


def test_twenty_words_of_readers_lead_to_their_page(site_http, browser):
    page = browser.new_page()
    page.goto(site_http.url())
    box = page.locator(".md-search__input")
    box.click()
    found = {}
    for words in TYPED:
        box.press("Control+A")
        box.press("Backspace")
        page.locator(".md-search-result__item").first.wait_for(state="detached")
        box.press_sequentially(words)
        found[words] = first_of(page)
    page.close()
    assert len(TYPED) >= 20
    assert {words: href.removeprefix(site_http.base) for words, href in found.items()} == TYPED


def test_zensical_s_site_is_searched_with_the_keyboard(tmp_path, browser):
    """Its search box is not the theme's: a script that waits for the theme's would keep the index back for ever."""
    pytest.importorskip("zensical", reason="needs the successor of mkdocs-material: pip install zensical")
    for name in ("lessons", "site", "scripts", "mini_engine"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, "-m", "zensical", "build"], cwd=tmp_path, check=True, capture_output=True)
    with served(tmp_path / "build" / "site") as base:
        page = browser.new_page()
        page.goto(base)
        page.wait_for_load_state("networkidle")
        page.keyboard.press("/")
        page.keyboard.type("block table", delay=30)
        page.get_by_text("results").first.wait_for()
        assert page.locator("a[href*='l3_block_tensor/']", has_text="Block").count()
        page.close()
