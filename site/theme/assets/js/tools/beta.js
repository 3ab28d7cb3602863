/* Lesson 13's tool: what a price on load does, from a table that scripts/pages/tool_data.py has simulated. */
(function () {
  "use strict";
  const { betas, replicas, rows, requests } = window.KvToolData_beta;
  const LAST = betas.length - 1;
  const cellOf = ({ replicas: count, beta }) => rows[replicas.indexOf(Number(count))][beta];

  // One of the two lines: blocks found in %, or how much busier the busiest replica is. top: where its axis ends.
  function line(values, column, name, top, wide) {
    const [left, high] = [46, 60];
    const row = rows[replicas.indexOf(Number(values.replicas))].map((cell) => cell[column]);
    const most = column ? Number(values.replicas) : 10 * Math.ceil(Math.max(...rows.flat().map((cell) => cell[0])) / 10);
    const y = (value) => (top + high - high * (column ? Math.log2(value) / Math.log2(most) : value / most)).toFixed(1);
    const x = (index) => (left + ((wide - left - 20) * index) / LAST).toFixed(1);
    const ticks = column ? [1, Math.sqrt(most), most] : [0, most / 2, most];
    const axis = ticks.map((tick) => `<path class="grid" d="M${left} ${y(tick)}H${wide - 20}"/><text class="end" x="${left - 8}" y="${+y(tick) + 5}">${column ? tick : `${tick} %`}</text>`);
    const under = betas.map((beta, i) => `<text x="${x(i)}" y="${top + high + 22}">${beta}</text>`);
    return `<text class="axis" x="0" y="${top - 12}">${name}</text>${axis.join("")}<path d="M${row.map((value, i) => `${x(i)} ${y(value)}`).join("L")}"/>
      <circle cx="${x(values.beta)}" cy="${y(row[values.beta])}" r="6"/>${column ? under.join("") + `<text class="axis" x="0" y="${top + high + 22}">β</text>` : ""}`;
  }

  function draw(values, _, wide) {
    return `<svg viewBox="0 0 ${wide} 224" aria-hidden="true">${line(values, 0, "blocks found", 26, wide)}${line(values, 1, "busiest replica, times the mean", 134, wide)}</svg>`;
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
