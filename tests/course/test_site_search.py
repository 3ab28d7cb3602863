"""Course machinery. Search in a reader's own words, and in Zensical's build of the same site.

Protects readers who know what they want and not yet what the course calls it.
"""

import shutil
import subprocess
import sys

from scripts import ROOT
from scripts.website.browser import served, visiting

import pytest

from tests.course.looks import each_way

TYPED = {  # what a reader types: a page that must be among the first results
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
    "tool call": "l20_agents/",
    "grading": "teachers/",
    "interview": "interview/",
    "benchmark": "ladder/",
    "preemption": "l5_scheduler/",
    "chunked prefill": "l5_scheduler/",
    "radix": "l8_radix/",
    "copy on write": "l8_radix/",
    "top-p": "l4_sampler/",
    "top-k": "l4_sampler/",
}
BEFORE_ALL = {  # what a reader types: the pages that come before all others, in any order
    "kv cache": {"l0_the_loop/", "l1_contiguous/"},
    "eviction": {"l8_radix/"},
    "GQA": {"l0_the_loop/"},
    "evicton": {"l8_radix/"},  # one letter wrong, here and below
    "schedular": {"l5_scheduler/"},
}
FIRST = 3  # of the pages found; each has its sections below it
FOUND = "items => items.map(item => item.querySelector('a').href.split(/[?#]/)[0])"


def first_of(page) -> list[str]:
    """Return the addresses of the first pages found, once they have stayed the same for a while."""
    results = page.locator(".md-search-result__item")
    results.first.wait_for()
    before, now = [], results.evaluate_all(FOUND)
    while now != before:
        page.wait_for_timeout(400)
        before, now = now, results.evaluate_all(FOUND)
    return now[:FIRST]


def test_readers_words_lead_to_their_page(site_http, browser):
    page = browser.new_page()
    page.goto(site_http.url())
    box = page.locator(".md-search__input")
    box.click()
    missed = {}
    for words in (*TYPED, *BEFORE_ALL):
        box.press("Control+A")
        box.press("Backspace")
        page.locator(".md-search-result__item").first.wait_for(state="detached")
        box.press_sequentially(words)
        found = [address.removeprefix(site_http.base) for address in first_of(page)]
        wanted = BEFORE_ALL.get(words)
        if set(found[: len(wanted)]) != wanted if wanted else TYPED[words] not in found:
            missed[words] = found
    page.close()
    assert not missed, f"these do not lead to their page, but to {missed}"


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


@each_way
def test_search_finds_a_misspelt_block_table(way, site, browser):
    with visiting(browser, site) as visitor:
        visitor.page.goto(site.url())
        visitor.page.locator(".md-search__input").click()
        visitor.page.locator(".md-search__input").type("blok table")
        results = visitor.page.locator(".md-search-result__item a")
        results.and_(visitor.page.locator("[href*='h=table']")).first.wait_for()  # those of all that was typed
        results.first.click()
        visitor.page.wait_for_selector("h1")
        assert "l3_block_tensor" in visitor.page.url, f"led to {visitor.page.url.removeprefix(site.base)}"
        assert not visitor.complaints
