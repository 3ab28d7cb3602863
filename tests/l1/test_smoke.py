"""Lesson 1. The smoke script: equal tokens, what was reserved and used, a cache that is too short."""

import json

from scripts import l1_smoke

from tests.support import checkpoint

FAMILY = "four, with biases"


def test_it_reports_bytes_reserved_and_used(capsys):
    code = l1_smoke.main(
        [
            "--model",
            str(checkpoint(FAMILY)),
            "--prompt-ids",
            "1,2,3",
            "--max-new-tokens",
            "5",
            "--max-seq-len",
            "512",
            "--json",
        ]
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"]
    per_token = report["kv"]["bytes"] // 512
    assert report["kv"]["used_bytes"] == 7 * per_token, "3 prompt tokens and 4 of 5 new ones have KV; the last has none"


def test_a_cache_too_short_exits_2_with_one_line(capsys):
    arguments = ["--model", str(checkpoint(FAMILY)), "--prompt-ids", "1,2,3", "--max-seq-len", "4"]
    assert l1_smoke.main(arguments) == 2
    error = capsys.readouterr().err
    assert "this cache has 4" in error and len(error.strip().splitlines()) == 1
