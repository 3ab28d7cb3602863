/* Lesson 13's tool: three replicas, a prompt of five blocks, and what a price on load makes of their scores. */
(function () {
  "use strict";
  const BLOCKS = 5;
  const MOST = 3; // the largest beta shown
  const NAMES = ["0", "1", "2"];
  const LOOKS = ["a", "b", "c"];

  // As PrefixScore.scores in mini_engine/distributed/routing/policy.py; of equal scores the least loaded wins.
  function scoresAt(beta, matched, loads) {
    const mean = loads.reduce((sum, load) => sum + load, 0) / loads.length;
    return loads.map((load, i) => matched[i] / BLOCKS - (beta * (load - mean)) / Math.max(1, mean));
  }

  function best(scores, loads) {
    return scores.reduce((first, score, i) => (score > scores[first] || (score === scores[first] && loads[i] < loads[first]) ? i : first), 0);
  }

  const read = (values) => [NAMES.map((name) => values["matched" + name]), NAMES.map((name) => values["load" + name])];

  function work(values) {
    const [matched, loads] = read(values);
    const scores = scoresAt(values.beta, matched, loads);
    return { scores, chosen: best(scores, loads) };
  }

  // A replica: the prompt's blocks, those that it has in its colour; below them a square for each request to finish.
  function replica(i, left, room, matched, load, score, chosen) {
    const size = Math.min(22, (room - 24) / BLOCKS - 3);
    const blocks = Array.from({ length: BLOCKS }, (_, at) => `<rect class="${at < matched ? LOOKS[i] : "free"}" x="${left + 10 + at * (size + 3)}" y="30" width="${size}" height="${size}"/>`);
    const per = Math.min(9, (room - 24) / 12);
    const waiting = Array.from({ length: load }, (_, at) => `<rect class="load" x="${left + 10 + at * per}" y="59" width="${per - 2}" height="10"/>`);
    return `<rect class="${chosen ? "chosen" : "replica"}" x="${left + 1.5}" y="4" width="${room - 3}" height="90" rx="6"/>
      <text class="axis strong" x="${left + 10}" y="22">replica ${i}</text>${blocks.join("")}${waiting.join("")}
      <text class="axis" x="${left + 10}" y="86">score ${score.toFixed(2).replace("-", "−")}</text>`;
  }

  function draw(values, { scores, chosen }) {
    const wide = window.KvWide();
    const [matched, loads] = read(values);
    const room = wide / NAMES.length;
    const boxes = NAMES.map((_, i) => replica(i, i * room, room, matched[i], loads[i], scores[i], i === chosen));
    const ends = [0, MOST].flatMap((beta) => scoresAt(beta, matched, loads));
    const [low, high] = [Math.min(...ends, 0), Math.max(...ends, 1)];
    const x = (beta) => 34 + ((wide - 62) * beta) / MOST;
    const y = (score) => 184 - (72 * (score - low)) / (high - low);
    const lines = NAMES.map((_, i) => {
      const [from, to] = [scoresAt(0, matched, loads)[i], scoresAt(MOST, matched, loads)[i]];
      return `<path class="${LOOKS[i]}" d="M${x(0)} ${y(from)}L${x(MOST)} ${y(to)}"/><text class="axis" x="${x(MOST) + 6}" y="${y(to) + 4}">${i}</text>`;
    });
    const marks = [low, high].map((score) => `<text class="end" x="28" y="${y(score) + 4}">${score.toFixed(1).replace("-", "−")}</text>`);
    const ticks = [0, 1, 2, 3].map((beta) => `<text x="${x(beta)}" y="202">${beta}</text>`);
    return `<svg class="wide" viewBox="0 0 ${wide} 208" aria-hidden="true">${boxes.join("")}<text class="axis" x="34" y="106">score</text>${marks.join("")}
      <path class="thin" d="M34 110V186H${x(MOST)}"/>${lines.join("")}<path class="even" d="M${x(values.beta)} 110V186"/>
      <circle data-key="beta" cx="${x(values.beta)}" cy="${y(scores[chosen])}" r="8"/>${ticks.join("")}<text x="${(34 + x(MOST)) / 2}" y="202">β, what load costs</text></svg>`;
  }

  const has = (i, value) => ({ key: "matched" + i, label: `replica ${i} has, of ${BLOCKS}`, value, slide: 1, max: BLOCKS, show: String });
  const finishes = (i, value) => ({ key: "load" + i, label: `replica ${i} to finish`, value, slide: 1, max: 12, show: String });

  window.KvTools = Object.assign(window.KvTools || {}, {
    replicas: {
      title: "Which replica gets the prompt?",
      fields: [
        { key: "beta", label: "β", value: 0.3, slide: 0.05, max: MOST, show: (beta) => beta.toFixed(2) },
        has(0, 3), has(1, 1), has(2, 0), finishes(0, 3), finishes(1, 2), finishes(2, 1),
      ],
      work,
      say: ({ scores, chosen }, { beta }) => [
        ["the prompt goes to", `replica ${chosen}, score ${scores[chosen].toFixed(2).replace("-", "−")}`],
        ["β means", beta === 0 ? "load is free: the longest match gets everything" : `twice the mean load costs as much as ${Math.round(100 * beta)} % of the prompt`],
      ],
      draw,
      drag: { beta: (x, _, wide) => ((x - 34) / (wide - 62)) * MOST },
    },
  });
})();
