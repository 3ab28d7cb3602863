// Course machinery. Lesson 6's picture: tokens, their bytes, the characters that these become, and what the reader sees.
(function () {
  "use strict";
  const PITCH = 27;
  const LINE = 104;

  // All bytes in order, each with its token and its character; -1 while it is part of none.
  function bytesOf(frame) {
    const bytes = [];
    frame.tokens.forEach((token, i) => token.bytes.split(" ").forEach((hex) => bytes.push({ hex, token: i, char: -1 })));
    let at = 0;
    frame.chars.forEach(([, size], i) => {
      for (let k = 0; k < size; k++) bytes[at++].char = i;
    });
    return bytes;
  }

  // Lines break where a token and a character end together, so that nothing is cut in two.
  function place(bytes, width) {
    const most = Math.floor(width / PITCH);
    let [line, column, start] = [0, 0, 0];
    const together = (i) => i === bytes.length || (bytes[i].token !== bytes[i - 1].token && (bytes[i].char !== bytes[i - 1].char || bytes[i].char < 0));
    for (let i = 1; i <= bytes.length; i++) {
      if (!together(i) || (i < bytes.length && bytes[i].char < 0 && bytes[i - 1].char < 0)) continue;
      if (column + (i - start) > most && column) [line, column] = [line + 1, 0];
      for (; start < i; start++) Object.assign(bytes[start], { x: column++ * PITCH, y: line * LINE });
    }
    return line + 1;
  }

  const runs = (bytes, by) => {
    const found = [];
    bytes.forEach((byte, i) => {
      const last = found[found.length - 1];
      if (last && last.value === byte[by]) last.count++;
      else found.push({ value: byte[by], first: i, count: 1 });
    });
    return found;
  };

  const visible = (char) => ({ " ": "␣", "\n": "↵" })[char] || char;

  function rows(pen, frame, top) {
    const bytes = bytesOf(frame);
    place(bytes, pen.width - 52);
    const shown = [...frame.shown].length;
    const held = [...frame.held].length;
    for (const { value, first, count } of runs(bytes, "token")) {
      const { x, y } = bytes[first];
      const wide = count * PITCH - 3;
      pen.rect("token-" + value, 52 + x, top + y, wide, 22, "plain");
      const id = String(frame.tokens[value].id);
      pen.text("token-" + value, 52 + x + wide / 2, top + y + 15, id.length > 3 && count === 1 ? "·" : id, "small mid num");
    }
    bytes.forEach(({ hex, x, y }, i) => pen.text("byte-" + i, 52 + x + (PITCH - 3) / 2, top + y + 44, hex, "label mid mono muted"));
    for (const { value, first, count } of runs(bytes, "char")) {
      const { x, y } = bytes[first];
      const wide = count * PITCH - 3;
      const waits = value < 0;
      const fate = waits ? "wish" : value < shown ? "held a" : value < shown + held ? "wish" : "free";
      const key = waits ? "waits" : "char-" + value;
      pen.rect(key, 52 + x, top + y + 54, wide, 28, fate, waits ? undefined : { from: [52 + x, top + y + 40] });
      if (fate === "free") pen.texture(key + "-cut", 52 + x, top + y + 54, wide, 28, "strokes");
      pen.text(key, 52 + x + wide / 2, top + y + 73, waits ? "…" : visible(frame.chars[value][0]), "mid" + (fate === "held a" ? " strong" : ""));
    }
    const lines = bytes.length ? bytes[bytes.length - 1].y / LINE + 1 : 1;
    for (let line = 0; line < lines; line++) {
      const y = top + line * LINE;
      [["tokens", 15], ["bytes", 44], ["text", 73]].forEach(([name, down]) => pen.text(`${name}-${line}`, 0, y + down, name, "label muted"));
    }
    return lines;
  }

  window.KvPlayer.views.bytes = function (pen, frame) {
    pen.rect("reader", 0.5, 0.5, pen.width - 1, 56, "plain");
    pen.text("reader-title", 12, 19, "the reader sees", "label muted");
    pen.text("reader", 12, 43, `“${frame.shown}”`, "strong");
    const wide = Math.min(120, pen.width / 2 - 12);
    pen.text("held-title", pen.width - wide, 19, "held back", "label muted");
    pen.text("held", pen.width - wide, 43, frame.stop ? "" : frame.held ? `“${frame.held.replace(/ /g, "␣")}”` : "–", "accent");
    pen.height = 76 + rows(pen, frame, 76) * LINE - 16;
  };
})();
