"""Course machinery. For suite `latents`: from how many queries on it is faster to expand latents, and its picture."""

import math
from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from scripts.bench.latents_speed import SHAPES, both_ways

from mini_engine.latents.latent_config import LatentConfig
from mini_engine.latents.reading import expanding_pays

CASE, TOKENS, Q_LENS = "DeepSeek-V3, 16 heads", 4096, (1, 16, 64, 128, 192, 256, 512, 1024)
ROUNDS = 3  # unless asked for others: half a minute


def growing_rows(args: Namespace) -> list[dict[str, Any]]:
    """Return milliseconds of both ways for one sequence after a long text, by its number of queries."""
    q_lens = Q_LENS[:-1] if args.quick else Q_LENS
    return [{"queries": q_len} | both_ways(CASE, args, 1, q_len, TOKENS, ROUNDS) for q_len in q_lens]


def growing_crossing(rows: Sequence[dict[str, Any]], guess: int | None) -> list[dict[str, Any]]:
    """Return where the two ways cross in `growing_rows`: guessed, counted and measured."""
    points = [(row["queries"], row["expanded / absorbed"]) for row in rows]
    return [{"tokens": TOKENS, "guessed": guess} | both_crossings(SHAPES[CASE].config, TOKENS, points)]


def draw_growing(rows: Sequence[dict[str, Any]], found: dict[str, Any], path: Path) -> None:
    """Draw both ways' time by the number of queries, with upright lines where they were expected to cross."""
    from scripts.bench.plot import ACCENT, BAR, MUTED, SERIES, lines

    queries = [row["queries"] for row in rows]
    times = {way: [row[f"{way} ms"] for row in rows] for way in ("expanded", "absorbed")}
    ends = [min(map(min, times.values())), max(map(max, times.values()))]
    series = {way: (queries, times[way], color) for way, color in (("expanded", SERIES[1]), ("absorbed", BAR))}
    for kind, color in (("counted", MUTED), ("guessed", ACCENT)):
        if found[kind]:
            series[f"{kind}: {found[kind]}"] = ([found[kind]] * 2, ends, color)
    ticks = [10**power for power in range(5) if ends[0] <= 10**power <= ends[1]]
    words = "Time of expanded and of absorbed attention against the number of queries; the two lines cross"
    lines(
        path,
        words,
        series,
        "queries of the sequence",
        f"ms, {CASE}, {TOKENS:,} tokens",
        queries[:4] + queries[5:],
        ticks,
    )


def crossing_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the number of queries from which expanding is faster, counted and measured."""
    found = []
    chunks = [row for row in rows if row["part"] == "reading" and row["sequences"] == 1]
    ordered = sorted(chunks, key=lambda row: (row["case"], row["tokens"], row["queries"]))
    for (name, kv_len), group in groupby(ordered, key=lambda row: (row["case"], row["tokens"])):
        points = [(row["queries"], row["expanded / absorbed"]) for row in group]
        if kv_len in SHAPES[name].chunks:
            found.append({"case": name, "tokens": kv_len} | both_crossings(SHAPES[name].config, kv_len, points))
    return found


def both_crossings(config: LatentConfig, kv_len: int, points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Return the number of queries from which expanding takes fewer multiplications, and from which it is faster."""
    counted = next((q for q in range(1, kv_len + 1) if expanding_pays(config, q, kv_len)), None)
    return {"counted": counted, "measured": crossing(points)}


def crossing(points: Sequence[tuple[int, float]]) -> float | None:
    """Return where the ratio falls below 1, interpolated linearly in logarithms; None if it never does."""
    for (q, ratio), (next_q, next_ratio) in pairwise(points):
        if ratio >= 1 > next_ratio:
            part = math.log(ratio) / (math.log(ratio) - math.log(next_ratio))
            return math.exp(math.log(q) + part * (math.log(next_q) - math.log(q)))
    return None
