"""Lesson 1. The smoke script: equal tokens, bytes reserved and used, reused prefixes, a cache that is too short."""

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
    assert report["kv"]["used_bytes"] == 7 * per_token, (
        "3 prompt tokens and 4 of 5 new ones are written, the last is not"
    )


def test_with_reuse_a_prompt_keeps_what_it_shares_with_the_text_before(capsys):
    prompts = ["--prompt-ids", "1,2,3,4", "--prompt-ids", "1,2,3,4", "--prompt-ids", "1,2,9"]
    code = l1_smoke.main(["--model", str(checkpoint(FAMILY)), *prompts, "--max-new-tokens", "5", "--reuse", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["match"]
    assert report["kv"]["reused_tokens"] == 3 + 2, "3 of 4 tokens (the last one is always fed), then 2 of 3"


def test_a_cache_too_short_exits_2_with_one_line(capsys):
    arguments = ["--model", str(checkpoint(FAMILY)), "--prompt-ids", "1,2,3", "--max-seq-len", "4"]
    assert l1_smoke.main(arguments) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1, f"an error is one line, without a traceback:\n{error}"
