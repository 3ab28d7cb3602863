// Course machinery. Lesson 12's picture: blocks of the pool, records in host memory, and files on the disk.
(function () {
  "use strict";
  const HIGH = 30;

  const shown = (text) => text.replace(/ /g, "␣");

  // A shelf of boxes, in rows of 8, or of 4 where the page is narrow. Returns where the next one begins.
  function shelf(pen, name, top, words, boxes, moved) {
    pen.text(name, 0, top + 12, words, "label muted num");
    const perRow = pen.width >= 480 ? 8 : 4;
    const pitch = Math.min(86, (pen.width - 4) / perRow);
    const row = HIGH + (name === "disk" ? 24 : 10);
    boxes.forEach((box, i) => {
      const [x, y] = [2 + (i % perRow) * pitch, top + 22 + Math.floor(i / perRow) * row];
      const [key, wide] = [`${name}-${i}`, pitch - 8];
      pen.rect(key, x, y, wide, HIGH, box.style);
      if (box.dots) {
        pen.texture(key + "-dots", x, y, wide, HIGH, "dots");
        pen.rect(key + "-plate", x + 6, y + 6, wide - 12, HIGH - 12, "plate");
      }
      if (box.text) pen.text(key, x + wide / 2, y + 20, shown(box.text), "small mid mono");
      if (box.name) pen.text(key + "-name", x, y + HIGH + 13, box.name + "….kv", "small muted num");
      if (box.text && moved.includes(box.text)) pen.rect(key + "-mark", x - 2, y - 2, wide + 4, HIGH + 4, "ring");
    });
    return top + 22 + row * Math.max(1, Math.ceil(boxes.length / perRow)) + 8;
  }

  function inPool(block) {
    if (block.owner) return { text: block.text, style: "held " + block.owner.toLowerCase() };
    return block.held ? { text: block.text, style: "plain", dots: true } : { text: "", style: "free" };
  }

  window.KvPlayer.views.tiers = function (pen, frame, scene) {
    const { pool, host, disk, moved } = frame;
    const held = pool.filter((block) => block.owner).length;
    const cached = pool.filter((block) => block.held).length - held;
    const free = pool.length - held - cached;
    let y = shelf(pen, "pool", 0, `pool: ${held} held, ${cached} cached, ${free} free`, pool.map(inPool), moved);
    const records = [...Array(scene.host)].map((_, i) =>
      i < host.length ? { text: host[i], style: "plain" } : { text: "", style: "free" },
    );
    y = shelf(pen, "host", y, `host memory: ${host.length} of ${scene.host} records, the oldest first`, records, moved);
    const files = disk.map((file) => ({ text: file.text, name: file.name, style: "cell" }));
    pen.height = shelf(pen, "disk", y, `disk: ${disk.length} files, each under its key`, files, moved);
  };
})();
