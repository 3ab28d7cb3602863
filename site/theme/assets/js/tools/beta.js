/* Lesson 13's tool: what a price on load does, from a table that scripts/pages/tool_data.py has simulated. */
(function () {
  "use strict";
  const { betas, replicas, rows, requests } = window.KvToolData_beta;
  const LAST = betas.length - 1;
  const cellOf = ({ replicas: count, beta }) => rows[replicas.indexOf(Number(count))][beta];

  // One of the two lines: blocks found in % of the highest, or how much busier the busiest replica is.
  function line(values, column, name, top) {
    const row = rows[replicas.indexOf(Number(values.replicas))].map((cell) => cell[column]);
    const most = column ? values.replicas : Math.max(...rows.flat().map((cell) => cell[0]));
    const scale = (value) => (column ? Math.log2(value) / Math.log2(most) : value / most);
    const place = (index) => `${(20 + (360 * index) / LAST).toFixed(1)} ${(top + 62 - 44 * scale(row[index])).toFixed(1)}`;
    const [x, y] = place(values.beta).split(" ");
    return `<text class="axis" x="8" y="${top + 10}">${name}</text><path d="M${row.map((_, i) => place(i)).join("L")}"/><circle cx="${x}" cy="${y}" r="6"/>`;
  }

  function draw(values) {
    const shown = betas.map((beta, i) => `<text class="small" x="${20 + (360 * i) / LAST}" y="166">${beta}</text>`).join("");
    return `<svg viewBox="0 0 400 172" aria-hidden="true">${line(values, 0, "blocks found", 0)}${line(values, 1, "busiest replica / mean", 76)}${shown}</svg>`;
  }

  window.KvTools = Object.assign(window.KvTools || {}, {
    beta: {
      title: `What should load cost? ${requests.toLocaleString("en")} generated requests, simulated`,
      fields: [
        { key: "beta", label: "β", value: 6, slide: 1, max: LAST, show: (index) => String(betas[index]) },
        { key: "replicas", label: "replicas of 3,000 blocks", options: replicas.map(String), value: String(replicas[1]) },
      ],
      work(values) {
        const [found, busiest, wait] = cellOf(values);
        return { found, busiest, wait };
      },
      say: ({ found, busiest, wait }) => [
        ["blocks found", `${found.toFixed(1)} %`],
        ["the busiest replica computes", `${busiest.toFixed(2)} times the mean`],
        ["first token, median", `${wait.toLocaleString("en", { minimumFractionDigits: 2 })} s`],
      ],
      draw,
    },
  });
})();
