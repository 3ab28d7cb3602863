// Course machinery. Lesson 8's picture: the pool with its counts, the requests' tables, and the radix tree.
(function () {
  "use strict";
  const LETTERS = 6.4; // about a letter's width at 11 to 12px

  const clip = (text, room) => {
    const most = Math.floor(room / LETTERS);
    return text.length <= most ? text : most < 4 ? "" : text.slice(0, most - 1).trimEnd() + "…";
  };

  // How a block looks: by who holds it.
  function look(frame, block) {
    const holders = frame.tables.filter((table) => table.blocks.includes(block)).map((table) => table.name);
    if (frame.evicted.includes(block)) return { style: "free", texture: "strokes", holders };
    if (holders.length === 1) return { style: "held " + holders[0].toLowerCase(), holders };
    if (holders.length) return { style: "both", double: true, holders };
    return frame.counts[block] ? { style: "plain", texture: "dots", holders } : { style: "free", holders };
  }

  function box(pen, key, { style, texture, double }, x, y, wide, high) {
    pen.rect(key, x, y, wide, high, style);
    if (texture) pen.texture(`${key}-${texture}`, x, y, wide, high, texture);
    if (double) pen.rect(key + "-double", x + 2.5, y + 2.5, wide - 5, high - 5, "twice");
  }

  function cell(pen, frame, key, block, x, y, wide, high) {
    const looks = look(frame, block);
    box(pen, key, looks, x, y, wide, high);
    if (looks.texture) pen.rect(key + "-plate", x + wide / 2 - 10, y + high / 2 - 8, 20, 16, "plate");
    pen.text(key, x + wide / 2, y + high / 2 + 4.5, block, "mid strong num");
    if (frame.marked.includes(block)) pen.rect(key + "-mark", x - 1.5, y - 1.5, wide + 3, high + 3, "ring");
  }

  const sign = (pen, looks) => (x, y, key) => box(pen, key, looks, x, y, 20, 16);

  function legend(pen, y) {
    return pen.legend(y, [
      ["held by one", sign(pen, { style: "held a" })],
      ["shared", sign(pen, { style: "both", double: true })],
      ["cached", sign(pen, { style: "plain", texture: "dots" })],
      ["evicted", sign(pen, { style: "free", texture: "strokes" })],
      ["how many hold it", (x, y, key) => pen.text(key + "-count", x + 4, y + 12, "×2", "small muted")],
      ["locks", (x, y, key) => pen.path(key + "-lock", x + 8, y + 3, LOCK, "lock")],
    ]);
  }

  function pool(pen, frame, scene) {
    const count = scene.num_blocks - 1;
    const perRow = pen.width >= 560 ? count : Math.ceil(count / 2);
    const pitch = (pen.width - 2) / perRow;
    const { free, held, cached } = frame.sums;
    pen.text("pool", 0, 12, `pool: ${free} free, ${held} held, ${cached} cached`, "label muted num");
    for (let block = 1; block <= count; block++) {
      const [x, y] = [2 + ((block - 1) % perRow) * pitch, 22 + Math.floor((block - 1) / perRow) * 48];
      cell(pen, frame, "pool-" + block, block, x, y, pitch - 5, 26);
      const holders = frame.counts[block];
      pen.text("count-" + block, x + (pitch - 5) / 2, y + 39, holders ? "×" + holders : "", "small mid muted num");
    }
    return 22 + 48 * Math.ceil(count / perRow);
  }

  function tables(pen, frame, top) {
    frame.tables.forEach((table, i) => {
      const y = top + i * 31;
      pen.badge("table-" + table.name, 13, y + 13, table.name);
      const count = Math.max(9, table.blocks.length);
      const pitch = Math.min(36, (pen.width - 32) / count);
      table.blocks.forEach((block, j) => cell(pen, frame, `table-${table.name}-${j}`, block, 34 + j * pitch, y, pitch - 4, 26));
      const words = `${table.found} of ${table.tokens} prompt tokens found`;
      const after = 34 + (count + 0.4) * pitch;
      if (after + 190 < pen.width) pen.text(`table-${table.name}-found`, after, y + 17, words, "label muted num");
    });
    if (!frame.tables.length) pen.text("idle", 0, top + 17, "no request is running", "label muted");
    return top + Math.max(1, frame.tables.length) * 31;
  }

  const LOCK = "M1 5h8v6H1zM2.5 5V3.5a2.5 2.5 0 0 1 5 0V5"; // 10 by 11

  function label(pen, node, key, x, y, room) {
    let left = x;
    if (node.locks) {
      pen.path(key + "-lock", left, y - 10, LOCK, "lock");
      pen.text(key + "-locks", left + 13, y, node.locks, "small strong num");
      left += 26;
    }
    pen.text(key + "-text", left, y, clip(node.text, room - (left - x)), "small muted");
  }

  // How far to the right says how many blocks from the root. A parent stands in its first child's row.
  function sideways(pen, frame, pitch, gap, top) {
    const children = (name) => frame.nodes.filter((node) => node.parent === name);
    const leaves = frame.nodes.filter((node) => !children(node.blocks[0]).length).length;
    const [high, row] = [28, Math.max(44, Math.min(54, (pen.room - top) / Math.max(1, leaves)))];
    let y = top;
    pen.add("circle", "root", 7, top + high / 2, { class: "root", r: 6 });
    const place = (name, x, fromX, fromY) => {
      children(name).forEach((node, i) => {
        if (i) y += row;
        const key = "node-" + node.blocks[node.blocks.length - 1];
        const [down, wide] = [y - fromY, node.blocks.length * pitch];
        const middle = high / 2;
        const bend = down ? `M0 ${middle}h${gap / 3}V${down + middle}H${x - fromX}` : `M0 ${middle}H${x - fromX}`;
        pen.path("edge-" + node.blocks[0], fromX, fromY, bend, "line");
        node.blocks.forEach((block, j) => cell(pen, frame, "tree-" + block, block, x + j * pitch, y, pitch - 4, high));
        const isLeaf = !children(node.blocks[0]).length;
        label(pen, node, key, x + 1, y + high + 14, isLeaf ? pen.width - x - 4 : wide + gap - 12);
        place(node.blocks[0], x + wide - 4 + gap, x + wide - 4, y);
      });
    };
    place(0, 13 + gap, 13, top);
    return y + row;
  }

  function depthOf(frame, node) {
    const parent = frame.nodes.find((one) => one.blocks[0] === node.parent);
    return node.blocks.length + (parent ? depthOf(frame, parent) : 0);
  }

  // Where that is too narrow for a block's number: a row for each node, its children below it and further in.
  function downwards(pen, frame, top) {
    const [high, row, inset] = [26, 36, 13];
    let y = top;
    pen.add("circle", "root", 7, top + 6, { class: "root", r: 6 });
    const place = (name, level, fromY) => {
      for (const node of frame.nodes.filter((one) => one.parent === name)) {
        y += row;
        const x = 18 + level * inset;
        const key = "node-" + node.blocks[node.blocks.length - 1];
        pen.path("edge-" + node.blocks[0], x - 11, fromY, `M0 0V${y - row + 26 - fromY}H11`, "line");
        node.blocks.forEach((block, j) => cell(pen, frame, "tree-" + block, block, x + j * 29, y - row + 13, 26, high));
        const right = x + node.blocks.length * 29 + 4;
        label(pen, node, key, right, y - row + 30, pen.width - right - 10);
        place(node.blocks[0], level + 1, y - row + 39);
      }
    };
    place(0, 0, top + 12);
    return y + 16;
  }

  window.KvPlayer.views.tree = function (pen, frame, scene) {
    const below = tables(pen, frame, legend(pen, pool(pen, frame, scene) + 4) + 14) + 8;
    pen.text("tree", 0, below + 10, "radix tree", "label muted");
    const gap = pen.width >= 560 ? 24 : 12;
    const pitch = (pen.width - 20 - 5 * gap) / Math.max(8, ...frame.nodes.map((node) => depthOf(frame, node)));
    pen.height = pitch >= 20 ? sideways(pen, frame, pitch, gap, below + 22) : downwards(pen, frame, below + 22);
  };
})();
