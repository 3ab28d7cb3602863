/* Small calculators. Each is a form over one formula of its lesson; tests compare it with the lesson's own code. Those of
   lessons 2 and 9 are here, the others in tools/, which a page loads before this file. A page says where one goes with an empty <div class="kv-tool" data-tool="pool"></div>. */
(function () {
  "use strict";
  const KIB = 1024;
  const NARROWEST = 260; // pixels of a picture
  const [LEFT, MOST] = [62, 9]; // of the roofline: its axis, and its last power of two
  const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });
  const short = (value) => (value >= 100 ? number(value) : value.toLocaleString("en", { maximumSignificantDigits: 3 }));
  const BYTES = { bfloat16: 2, float32: 4, float8: 1 };

  // A field with `log` is a slider; its value is a power of two, so that it covers laptops and GPUs. One with `slide` is a
  // slider with values of its own, which `show` puts into words; one with `text` takes text. What a drawing marks with
  // data-key="batch" can be dragged: `drag` says which value that field has at x. The sliders do the same without a pointer.
  const TOOLS = {
    ...window.KvTools,
    pool: {
      title: "How many tokens fit?",
      fields: [
        { key: "layers", label: "layers", value: 36, min: 1 },
        { key: "heads", label: "KV heads", value: 8, min: 1 },
        { key: "dim", label: "head size", value: 128, min: 1 },
        { key: "dtype", label: "dtype", options: Object.keys(BYTES) },
        { key: "gib", label: "memory, GiB", value: 14, min: 0, step: "any" },
        { key: "block", label: "block size", value: 16, min: 1 },
        { key: "tokens", label: "tokens of a request", value: 1000, min: 1 },
      ],
      work({ layers, heads, dim, dtype, gib, block, tokens }) {
        const token = 2 * layers * heads * dim * BYTES[dtype];
        const blocks = Math.floor(Math.floor((gib * KIB ** 3) / token) / block);
        return { token, blocks, slots: blocks * block, requests: Math.floor(blocks / Math.ceil(tokens / block)) };
      },
      say: ({ token, blocks, slots, requests }, { tokens }) => [
        ["a token takes", `${short(token / KIB)} KiB`],
        ["the pool holds", `${number(slots)} tokens in ${number(blocks)} blocks`],
        [`requests of ${number(tokens)} tokens at once`, number(requests)],
      ],
    },
    roofline: {
      title: "What limits a decode step?",
      fields: [
        { key: "batch", label: "requests at once", value: 4, log: 1, max: 9, unit: "" },
        { key: "read", label: "memory is read at", value: 5, log: 1, max: 12, unit: "GB/s" },
        { key: "matrix", label: "arithmetic", value: 8.6, log: 0.2, max: 20, unit: "GFLOP/s" },
        { key: "weights", label: "weights, GB", value: 1.19, min: 0.01, step: "any" },
        { key: "history", label: "tokens behind each request", value: 256, min: 0 },
      ],
      // As limits() in scripts/bench/step.py, in bfloat16, with the KV of Qwen3-0.6B: 112 KiB and 2 operations a byte.
      work({ batch, read, matrix, weights, history }) {
        const kv = batch * history * 112 * KIB;
        const reading = (weights * 1e9) / (read * 1e9);
        const computing = (batch * weights * 1e9) / (matrix * 1e9);
        const attention = Math.max(kv / (read * 1e9), (2 * kv) / (matrix * 1e9));
        return { reading, computing, attention, seconds: Math.max(reading, computing) + attention, turn: matrix / read };
      },
      say: ({ reading, computing, attention, seconds, turn }, { batch }) => [
        ["weights", `${short(reading * 1e3)} ms to read, ${short(computing * 1e3)} ms to compute`],
        ["attention", `${short(attention * 1e3)} ms`],
        ["a step takes at least", `${short(seconds * 1e3)} ms: ${short(batch / seconds)} tokens/s`],
        ["limited by", computing > reading ? "arithmetic" : attention > reading ? "memory, reading KV" : "memory, reading weights"],
        ["weights are free to share up to", `${short(turn)} requests`],
      ],
      draw: roof,
      drag: { batch: (x, _, wide) => 2 ** Math.round(((x - LEFT) / (wide - LEFT - 24)) * MOST) },
    },
  };

  // Seconds a step against requests, both on logarithmic axes: flat while weights are read, rising once they are computed.
  function roof(values, _, wide) {
    const [high, most, left, bottom] = [210, MOST, LEFT, 168];
    const at = (power) => TOOLS.roofline.work({ ...values, batch: 2 ** power });
    const all = Array.from({ length: 46 }, (_, i) => (i * most) / 45);
    const times = all.map((power) => Math.log10(at(power).seconds * 1e3));
    const low = Math.floor(Math.min(...times));
    const top = Math.max(low + 1, Math.ceil(Math.max(...times)));
    const x = (power) => (left + (power / most) * (wide - left - 24)).toFixed(1);
    const y = (time) => (bottom - ((time - low) / (top - low)) * (bottom - 34)).toFixed(1);
    const here = Math.log2(values.batch);
    const rows = Array.from({ length: top - low + 1 }, (_, i) => low + i).map((power) => `<path class="grid" d="M${left} ${y(power)}H${wide - 24}"/><text class="end" x="${left - 8}" y="${+y(power) + 5}">${milliseconds(power)}</text>`);
    const ticks = [0, 3, 6, 9].map((power) => `<text x="${x(power)}" y="${bottom + 18}">${2 ** power}</text>`);
    return `<svg viewBox="0 0 ${wide} ${high}" aria-hidden="true">${rows.join("")}<path d="M${all.map((power, i) => `${x(power)} ${y(times[i])}`).join("L")}"/>
      <circle data-key="batch" cx="${x(here)}" cy="${y(Math.log10(at(here).seconds * 1e3))}" r="7"/>${ticks.join("")}<text class="axis" x="0" y="14">time of a step</text><text class="end" x="${wide - 24}" y="${high - 6}">requests at once</text></svg>`;
  }

  const milliseconds = (power) => (power >= 3 ? `${number(10 ** (power - 3))} s` : `${number(10 ** power, 3)} ms`);

  function element(tag, attrs, ...children) {
    const node = document.createElement(tag);
    for (const name in attrs) node.setAttribute(name, attrs[name]);
    node.append(...children);
    return node;
  }

  let count = 0;

  function control(field) {
    const id = `kv-tool-${++count}`;
    if (field.options) {
      const options = field.options.map((option) => element("option", option === field.value ? { selected: "" } : {}, option));
      return { id, input: element("select", { id, name: field.key }, ...options) };
    }
    const { value, min = 0, max = "", step = 1 } = field;
    const sliding = field.log || field.slide;
    const attrs = field.text ? { type: "text", maxlength: field.text } : sliding ? { type: "range", min, max, step: sliding } : { type: "number", min, step, required: "" };
    return { id, input: element("input", { id, name: field.key, ...attrs, value }) };
  }

  function build(room) {
    const tool = TOOLS[room.dataset.tool];
    const form = element("form", { class: "kv-tool__fields" });
    const result = element("dl", { class: "kv-tool__result" });
    const picture = element("div", { class: "kv-tool__picture" });
    const shown = [];
    for (const field of tool.fields) {
      const { id, input } = control(field);
      const label = element("label", { for: id }, field.label);
      if (field.log || field.slide) {
        const output = element("output", { for: id });
        label.append(" ", output);
        shown.push(() => {
          output.textContent = field.show ? field.show(Number(input.value)) : `${short(2 ** input.value)} ${field.unit}`.trim();
          input.setAttribute("aria-valuetext", output.textContent);
        });
      }
      form.append(element("div", field.text ? { class: "kv-tool__wide" } : {}, label, input));
    }
    if (tool.first) form.prepend(tool.first(form)); // before anything is painted, so that nothing moves
    const values = () => {
      const read = (field) => {
        const { value } = form.elements[field.key];
        return field.options || field.text ? value : field.log ? 2 ** Number(value) : Number(value);
      };
      return Object.fromEntries(tool.fields.map((field) => [field.key, read(field)]));
    };
    function refresh() {
      shown.forEach((act) => act());
      if (!form.checkValidity()) return;
      const given = values();
      const rows = tool.say(tool.work(given), given);
      result.replaceChildren(...rows.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))));
      if (tool.draw) picture.innerHTML = tool.draw(given, tool.work(given), Math.max(NARROWEST, picture.clientWidth)); // a pixel is a pixel
    }
    let dragged = null;
    function drag(event) {
      const art = picture.querySelector("svg").getBoundingClientRect();
      const value = tool.drag[dragged](event.clientX - art.left, values(), art.width);
      const field = tool.fields.find(({ key }) => key === dragged);
      form.elements[dragged].value = field.log ? Math.log2(value) : value; // a slider keeps it within its ends
      refresh();
    }
    picture.addEventListener("pointerdown", (event) => {
      dragged = event.target.closest("[data-key]")?.dataset.key;
      if (!dragged) return;
      event.preventDefault();
      picture.setPointerCapture(event.pointerId); // each move replaces the drawing
      drag(event);
    });
    picture.addEventListener("pointermove", (event) => dragged && drag(event));
    for (const end of ["pointerup", "pointercancel"]) picture.addEventListener(end, () => (dragged = null));
    form.addEventListener("input", refresh);
    form.addEventListener("submit", (event) => event.preventDefault());
    room.setAttribute("role", "group");
    room.setAttribute("aria-label", tool.title);
    room.replaceChildren(element("strong", {}, tool.title), form, picture, result);
    refresh();
    if (tool.draw) new ResizeObserver(refresh).observe(room);
  }

  window.KvTools = TOOLS;
  document.querySelectorAll(".kv-tool[data-tool]").forEach(build);
})();
