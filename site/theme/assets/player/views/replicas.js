// Course machinery. Lesson 13's picture: a prompt, the replicas with their caches, loads and scores, and the policies' sums.
(function () {
  "use strict";
  const [HIGH, GAP] = [26, 5];

  // A row of blocks, narrower where the page is. Returns the height that it takes.
  function blocks(pen, name, x, y, room, texts, places) {
    const wide = Math.min(40, (room + GAP) / places - GAP);
    texts.forEach((text, i) => {
      const left = x + i * (wide + GAP);
      const letter = text && text !== "S" ? " " + text[0].toLowerCase() : "";
      const key = `${name}-${text || "free" + i}`;
      pen.rect(key, left, y, wide, HIGH, !text ? "free" : text === "S" ? "plain" : "held" + letter);
      if (text) pen.text(key, left + wide / 2, y + 17, text, "mid mono");
    });
    return HIGH;
  }

  window.KvPlayer.views.replicas = function (pen, frame, scene) {
    const longest = 7; // blocks of the longest prompt, so that nothing below it moves
    pen.text("act", 0, 14, frame.act, "strong");
    pen.text("prompt", 0, 36, frame.prompt.length ? "prompt" : "no prompt yet", "label muted");
    let y = 44 + blocks(pen, "prompt", 2, 44, pen.width - 4, frame.prompt, longest) + 16;
    frame.replicas.forEach((replica, i) => {
      const chosen = i === frame.chosen;
      const words = [`replica ${i}`, `${replica.load} to finish`];
      if (replica.score) words.push(`score ${replica.score}`);
      pen.text("name-" + i, 10, y + 18, words.join(" · "), "label num" + (chosen ? " strong" : " muted"));
      const free = Array(Math.max(0, scene.capacity - replica.blocks.length)).fill("");
      const high = blocks(pen, "held-" + i, 10, y + 28, pen.width - 20, [...replica.blocks, ...free], scene.capacity);
      if (chosen) pen.rect("chosen", 1, y, pen.width - 2, high + 38, "ring");
      y += high + 46;
    });
    scene.acts.forEach((act, i) => {
      const total = frame.totals.find((text) => text.startsWith(act + ":"));
      const place = y + 14 + i * 34;
      pen.text("total-name-" + i, 0, place, act, "label" + (act === frame.act ? " strong" : " muted"));
      pen.text("total-" + i, 0, place + 15, total ? total.slice(act.length + 2) : "–", "label num muted");
    });
    pen.height = y + 34 * scene.acts.length + 4;
  };
})();
