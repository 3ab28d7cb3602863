// Course machinery. Lesson 15's picture: one pool, each request's two tables, and the tree with its companions.
(function () {
  "use strict";

  const plain = { style: "plain", texture: "dots" };
  const style = (name) => "held " + name.toLowerCase();

  // How a block of the pool looks: its holder, or the tree, or free; and which group it is of.
  function look(frame, block) {
    if (frame.free.includes(block)) return { style: "free", group: "" };
    const table = frame.tables.find((one) => one.full.includes(block) || one.window.includes(block));
    const isFull = frame.nodes.some((node) => node.blocks.includes(block)) || (table && table.full.includes(block));
    const group = isFull ? "full" : "win";
    return table ? { style: style(table.name), group } : Object.assign({ group }, plain);
  }

  function box(pen, key, looks, x, y, wide, high) {
    pen.rect(key, x, y, wide, high, looks.style);
    if (looks.texture) pen.texture(key + "-" + looks.texture, x, y, wide, high, looks.texture);
  }

  function cell(pen, frame, key, block, looks, x, y, wide, high) {
    box(pen, key, looks, x, y, wide, high);
    if (looks.texture === "dots") pen.rect(key + "-plate", x + wide / 2 - 9, y + high / 2 - 8, 18, 16, "plate");
    pen.text(key, x + wide / 2, y + high / 2 + 4.5, block, "mid strong num");
    if (block && frame.marked.includes(block)) pen.rect(key + "-mark", x - 1.5, y - 1.5, wide + 3, high + 3, "ring");
  }

  function pool(pen, frame, scene) {
    const count = scene.num_blocks - 1;
    const perRow = pen.width >= 560 ? count : count / 2;
    const pitch = (pen.width - 2) / perRow;
    pen.text("pool", 0, 12, `one pool, ${frame.free.length} free`, "label muted num");
    for (let block = 1; block <= count; block++) {
      const [x, y] = [2 + ((block - 1) % perRow) * pitch, 18 + Math.floor((block - 1) / perRow) * 42];
      const looks = look(frame, block);
      cell(pen, frame, "pool-" + block, block, looks, x, y, pitch - 5, 26);
      pen.text("group-" + block, x + (pitch - 5) / 2, y + 38, looks.group, "small mid muted");
    }
    return 18 + 42 * Math.ceil(count / perRow);
  }

  function legend(pen, y) {
    const sign = (looks) => (x, y, key) => box(pen, key, looks, x, y, 20, 16);
    return pen.legend(y, [
      ["held by a request", sign({ style: "held a" })],
      ["only the tree's", sign(plain)],
      ["hole", sign({ style: "empty", texture: "cross" })],
      ["tombstone", sign({ style: "free", texture: "strokes" })],
      ["what the next token sees", (x, y, key) => pen.path(key + "-sees", x, y + 6, "M0 5V0H20V5", "arrow")],
    ]);
  }

  const slots = (pen) => Math.min(58, (pen.width - 72) / 7); // a block's width

  // A bracket over the tokens that the next one sees, those that there are.
  function bracket(pen, key, table, scene, x, y, pitch) {
    const at = (token) => x + Math.floor(token / scene.block_size) * pitch + ((token % scene.block_size) * (pitch - 5)) / scene.block_size;
    const last = table.text.length - 1;
    if (last < 0) return;
    const [from, to] = [at(table.first), at(last) + (pitch - 5) / scene.block_size];
    pen.path(key, from, y, `M0 5V0H${to - from}V5`, "arrow");
  }

  function tables(pen, frame, scene, top) {
    const pitch = slots(pen);
    frame.tables.forEach((table, i) => {
      const [x, y] = [66, top + i * 78];
      pen.badge("table-" + table.name, 13, y + 41, table.name);
      pen.text(`table-${table.name}-full`, 60, y + 38, "full", "small end muted");
      pen.text(`table-${table.name}-win`, 60, y + 65, "win", "small end muted");
      bracket(pen, "sees-" + table.name, table, scene, x, y + 2, pitch);
      table.full.forEach((block, j) => {
        const [key, left] = [`${table.name}-${j}`, x + j * pitch];
        const text = table.text.slice(j * scene.block_size, (j + 1) * scene.block_size).replace(/ /g, "␣");
        pen.text("letters-" + key, left + (pitch - 5) / 2, y + 17, text, "small mid mono");
        cell(pen, frame, "full-" + key, block, { style: style(table.name) }, left, y + 22, pitch - 5, 24);
        const window = table.window[j];
        const looks = window ? { style: style(table.name) } : { style: "empty", texture: "cross" };
        if (window) cell(pen, frame, "window-" + key, window, looks, left, y + 49, pitch - 5, 24);
        else box(pen, "hole-" + key, looks, left, y + 49, pitch - 5, 24);
      });
    });
    return top + Math.max(1, frame.tables.length) * 78;
  }

  function tree(pen, frame, top) {
    const [gap, high, row] = [14, 24, 60];
    const pitch = Math.min(58, (pen.width - 20 - 4 * gap) / 7);
    let y = top;
    pen.add("circle", "root", 7, top + high / 2, { class: "root", r: 6 });
    const place = (parent, x, fromX, fromY) => {
      frame.nodes
        .filter((node) => node.parent === parent)
        .forEach((node, i) => {
          if (i) y += row;
          const [middle, down] = [high / 2, y - fromY];
          const bend = down ? `M0 ${middle}h${(gap - 4) / 2}V${down + middle}H${x - fromX}` : `M0 ${middle}H${x - fromX}`;
          pen.path("edge-" + node.blocks[0], fromX, fromY, bend, "line");
          node.blocks.forEach((block, j) => {
            const [key, left, wide] = ["tree-" + block, x + j * pitch, pitch - 4];
            cell(pen, frame, key, block, held(frame, block, "full"), left, y, wide, high);
            const window = node.windows[j];
            if (window) cell(pen, frame, key + "-win", window, held(frame, window, "window"), left, y + 26, wide, 18);
            else box(pen, key + "-tomb", { style: "free", texture: "strokes" }, left, y + 26, wide, 18);
            pen.text(key + "-text", left + wide / 2, y + 55, node.texts[j].replace(/ /g, "␣"), "small mid mono muted");
          });
          const end = x + node.blocks.length * pitch - 4;
          place(node.blocks[0], end + gap, end, y);
        });
    };
    place(0, 13 + gap, 13, top);
    return y + row;
  }

  function held(frame, block, group) {
    const table = frame.tables.find((one) => one[group].includes(block));
    return table ? { style: style(table.name) } : plain;
  }

  window.KvPlayer.views.windows = function (pen, frame, scene) {
    const below = tables(pen, frame, scene, legend(pen, pool(pen, frame, scene) + 4) + 16);
    const more = pen.width >= 560 ? " of the window group" : "";
    pen.text("tree", 0, below + 9, "tree: blocks of the full group; below each, its companion" + more, "label muted");
    pen.height = tree(pen, frame, below + 17);
  };
})();
