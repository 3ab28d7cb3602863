// Course machinery. Lesson 9's picture: memory as lines of words, each with its output's number, coloured by its inputs.
(function () {
  "use strict";
  const [LEFT, HIGH] = [30, 28];
  const COLOURS = ["a", "b", "c"];

  window.KvPlayer.views.packing = function (pen, frame, scene) {
    const pitch = Math.min(42, (pen.width - LEFT - 2) / scene.line);
    const signs = COLOURS.map((colour, word) => [`inputs ${2 * word}, ${2 * word + 1}`, (x, y, key) => pen.rect(key, x, y, 20, 16, "held " + colour)]);
    const top = pen.legend(0, [...signs, ["zeros", (x, y, key) => pen.rect(key, x, y, 20, 16, "free")]]) + 12;
    pen.text("bytes", 0, top + 10, "byte", "small muted");
    frame.lines.forEach((line, row) => {
      const y = top + 18 + row * (HIGH + 6);
      pen.text("line-" + row, LEFT - 6, y + 18, row * scene.line * scene.word_bytes, "small muted end num");
      line.forEach((word, column) => {
        const [x, at] = [LEFT + column * pitch, row * scene.line + column];
        const key = word ? `word-${word[0]}-${word[1]}` : "zero-" + at;
        pen.rect(key, x, y, pitch - 2, HIGH, word ? "held " + COLOURS[word[1]] : "free");
        if (word) pen.text(key, x + pitch / 2 - 1, y + 18, word[0], "small mid num");
      });
    });
    for (const at of frame.marked) {
      const [row, column] = [Math.floor(at / scene.line), at % scene.line];
      pen.rect("mark-" + at, LEFT + column * pitch - 1, top + 17 + row * (HIGH + 6), pitch, HIGH + 2, "ring");
    }
    pen.height = top + 18 + frame.lines.length * (HIGH + 6);
  };
})();
