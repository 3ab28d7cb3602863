// Course machinery. Lesson 18's picture: each rank's share of the matrices, what it brings, and the memory that they share.
(function () {
  "use strict";

  const BOX = 34; // of a matrix
  // A matrix's name, the stages in which it works, and how it is cut: by outputs (a weight's rows) or by inputs.
  const MATRICES = [
    ["embed", "embedding", "outputs"],
    ["q k v", "qkv", "outputs"],
    ["o", "o", "inputs"],
    ["gate up", "down", "outputs"],
    ["down", "down", "inputs"],
    ["head", "head", "outputs"],
  ];
  const colour = (rank) => "abcdef"[rank];
  const signed = (value) => value.toFixed(2).replace("-", "−");
  const numbers = (row) => (row ? row.map(signed).join("  ") + "  …" : "–");

  // One matrix: an outline, and this rank's part of it filled.
  function matrix(pen, key, rank, ranks, cut, isNow, x, y) {
    const part = BOX / ranks;
    pen.rect(key, x, y, BOX, BOX, "free");
    if (cut === "outputs") pen.rect(key + "-part", x, y + rank * part, BOX, part, "held " + colour(rank));
    else pen.rect(key + "-part", x + rank * part, y, part, BOX, "held " + colour(rank));
    if (isNow) pen.rect(key + "-now", x - 3, y - 3, BOX + 6, BOX + 6, "ring");
  }

  // A rank: its matrices, what it does, its part and its sum. Returns the height.
  function lane(pen, frame, rank, y, roomy) {
    const mine = frame.ranks[rank];
    const pitch = roomy ? 58 : Math.min(56, (pen.width - BOX - 6) / 5); // with room for a ring around the last one
    const left = roomy ? 64 : 3; // and around the first
    pen.text("rank-" + rank, 0, y + 12, "rank " + rank, "label strong");
    if (mine.does) pen.text("does-" + rank, roomy ? 0 : 54, y + (roomy ? 30 : 12), mine.does, "small muted");
    const top = roomy ? y : y + 22;
    MATRICES.forEach(([name, stage, cut], i) => {
      const x = left + (roomy ? 44 : 0) + i * pitch;
      matrix(pen, `matrix-${rank}-${i}`, rank, frame.ranks.length, cut, stage === frame.stage, x, top);
      pen.text(`name-${rank}-${i}`, x + BOX / 2, top + BOX + 14, name, "small mid muted");
    });
    const at = roomy ? left + 44 + 6 * pitch + 6 : 0;
    const under = roomy ? top + 12 : top + BOX + 34;
    pen.text("part-name-" + rank, at, under, frame.stage === "head" ? "logits" : "part", "small muted");
    pen.text("part-" + rank, at + 46, under, numbers(mine.part), "small num" + (mine.part ? "" : " muted"));
    pen.text("sum-name-" + rank, at, under + 20, "sum", "small muted");
    pen.text("sum-" + rank, at + 46, under + 20, numbers(mine.total), "small num" + (mine.total ? " strong" : " muted"));
    return roomy ? BOX + 34 : BOX + 22 + 56;
  }

  // The memory that ranks share: a flag for each, and two halves with a place for each.
  function shared(pen, frame, y, roomy) {
    const ranks = frame.ranks.length;
    pen.text("shared", 0, y + 12, roomy ? "memory that both see" : "shared memory", "label strong");
    const flags = roomy ? 200 : 0;
    const row = roomy ? y : y + 26;
    for (let rank = 0; rank < ranks; rank++) {
      const x = flags + rank * (roomy ? 110 : 96);
      pen.text("flag-name-" + rank, x, row + 14, "flag " + rank, "small muted");
      pen.rect("flag-" + rank, x + 44, row, 26, 20, "held " + colour(rank));
      pen.text("flag-value-" + rank, x + 57, row + 15, String(frame.flags[rank]), "label mid num strong");
    }
    const wide = roomy ? 190 : (pen.width - 8) / ranks;
    frame.places.forEach((places, half) => {
      const top = row + 34 + half * (roomy ? 34 : 50);
      const isNow = frame.half === half;
      pen.text("half-" + half, 0, top + (roomy ? 17 : 0), "half " + (1 - half) + (isNow ? ", this meeting" : ""), "small" + (isNow ? " strong" : " muted"));
      places.forEach((place, rank) => {
        const x = (roomy ? 130 : 0) + rank * (wide + 8);
        const at = roomy ? top : top + 6;
        pen.rect(`place-${half}-${rank}`, x, at, wide, 26, place ? "held " + colour(rank) : "free");
        const style = "small mid num" + (place ? "" : " muted");
        pen.text(`value-${half}-${rank}`, x + wide / 2, at + 17, place ? numbers(place) : "place of rank " + rank, style);
        if (isNow) pen.rect(`now-${half}-${rank}`, x - 2, at - 2, wide + 4, 30, "ring");
      });
    });
    return (roomy ? 34 + 2 * 34 : 26 + 34 + 2 * 50) + 4;
  }

  window.KvPlayer.views.ranks = function (pen, frame) {
    const roomy = pen.width >= 640;
    let y = pen.legend(0, [
      ["rank 0's", (x, y, key) => pen.rect(key, x, y, 20, 14, "held a")],
      ["rank 1's", (x, y, key) => pen.rect(key, x, y, 20, 14, "held b")],
      ["at work", (x, y, key) => pen.rect(key, x, y, 20, 14, "ring")],
    ]);
    y += 14;
    for (let rank = 0; rank < frame.ranks.length; rank++) y += lane(pen, frame, rank, y, roomy) + 12;
    y += shared(pen, frame, y + 4, roomy);
    pen.height = y + 4;
  };
})();
