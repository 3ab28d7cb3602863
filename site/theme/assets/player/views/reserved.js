// Course machinery. Lesson 1's picture: caches reserved at full length, their rows in use, and both as one bar.
(function () {
  "use strict";
  const HIGH = 24;

  const clip = (word, wide) => {
    const most = Math.floor((wide - 4) / 5.9);
    return word.length <= most ? word : word.slice(0, most - 1) + "…";
  };

  // A place for a cache: its rows, in one line or, where the page is narrow, in two.
  function place(pen, at, cache, scene, y) {
    const perLine = pen.width >= 560 ? scene.rows : scene.rows / 2;
    const pitch = (pen.width - 38) / perLine;
    const letter = cache ? cache.name.toLowerCase() : "";
    if (cache) pen.badge("cache-" + cache.name, 14, y + 12, cache.name);
    for (let row = 0; row < scene.rows; row++) {
      const [x, top] = [36 + (row % perLine) * pitch, y + Math.floor(row / perLine) * (HIGH + 18)];
      const [key, wide] = [`row-${at}-${row}`, pitch - 4];
      const used = cache && row < cache.used;
      pen.rect(key, x, top, wide, HIGH, !cache ? "free" : (used ? "held " : "empty ") + letter);
      pen.text(key + "-number", x + wide / 2, top + HIGH + 12, row, "small mid muted num");
      if (!cache || row >= cache.words.length) continue;
      if (!used) pen.rect(key + "-next", x, top, wide, HIGH, "wish");
      pen.text(`${cache.name}-${row}`, x + wide / 2, top + 16, clip(cache.words[row], wide), "small mid" + (used ? "" : " muted"));
      if (cache.wrote.includes(row)) pen.rect(key + "-wrote", x - 1, top - 1, wide + 2, HIGH + 2, "ring");
    }
    const words = cache ? `cur_len ${cache.used}, ${scene.rows - cache.used} reserved for later` : `free: room for a cache of ${scene.rows} rows`;
    const below = y + (HIGH + 18) * (scene.rows / perLine) + 10;
    pen.text("place-" + at, 36, below, words, "label muted num");
    return below + 14;
  }

  // All of memory as a bar: for each cache what is used and what is only reserved.
  function sums(pen, frame, scene, y) {
    const unit = (pen.width - 4) / (scene.rows * scene.places);
    const caches = frame.caches.filter(Boolean);
    const used = caches.reduce((sum, cache) => sum + cache.used, 0);
    const reserved = caches.length * scene.rows;
    frame.caches.forEach((cache, at) => {
      const [x, wide] = [2 + at * scene.rows * unit, scene.rows * unit];
      pen.rect("share-" + at, x, y, wide - 2, 18, cache ? "empty " + cache.name.toLowerCase() : "free");
      if (cache && cache.used) pen.rect("used-" + at, x, y, cache.used * unit, 18, "held " + cache.name.toLowerCase());
    });
    const share = reserved ? Math.round(100 - (100 * used) / reserved) : 0;
    const [most, held] = [frame.bytes.reserved / 1024, frame.bytes.used / 1024];
    pen.text("sum", 2, y + 36, `${reserved} rows reserved, ${used} used`, "strong num");
    pen.text("share", pen.width - 2, y + 36, `${share} % unused`, "strong end num accent");
    pen.text("bytes", 2, y + 54, `${most.toFixed(0)} KiB reserved, ${held.toFixed(0)} KiB used`, "label muted num");
    const waits = frame.waiting.length ? `waits: ${frame.waiting.join(", ")}` : "no request waits";
    pen.text("waits", pen.width - 2, y + 54, waits, "label end" + (frame.waiting.length ? " strong" : " muted"));
    return y + 62;
  }

  window.KvPlayer.views.reserved = function (pen, frame, scene) {
    let y = 2;
    frame.caches.forEach((cache, at) => (y = place(pen, at, cache, scene, y)));
    y = sums(pen, frame, scene, y);
    const sign = (style) => (x, top, key) => pen.rect(key, x, top, 20, 16, style);
    pen.height = pen.legend(y + 4, [
      ["K and V written", sign("held a")],
      ["reserved, empty", sign("empty a")],
      ["known, not written", sign("wish")],
    ]);
  };
})();
