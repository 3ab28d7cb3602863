// Course machinery. Lesson 11's picture: state slots with what they have seen, and the tree with its checkpoints.
(function () {
  "use strict";

  const isHeld = (frame, slot) => frame.held.includes(slot);

  function style(frame, one) {
    if (one.owner) return "held " + one.owner.toLowerCase();
    return isHeld(frame, one.slot) ? "plain" : "free";
  }

  // The last letters that fit, because a state's end is what tells checkpoints apart.
  const tail = (text, most) => (text.length <= most ? text : "…" + text.slice(1 - most));

  function slots(pen, frame, scene) {
    const perRow = pen.width >= 560 ? scene.working + scene.track : 3;
    const pitch = pen.width / perRow;
    const requests = pen.width >= 560 ? scene.working * pitch + 2 : 0;
    pen.text("slots", 0, 12, "slots of requests", "label muted");
    if (requests) pen.text("checkpoints", requests, 12, "checkpoints: the text that each state has seen", "label muted");
    frame.slots.forEach((one, i) => {
      const [x, y] = [2 + (i % perRow) * pitch, 22 + Math.floor(i / perRow) * 58];
      const wide = pitch - 8;
      pen.rect("slot-" + one.slot, x, y, wide, 34, style(frame, one));
      if (isHeld(frame, one.slot)) pen.texture("slot-dots-" + one.slot, x, y, wide, 34, "dots");
      if (one.seen) pen.rect("slot-plate-" + one.slot, x + 4, y + 8, wide - 8, 19, "plate");
      pen.text("slot-seen-" + one.slot, x + wide / 2, y + 22, tail(one.seen, Math.floor((wide - 12) / 6.6)), "small mid");
      const who = one.owner ? `, ${one.owner}` : "";
      const count = one.seen ? `: ${one.seen.length}${pen.width < 320 ? "" : " tokens"}` : "";
      pen.text("slot-name-" + one.slot, x, y + 48, `slot ${one.slot}${who}${count}`, "small muted num");
      if (frame.marked.includes(one.slot)) pen.rect("slot-mark-" + one.slot, x - 2, y - 2, wide + 4, 38, "ring");
      if (frame.copied.includes(one.slot)) pen.rect("slot-copy-" + one.slot, x - 2, y - 2, wide + 4, 38, "ring");
    });
    return 22 + 58 * Math.ceil(frame.slots.length / perRow);
  }

  function tree(pen, frame, top) {
    const [gap, high, row] = [pen.width < 320 ? 10 : 20, 28, 52];
    const pitch = Math.min(58, (pen.width - 20 - 5 * gap) / 7);
    let y = top;
    pen.add("circle", "root", 7, top + high / 2, { class: "root", r: 6 });
    const place = (parent, x, fromX, fromY) => {
      frame.nodes
        .filter((node) => node.parent === parent)
        .forEach((node, i) => {
          if (i) y += row;
          const [middle, down] = [high / 2, y - fromY];
          const bend = down ? `M0 ${middle}h${(gap - 6) / 2}V${down + middle}H${x - fromX}` : `M0 ${middle}H${x - fromX}`;
          pen.path("edge-" + node.first, fromX, fromY, bend, "line");
          node.texts.forEach((text, j) => {
            const key = `block-${node.first}-${j}`;
            pen.rect(key, x + j * pitch, y, pitch - 4, high, node.locks ? "held a" : "plain");
            pen.text(key, x + j * pitch + (pitch - 4) / 2, y + 18, text.replace(/ /g, "␣"), "small mid");
          });
          const end = x + node.texts.length * pitch - 4;
          if (node.slot) {
            pen.add("circle", "point-" + node.first, end - 3, y + high + 10, { class: "root", r: 5 });
            pen.text("point-" + node.first, end - 44, y + high + 14, "slot " + node.slot, "small muted num");
          }
          place(node.first, end + gap, end, y);
        });
    };
    place(0, 13 + gap, 13, top);
    return y + row;
  }

  window.KvPlayer.views.states = function (pen, frame, scene) {
    const below = slots(pen, frame, scene) + 10;
    pen.text("tree", 0, below + 10, pen.width < 320 ? "radix tree, ● where a state is kept" : "radix tree: blocks of letters, ● where a state is kept", "label muted");
    pen.height = tree(pen, frame, below + 24);
  };
})();
