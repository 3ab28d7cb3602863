// Course machinery. Lesson 8's second picture: the edges of a tree as blocks of letters, who locks them, what is evicted.
(function () {
  "use strict";
  const [HIGH, ROW, LEFT] = [30, 58, 26];
  const LOCK = "M1 5h8v6H1zM2.5 5V3.5a2.5 2.5 0 0 1 5 0V5"; // 10 by 11

  function look(frame, block) {
    const holders = frame.tables.filter((table) => table.blocks.includes(block)).map((table) => table.name.toLowerCase());
    if (holders.length > 1) return { style: "both", double: true };
    if (holders.length) return { style: "held " + holders[0] };
    return frame.free.includes(block) ? { style: "free" } : { style: "plain", texture: "dots" };
  }

  function box(pen, key, { style, texture, double }, x, y, wide, high) {
    pen.rect(key, x, y, wide, high, style);
    if (texture) pen.texture(`${key}-${texture}`, x, y, wide, high, texture);
    if (double) pen.rect(key + "-double", x + 2.5, y + 2.5, wide - 5, high - 5, "twice");
  }

  function pool(pen, frame, scene) {
    const pitch = Math.min(56, (pen.width - 44) / (scene.num_blocks - 1));
    pen.text("pool", 0, 21, "pool", "label muted");
    for (let block = 1; block < scene.num_blocks; block++) {
      const [x, looks] = [44 + (block - 1) * pitch, look(frame, block)];
      box(pen, "pool-" + block, looks, x, 4, pitch - 5, 26);
      if (looks.texture) pen.rect(`pool-${block}-plate`, x + (pitch - 5) / 2 - 9, 9, 18, 16, "plate");
      pen.text("pool-" + block, x + (pitch - 5) / 2, 21.5, block, "mid strong num");
    }
    const sign = (looks) => (x, y, key) => box(pen, key, looks, x, y, 20, 16);
    return pen.legend(42, [
      ["A's", sign({ style: "held a" })],
      ["shared", sign({ style: "both", double: true })],
      ["cached", sign({ style: "plain", texture: "dots" })],
      ["evicted", sign({ style: "free", texture: "strokes" })],
      ["locks, and whose", (x, y, key) => pen.path(key + "-lock", x + 8, y + 3, LOCK, "lock")],
    ]);
  }

  // The prompts of those that run, letter by letter, with a gap where a block ends.
  function running(pen, frame, scene, top) {
    frame.tables.forEach(({ name, prompt }, i) => {
      const y = top + i * 28;
      pen.badge("table-" + name, 13, y + 12, name);
      const blocks = prompt.match(new RegExp(`.{1,${scene.block_size}}`, "g"));
      pen.text("prompt-" + name, 34, y + 16.5, blocks.join(" "), "label mono");
    });
    return top + 2 * 28 + 10;
  }

  // A block of the tree: its letters, and its number below them.
  function cell(pen, block, text, looks, x, y, wide) {
    const key = "tree-" + block;
    box(pen, key, looks, x, y, wide, HIGH);
    if (looks.texture === "dots") pen.rect(key + "-plate", x + 6, y + 5, wide - 12, HIGH - 10, "plate");
    pen.text(key + "-letters", x + wide / 2, y + 19.5, text, "mid mono" + (looks.texture === "strokes" ? " muted" : " strong"));
    pen.text(key + "-number", x + 3, y + HIGH + 13, block, "small muted num");
  }

  function tree(pen, frame, top) {
    const wide = Math.min(76, (pen.width - LEFT - 30) / 4 - 5);
    const ghosts = (block) => frame.gone.filter(({ behind }) => behind === block);
    let y = top;
    pen.add("circle", "root", 7, top + HIGH / 2, { class: "root", r: 6 });
    // Draw what lies behind a block: evicted blocks first, since they were there before.
    const lay = (behind, name, x, fromX, fromY, isFirst) => {
      let first = isFirst;
      const begin = (key) => {
        if (!first) y += ROW;
        first = false;
        const bend = y === fromY ? `M0 ${HIGH / 2}H${x - fromX}` : `M0 ${HIGH / 2}h${(x - fromX) / 2}V${y - fromY + HIGH / 2}H${x - fromX}`;
        pen.path("edge-" + key, fromX, fromY, bend, "line");
      };
      for (const ghost of ghosts(behind)) {
        begin(ghost.block);
        gone(ghost, x);
      }
      for (const node of frame.nodes.filter((one) => one.parent === name)) {
        begin(node.blocks[0]);
        edge(node, x);
      }
    };
    const gone = ({ block, text }, x) => {
      cell(pen, block, text, { style: "free", texture: "strokes" }, x, y, wide);
      lay(block, -1, x + wide + 5, x + wide, y, true);
    };
    const edge = (node, x) => {
      node.blocks.forEach((block, i) => cell(pen, block, node.texts[i], look(frame, block), x + i * (wide + 5), y, wide));
      const last = node.blocks[node.blocks.length - 1];
      const end = x + node.blocks.length * (wide + 5) - 5;
      if (node.locks) {
        pen.path("lock-" + last, x + 18, y + HIGH + 4, LOCK, "lock");
        pen.text("locks-" + last, x + 32, y + HIGH + 13, `${node.locks}: ${node.by.join(", ")}`, "small strong");
      } else pen.text("locks-" + last, x + 18, y + HIGH + 13, "unlocked", "small muted");
      if (frame.cut === last) pen.path("cut", end + 9, y - 7, `M0 0V${HIGH + 14}`, "arrow");
      lay(last, node.blocks[0], end + 18, end, y, true);
    };
    lay(0, 0, LEFT, 13, top, true);
    return y + ROW;
  }

  window.KvPlayer.views.prompts = function (pen, frame, scene) {
    const below = running(pen, frame, scene, pool(pen, frame, scene) + 10);
    pen.text("tree", 0, below + 10, "radix tree", "label muted");
    pen.height = tree(pen, frame, below + 24);
  };
})();
