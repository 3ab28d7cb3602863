"""Lesson 1. The smoke script: bytes reserved and used, reused prefixes, a cache that is too short."""

import json

from scripts import l1_smoke

from tests.support import checkpoint


def smoke(*arguments):
    return l1_smoke.main(["--model", str(checkpoint("four, with biases")), "--prompt-ids", "1,2,3,4", *arguments])


def test_it_reports_bytes_reserved_and_used(capsys):
    assert smoke("--max-new-tokens", "5", "--max-seq-len", "512", "--json") == 0
    kv = json.loads(capsys.readouterr().out)["kv"]
    assert kv["used_bytes"] * 512 == kv["bytes"] * 8, "4 prompt tokens and 4 of 5 new ones are written, the last is not"


def test_with_reuse_a_prompt_keeps_what_it_shares_with_the_text_before(capsys):
    others = ["--prompt-ids", "1,2,3,4", "--prompt-ids", "1,2,9"]
    assert smoke(*others, "--max-new-tokens", "5", "--reuse", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kv"]["reused_tokens"] == 3 + 2, "3 of 4 tokens (the last one is always fed), then 2 of 3"


def test_a_cache_too_short_exits_2_with_one_line(capsys):
    assert smoke("--max-seq-len", "4") == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1, f"an error is one line, without a traceback:\n{error}"
