// Course machinery. Lesson 20's picture: the tree with its leaves' owners and ages, what went, and what each policy found.
(function () {
  "use strict";
  const [HIGH, GAP, LETTERS] = [26, 14, 6.1]; // of a block; before a node; about a letter's width at 11px

  const clip = (text, room) => {
    const most = Math.floor(room / LETTERS);
    return text.length <= most ? text : text.slice(0, most - 1).trimEnd() + "…";
  };

  // A block looks like its owner: an agent's letter, or none for the system prompt and for questions.
  const style = (name) => (/^[a-e]/i.test(name) ? "held " + name[0].toLowerCase() : "plain");

  function cell(pen, name, x, y, wide, isGone) {
    pen.rect("block-" + name, x, y, wide, HIGH, isGone ? "free" : style(name));
    if (isGone) pen.texture("gone-" + name, x, y, wide, HIGH, "strokes");
    if (isGone) pen.rect("plate-" + name, x + wide / 2 - 9, y + 5, 18, 16, "plate");
    pen.text("block-" + name, x + wide / 2, y + 17, name, "small mid num strong");
  }

  function legend(pen, y, canChoose) {
    const box = (look, texture) => (x, y, key) => {
      pen.rect(key, x, y, 20, 16, look);
      if (texture) pen.texture(key + "-texture", x, y, 20, 16, texture);
    };
    return pen.legend(y, [
      ["an agent’s", box("held a")],
      ["a question’s", box("plain")],
      ["evicted now", box("free", "strokes")],
      ...(canChoose ? [] : [["next to go", box("ring")]]),
    ]);
  }

  // The agents, and since when each waits: the clock that the policy may or may not know.
  function agents(pen, frame, y) {
    const room = pen.width / Math.max(2, frame.agents.length);
    frame.agents.forEach(({ name, words }, i) => {
      pen.badge("agent-" + name, 13 + i * room, y + 12, name);
      pen.text("agent-words-" + name, 30 + i * room, y + 16, clip(words, room - 32), "small muted num");
    });
    return y + 34;
  }

  // How far apart blocks are, so that the longest text of a frame fits, with the gaps before its nodes.
  function pitchOf(pen, { nodes }) {
    const ends = { "": { blocks: 0, gaps: 0 } };
    for (const { blocks, parent } of nodes) {
      const above = ends[parent]; // parents come first
      ends[blocks[0]] = { blocks: above.blocks + blocks.length, gaps: above.gaps + 1 };
    }
    return Math.min(40, ...Object.values(ends).map(({ blocks, gaps }) => (pen.width - 14 - gaps * GAP) / blocks));
  }

  // A row for each leaf: a parent stands in its first child's row. Returns where the next part begins.
  function tree(pen, frame, pitch, top) {
    const children = (name) => frame.nodes.filter((node) => node.parent === name);
    let [y, bottom] = [top, top]; // of the row, and where the next one begins
    pen.add("circle", "root", 7, top + HIGH / 2, { class: "root", r: 6 });
    const place = (parent, fromX, fromY) => {
      children(parent).forEach((node, i) => {
        if (i) y = bottom;
        const [first] = node.blocks;
        const [x, down, middle] = [fromX + GAP, y - fromY, HIGH / 2];
        const bend = down ? `M0 ${middle}h${GAP / 2}V${down + middle}h${GAP / 2}` : `M0 ${middle}h${GAP}`;
        pen.path("edge-" + first, fromX, fromY, bend, "line");
        node.blocks.forEach((name, j) => cell(pen, name, x + j * pitch, y, pitch - 4));
        const end = x + node.blocks.length * pitch - 4;
        if (node.next) pen.rect("next", x - 3, y - 3, end - x + 6, HIGH + 6, "ring");
        const fits = end + 24 + node.words.length * LETTERS <= pen.width; // beside it, or below
        if (node.words) leaf(pen, node, { x, y, end }, fits ? end + 10 : x, fits ? y + 17 : y + HIGH + 14);
        if (node.words) bottom = y + (fits ? 36 : 48);
        place(first, end, y);
      });
    };
    place("", 13, top);
    return bottom;
  }

  // What the policy knows of a leaf; in the lab its number too, and a click on it chooses it.
  function leaf(pen, node, box, x, y) {
    const [first] = node.blocks;
    if (node.pick) pen.text("pick-" + first, x, y, node.pick, "label strong num");
    const from = x + (node.pick ? 14 : 0);
    const words = clip(node.words, pen.width - from);
    pen.text("leaf-" + first, from, y, words, "small muted num");
    if (!node.pick) return;
    const [right, bottom] = [Math.max(box.end, from + words.length * LETTERS), Math.max(box.y + HIGH, y + 4)];
    const place = { width: right - box.x + 6, height: bottom - box.y + 6, fill: "none", "pointer-events": "all" };
    pen.add("rect", "hit-" + first, box.x - 3, box.y - 3, { ...place, "data-event": "-" + node.pick, cursor: "pointer" });
  }

  function gone(pen, frame, most, y) {
    const pitch = Math.min(40, (pen.width - 58) / most);
    pen.text("gone", 0, y + 17, "evicted", "label muted");
    frame.evicted.forEach((name, i) => cell(pen, name, 56 + i * pitch, y, pitch - 4, true));
    return y + HIGH + 12;
  }

  // How many blocks each one has found, as bars, once all is over.
  function scores(pen, frame, y) {
    frame.scores.forEach(({ name, found, asked, style }, i) => {
      const [top, room] = [y + i * 24, pen.width - 150];
      pen.text("score-" + name, 0, top + 14, name, "label");
      pen.rect("bar-" + name, 76, top + 3, (room * found) / asked, 14, style);
      pen.text("found-" + name, 82 + (room * found) / asked, top + 14, `${found} of ${asked}`, "small num");
    });
    return y + 24 * frame.scores.length;
  }

  window.KvPlayer.views.agents = function (pen, frame, scene, frames) {
    const after = frame.act.length * 8 + 12;
    pen.text("act", 0, 13, frame.act, "strong");
    pen.text("known", after, 13, scene.acts[frame.act], "label muted");
    let y = legend(pen, 24, frames.some((one) => one.nodes.some((node) => node.pick)));
    y = agents(pen, frame, y + 12);
    const pitch = Math.min(...frames.map((one) => pitchOf(pen, one))); // the same in all frames: nothing moves
    y = tree(pen, frame, pitch, y + 4) + 2;
    y = gone(pen, frame, Math.max(...frames.map((one) => one.evicted.length)), y);
    frame.totals.forEach((total, i) => pen.text("total-" + i, 0, y + 12 + 18 * i, total, "label muted num"));
    pen.height = scores(pen, frame, y + 18 * frame.totals.length) + 4;
  };
})();
