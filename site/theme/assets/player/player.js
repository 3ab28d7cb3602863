// Course machinery. Plays traces of the engine: frames that scripts/record_traces.py recorded, drawn by a view.
//
// A link with the class kv-player and a trace as its target becomes a player; without scripts the picture in it stays.
// A view is a pure function, (pen, frame, scene) -> shapes with keys. Shapes with the same key move, others fade in.
(function () {
  "use strict";
  const KV = (window.KvPlayer = Object.assign({ views: {}, pace: 1, speed: 1 }, window.KvPlayer));
  const SVG = "http://www.w3.org/2000/svg";
  const BASE = document.currentScript && document.currentScript.src.replace(/[^/]*$/, "");
  const NARROWEST = 260;
  const loading = {};
  const motion = window.matchMedia("(prefers-reduced-motion: reduce)");

  // ---- drawing -----------------------------------------------------------------------------------------------

  // Collects a frame's shapes. Sizes are CSS pixels; whatever is drawn later lies on top. room: the height there is, so
  // that a view can move its rows closer together. A pen that folds keeps the legend for later.
  class Pen {
    constructor(width, room = Infinity, folds = false) {
      Object.assign(this, { width, room, folds });
      this.height = 0;
      this.shapes = [];
    }
    add(tag, key, x, y, attrs, more) {
      const shape = Object.assign({ tag, key, x, y, attrs }, more);
      this.shapes.push(shape);
      return shape;
    }
    rect(key, x, y, width, height, style, more) {
      return this.add("rect", key, x, y, { class: style, width, height, rx: 4 }, more);
    }
    text(key, x, y, words, style, more) {
      return this.add("text", key, x, y, { class: style || "" }, Object.assign({ words: String(words) }, more));
    }
    path(key, x, y, d, style, more) {
      return this.add("path", key, x, y, { class: style, d }, more);
    }
    // A texture over a box: dots (cached), strokes (evicted, preempted) or cross (the null block).
    texture(key, x, y, width, height, name, more) {
      if (name === "cross") {
        return this.path(key, x, y, `M4 4L${round(width - 4)} ${round(height - 4)}M${round(width - 4)} 4L4 ${round(height - 4)}`, "cross", more);
      }
      return this.add("rect", key, x, y, { class: "texture", width, height, rx: 4 }, Object.assign({ texture: name }, more));
    }
    // What the signs mean: [words, draw(x, y)] each, in a box of 20 by 16. Returns where the next part begins.
    legend(y, entries) {
      if (this.folds) {
        this.entries = entries;
        return Math.max(0, y - 10); // what stands below keeps its distance from a legend
      }
      let x = 0;
      entries.forEach(([words, sign], i) => {
        const wide = 40 + words.length * 6.3;
        if (x && x + wide > this.width + 6) [x, y] = [0, y + 22];
        sign(x, y, "legend-" + i);
        this.text("legend-" + i, x + 26, y + 12.5, words, "label muted");
        x += wide;
      });
      return y + 18;
    }
    // A request's letter in a disc of its colour.
    badge(key, x, y, letter, more) {
      this.add("circle", key + "-disc", x, y, { class: "disc " + letter.toLowerCase(), r: 11 }, more);
      this.text(key, x, y + 4.5, letter, "badge mid " + letter.toLowerCase(), more);
    }
  }

  const round = (number) => Math.round(number * 10) / 10;
  const place = (shape) => `translate(${round(shape.x)}px,${round(shape.y)}px)`;

  function attributes(shape, textures) {
    const attrs = {};
    for (const name in shape.attrs) {
      const value = shape.attrs[name];
      attrs[name] = typeof value === "number" ? round(value) : value;
    }
    if (shape.texture) attrs.fill = `url(#${textures}-${shape.texture})`;
    return attrs;
  }

  // Make the svg show these shapes: move what is there, add what is new, take away what is gone.
  function paint(svg, shapes, textures, moving) {
    const known = svg.known || (svg.known = new Map());
    const gone = new Map(known);
    let cursor = svg.firstElementChild.nextElementSibling; // behind <defs>
    for (const shape of shapes) {
      const key = shape.tag + " " + shape.key;
      let node = known.get(key);
      gone.delete(key);
      const isNew = !node;
      if (isNew) {
        node = document.createElementNS(SVG, shape.tag);
        known.set(key, node);
      }
      const attrs = attributes(shape, textures);
      for (const name in attrs) if (node.getAttribute(name) !== String(attrs[name])) node.setAttribute(name, attrs[name]);
      if (shape.words !== undefined && node.textContent !== shape.words) node.textContent = shape.words;
      if (node === cursor) cursor = cursor.nextElementSibling;
      else svg.insertBefore(node, cursor);
      if (isNew && moving) {
        node.style.transform = shape.from ? `translate(${round(shape.from[0])}px,${round(shape.from[1])}px)` : place(shape);
        node.classList.add("entering");
        node.getBoundingClientRect(); // so that the way from here is a transition
        node.classList.remove("entering");
      }
      node.style.transform = place(shape);
    }
    for (const [key, node] of gone) {
      known.delete(key);
      node.remove();
    }
  }

  function textureDefs(id) {
    const pattern = (name, size, inner, turn) =>
      `<pattern id="${id}-${name}" width="${size}" height="${size}" patternUnits="userSpaceOnUse"${turn}>${inner}</pattern>`;
    return (
      pattern("dots", 7, '<circle class="dot" cx="2" cy="2" r="1.3"/>', "") +
      pattern("strokes", 7, '<path class="stroke" d="M0 0V7"/>', ' patternTransform="rotate(45)"')
    );
  }

  // One frame as the text of a picture, as scripts/record_traces.py keeps it for pages without scripts.
  KV.picture = function (trace, index, width) {
    const pen = draw(trace, index, width);
    const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
    const lines = pen.shapes.map((shape) => {
      const attrs = Object.assign(attributes(shape, "kv"), { transform: `translate(${round(shape.x)} ${round(shape.y)})` });
      const text = Object.keys(attrs).map((name) => ` ${name}="${escape(attrs[name])}"`).join("");
      return shape.words === undefined ? `<${shape.tag}${text}/>` : `<${shape.tag}${text}>${escape(shape.words)}</${shape.tag}>`;
    });
    return { width, height: Math.ceil(pen.height), defs: textureDefs("kv"), lines };
  };

  function draw(trace, index, ...size) {
    const pen = new Pen(...size);
    KV.views[trace.kind](pen, trace.frames[index], trace.scene, trace.frames, index);
    return pen;
  }

  // ---- the player --------------------------------------------------------------------------------------------

  function element(tag, attrs, ...children) {
    const node = document.createElement(tag);
    for (const name in attrs) node.setAttribute(name, attrs[name]);
    node.append(...children);
    return node;
  }

  const ICONS = {
    back: "M14 4L5 10l9 6z",
    next: "M6 4l9 6-9 6z",
    play: "M6 3l11 7-11 7z",
    pause: "M5 4h3v12H5zM12 4h3v12h-3z",
    key: "M3 4h4v4H3zM9 5h8v2H9zM3 12h4v4H3zM9 13h8v2H9z",
    embed: "M8 4l-6 6 6 6 1.6-1.6L5.2 10l4.4-4.4zM12 4l6 6-6 6-1.6-1.6L14.8 10l-4.4-4.4z",
  };
  const AROUND = 12; // pixels between the site's header and a figure that has the whole window
  const LEAST = 420; // a figure that has less below a page's title has the whole window instead
  const SPEEDS = [1, 2, 4];
  const LONGEST = 58_000; // milliseconds that a story plays
  const WIDTHS = [720, 600, 500, 450, 400, 360, 330]; // of layouts for a box: views change theirs between them
  const LARGER = 1.12; // how much larger a lower layout must be drawn to be taken instead
  let count = 0;

  // How long each frame of a trace stays, in milliseconds.
  function waits({ frames }) {
    const long = frames.map(({ say }) => 900 + 30 * say.length);
    const all = long.reduce((sum, one) => sum + one, 0);
    return long.map((one) => one * Math.min(1, LONGEST / all));
  }

  // The height of the site's header, which stays in sight; 0 where there is none.
  KV.header = () => parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--kv-header")) || 0;

  // inside: a function for a player in a box of a given size, which returns the picture's [width, height] there, and
  // whether each frame has a layout of its own. Without one a picture is as wide as its figure and makes itself room.
  class Player {
    constructor(link, trace, { inside } = {}) {
      this.trace = trace;
      this.inside = inside;
      this.places = JSON.parse(link.dataset.code || "{}");
      this.index = Math.min(Number(link.dataset.start || trace.poster || 0), trace.frames.length - 1);
      this.isFresh = true; // untouched: it shows the frame that says most
      this.playing = false;
      this.answers = {}; // frame to whether the answer was right
      this.id = "kv" + ++count;
      this.build();
      const paragraph = link.closest("p"); // what it holds besides the link, if anything, stays
      (paragraph?.textContent.trim() === link.textContent.trim() ? paragraph : link).replaceWith(this.figure);
      new ResizeObserver(() => this.layOut()).observe(this.stage);
      window.addEventListener("resize", () => this.layOut());
      this.layOut();
    }

    build() {
      const { trace, id } = this;
      this.svg = document.createElementNS(SVG, "svg");
      this.svg.setAttribute("class", "kv-art");
      this.svg.setAttribute("role", "img");
      this.svg.setAttribute("aria-labelledby", id + "-say");
      this.svg.innerHTML = `<defs>${textureDefs(id)}</defs>`;
      this.legend = document.createElementNS(SVG, "svg");
      this.legend.setAttribute("class", "kv-art");
      this.legend.innerHTML = `<defs>${textureDefs(id + "-key")}</defs>`;
      this.keyBox = element("div", { class: "kv-key", id: id + "-key", hidden: "" }, this.legend);
      this.stage = element("div", { class: "kv-stage", tabindex: "0", role: "group", "aria-label": "Picture. Arrow keys step, space plays." }, this.svg, this.keyBox);
      this.words = element("span", { id: id + "-say", "aria-live": "polite" });
      this.code = element("a", { class: "kv-code" }); // the function that made the frame
      this.say = element("p", { class: "kv-say" }, this.words, " ", this.code);
      this.room = element("div", { class: "kv-room" }, this.say);
      this.quiz = element("div", { class: "kv-quiz", role: "group", tabindex: "-1", "aria-label": "What happens next?", hidden: "" });
      this.room.append(this.quiz);
      const bar = this.buildBar();
      this.head = element("div", { class: "kv-head" }, element("strong", { title: trace.title }, trace.title), this.score, bar);
      this.figure = element("figure", { class: "kv-figure", "aria-label": trace.title, "data-trace": trace.id }, this.head, this.stage, element("div", { class: "kv-foot" }, this.room));
      this.figure.addEventListener("keydown", (event) => this.key(event));
      this.figure.player = this;
    }

    buildBar() {
      const { trace, id } = this;
      this.number = element("span", { class: "kv-number" });
      this.backButton = this.button("back", "Step back", () => this.user(() => this.step(-1)));
      this.playButton = this.button("play", "Play", () => this.user(() => this.toggle()));
      this.nextButton = this.button("next", "Step forward", () => this.user(() => this.step(1)));
      this.slider = element("input", { type: "range", min: "0", max: String(trace.frames.length - 1), value: "0", "aria-label": "Step" });
      this.slider.addEventListener("input", () => this.user(() => this.show(Number(this.slider.value))));
      this.speedButton = element("button", { type: "button", class: "kv-speed" });
      this.speedButton.addEventListener("click", () => this.hurry());
      this.nameSpeed();
      this.keyButton = this.button("key", "Key to the signs", () => this.unfold(this.keyBox.hidden));
      this.keyButton.setAttribute("aria-controls", id + "-key");
      this.asking = element("input", { type: "checkbox", id: id + "-ask", "aria-label": "What happens next?" });
      this.asking.addEventListener("change", () => this.ask());
      this.score = element("span", { class: "kv-score" });
      const ask = element("label", { class: "kv-ask", for: id + "-ask", title: "What happens next? Ask me before each step" }, this.asking, element("span", { "aria-hidden": "true" }, "?"));
      const has = trace.frames.some((frame) => frame.ask);
      return element("div", { class: "kv-bar" }, this.backButton, this.playButton, this.nextButton, this.slider, this.number, this.speedButton, ...(has ? [ask] : []), this.keyButton);
    }

    button(icon, label, act) {
      const button = element("button", { type: "button", "aria-label": label, title: label });
      button.innerHTML = `<svg viewBox="0 0 20 20" aria-hidden="true"><path d="${ICONS[icon]}"/></svg>`;
      button.addEventListener("click", act);
      return button;
    }

    // What a reader does.
    user(act) {
      act();
      this.isFresh = false;
    }

    // From here on questions are asked: from the start, if nothing has been seen yet.
    ask() {
      this.user(() => (this.isFresh && this.asking.checked ? this.show(0) : this.closeQuestion()));
    }

    // ---- the key, and the speed of all players on the page ----

    unfold(isOpen) {
      this.keyBox.hidden = !isOpen;
      this.keyButton.setAttribute("aria-expanded", String(isOpen));
    }

    hurry() {
      KV.speed = SPEEDS[(SPEEDS.indexOf(KV.speed) + 1) % SPEEDS.length];
      document.querySelectorAll(".kv-figure").forEach(({ player }) => player.nameSpeed());
      if (this.playing && !this.open) this.wait();
    }

    nameSpeed() {
      this.speedButton.textContent = KV.speed + "×";
      this.speedButton.title = "Speed";
      this.speedButton.setAttribute("aria-label", `Speed ${KV.speed}×`);
    }

    key(event) {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const last = this.trace.frames.length - 1;
      if (this.open && event.repeat) return;
      const acts = {
        ArrowRight: () => this.step(1),
        ArrowLeft: () => this.step(-1),
        Home: () => this.show(0),
        End: () => this.show(last),
        ...(this.keyBox.hidden ? {} : { Escape: () => this.unfold(false) }),
        " ": () => this.toggle(),
      };
      const onControl = /^(BUTTON|INPUT)$/.test(event.target.tagName) && event.target !== this.slider;
      if (!acts[event.key] || (event.key === " " && onControl)) return;
      event.preventDefault();
      this.user(acts[event.key]);
    }

    get open() {
      return !this.quiz.hidden;
    }

    // A frame forward or back. In quiz mode a frame that asks is shown once it is answered.
    step(by) {
      this.pause();
      this.advance(by);
    }

    advance(by) {
      const to = this.index + by;
      if (to < 0 || to >= this.trace.frames.length) return;
      if (this.open && by > 0) return this.reveal(); // answered or not, the reader goes on
      if (by > 0 && this.asking.checked && this.trace.frames[to].ask && !(to in this.answers)) this.question(to);
      else this.show(to);
    }

    show(index) {
      this.closeQuestion();
      this.index = Math.max(0, Math.min(index, this.trace.frames.length - 1));
      this.render(true);
    }

    toggle() {
      if (this.playing) return this.pause();
      if (this.index === this.trace.frames.length - 1) this.show(0);
      this.play();
    }

    play() {
      this.playing = true;
      this.face("pause", "Pause");
      if (this.open) return;
      this.wait();
    }

    pause() {
      this.playing = false;
      clearTimeout(this.timer);
      this.face("play", "Play");
    }

    face(icon, label) {
      this.playButton.querySelector("path").setAttribute("d", ICONS[icon]);
      this.playButton.setAttribute("aria-label", label);
      this.playButton.title = label;
    }

    // Long enough to read what was said, and a story no longer than readers stay.
    wait() {
      clearTimeout(this.timer);
      const long = waits(this.trace)[this.index];
      this.timer = setTimeout(() => this.tick(), (long * KV.pace) / KV.speed);
    }

    tick() {
      if (!this.playing) return;
      if (this.index === this.trace.frames.length - 1) {
        this.pause();
        return;
      }
      this.advance(1);
      if (!this.open) this.wait();
    }

    // ---- what happens next? ----

    question(to) {
      const { ask } = this.trace.frames[to];
      clearTimeout(this.timer);
      this.write(ask);
      this.quiz.querySelectorAll(".kv-options button").forEach((button, i) => {
        button.addEventListener("click", () => this.user(() => this.answer(to, i)));
      });
      this.quiz.hidden = false;
      this.say.classList.add("waits"); // the question stands where the words stood, so that nothing moves
      this.asked = to;
      this.makeRoom();
      if (!this.playing || this.figure.contains(document.activeElement)) this.quiz.focus({ preventScroll: true });
    }

    write(ask) {
      const options = ask.options.map((option) => element("button", { type: "button" }, option));
      this.quiz.replaceChildren(element("p", { class: "kv-question" }, ask.question), element("div", { class: "kv-options" }, ...options));
    }

    verdict(right, ask) {
      const why = element("p", { class: "kv-why", role: "status" }, element("strong", {}, right ? "Right. " : `No: ${ask.options[ask.right]}. `), ask.why);
      const on = element("button", { type: "button", class: "kv-on" }, "Show it");
      this.quiz.append(why, on);
      return on;
    }

    // Show what was asked about.
    reveal() {
      this.show(this.asked);
      this.stage.focus({ preventScroll: true });
      if (this.playing) this.wait();
    }

    answer(to, chosen) {
      const { ask } = this.trace.frames[to];
      const right = chosen === ask.right;
      this.answers[to] = right;
      const buttons = [...this.quiz.querySelectorAll(".kv-options button")];
      buttons.forEach((button, i) => {
        button.disabled = true;
        if (i === ask.right) button.classList.add("right");
        else if (i === chosen) button.classList.add("wrong");
      });
      const on = this.verdict(right, ask);
      this.makeRoom();
      on.addEventListener("click", () => this.user(() => this.reveal()));
      on.focus({ preventScroll: true });
      this.tally();
    }

    tally() {
      const given = Object.values(this.answers);
      this.score.textContent = given.length ? `${given.filter(Boolean).length} of ${given.length} right` : "";
    }

    closeQuestion() {
      this.quiz.hidden = true;
      this.say.classList.remove("waits");
      this.quiz.replaceChildren();
      this.makeRoom();
    }

    // ---- showing ----

    // The picture as wide as the figure, in a layout that is as high as there is room for.
    layOut() {
      if (!this.stage.clientWidth) return;
      if (this.inside) return this.render(false);
      const style = getComputedStyle(this.stage);
      const wide = Math.floor(this.stage.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
      const allowed = getComputedStyle(this.figure).getPropertyValue("--kv-height").trim();
      const now = `${wide} ${window.innerHeight} ${allowed}`;
      if (now === this.laid) return;
      this.laid = now;
      this.sayRoom = Math.max(...this.trace.frames.map((frame) => (this.tell(frame), this.say.offsetHeight)));
      const { high, least } = this.limits(allowed);
      const around = this.head.offsetHeight + parseFloat(style.paddingTop) + this.sayRoom + 2; // and the borders
      this.fit(Math.max(NARROWEST, wide), high - around, least);
      this.high = 0;
      this.layOutKey();
      this.render(false);
      this.makeRoom();
    }

    // After another trace or another style.
    layOutAgain() {
      this.laid = "";
      this.layOut();
    }

    // How high the whole figure may be: what the page allows (--kv-height), else what a window shows below the page's
    // title, else below the site's header. least: how small the picture may become for it.
    limits(allowed) {
      const isTold = allowed.endsWith("px");
      const below = window.innerHeight - (this.figure.getBoundingClientRect().top + window.scrollY) - 12;
      const high = isTold ? parseFloat(allowed) : below >= LEAST ? below : window.innerHeight - KV.header() - AROUND;
      return { high, least: isTold ? 0.3 : window.innerHeight < 600 ? 0.75 : 1 };
    }

    // Of the layouts wider than the figure, which are lower and drawn smaller, the first that is low enough.
    fit(wide, high, least) {
      for (this.scale = 1; ; this.scale = Math.max(least, this.scale - 0.05)) {
        [this.width, this.below] = [Math.floor(wide / this.scale), high / this.scale];
        this.tallest = this.highest(this.width, this.below) * this.scale;
        if (this.tallest <= high || this.scale <= least) return;
      }
    }

    // The height of the tallest frame in a layout of this width.
    highest(width, below) {
      return Math.max(...this.trace.frames.map((_, i) => draw(this.trace, i, width, below, true).height));
    }

    // In a box: of several layouts the one that is drawn largest there, for this frame or for the tallest.
    fitInside() {
      const [wide, high, isAlone] = this.inside(this);
      const size = `${wide} ${high} ${isAlone && this.index}`;
      const widths = [...WIDTHS.filter((width) => width > wide), Math.max(NARROWEST, Math.floor(wide)), ...WIDTHS.filter((width) => width < wide)];
      const fitting = (width) => {
        const tallest = isAlone ? draw(this.trace, this.index, width, undefined, true).height : this.highest(width);
        return { width, high: Math.ceil(tallest), scale: Math.max(0.1, Math.min(wide / width, high / tallest, 1)) };
      };
      this.fits ||= {};
      this.fits[size] ||= widths.map(fitting).reduce((best, one) => (one.scale > best.scale * LARGER ? one : best));
      Object.assign(this, this.fits[size]);
    }

    drawn(index) {
      return draw(this.trace, index, this.width, this.below, true);
    }

    layOutKey() {
      const pen = this.drawn(this.index); // the signs draw with it
      this.keyButton.hidden = !pen.entries;
      if (!pen.entries) return this.unfold(false);
      Object.assign(pen, { shapes: [], folds: false, width: Math.min(this.width, 420) });
      pen.height = pen.legend(2, pen.entries);
      paint(this.legend, pen.shapes, this.id + "-key", false);
      this.legend.setAttribute("viewBox", `0 0 ${pen.width} ${pen.height}`);
      this.legend.setAttribute("width", pen.width);
    }

    // As high as the longest words, so that no step moves the page; a question covers a part of the picture.
    makeRoom() {
      const covered = this.open ? this.quiz.offsetHeight + 16 - this.stage.offsetHeight : 0;
      this.room.style.minHeight = Math.max(this.sayRoom || 0, covered) + "px";
    }

    tell({ say, code }) {
      if (this.words.textContent !== say) this.words.textContent = say;
      const place = this.places[code];
      this.code.hidden = !place;
      if (!place) return;
      this.code.href = place;
      this.code.textContent = code.replace(/.*[:.]/, "");
      this.code.title = code.replace("::", ": ");
    }

    render(animated) {
      const { trace, index } = this;
      const moving = animated && !motion.matches;
      this.svg.classList.toggle("moving", moving);
      if (this.inside) this.fitInside();
      const { shapes, height } = this.drawn(index);
      paint(this.svg, shapes, this.id, moving);
      this.grow(height);
      this.tell(trace.frames[index]);
      this.slider.value = index;
      this.slider.setAttribute("aria-valuetext", `Step ${index + 1} of ${trace.frames.length}`);
      this.slider.style.setProperty("--done", `${(100 * index) / (trace.frames.length - 1)}%`);
      this.number.textContent = `${index + 1} / ${trace.frames.length}`;
      this.backButton.disabled = index === 0;
      this.nextButton.disabled = index === trace.frames.length - 1;
      this.figure.dataset.index = index;
      this.figure.dispatchEvent(new CustomEvent("kv-shown", { bubbles: true, detail: { index } }));
    }

    // No room is kept for taller frames; what has been shown does not shrink again, or the page would move back and forth.
    grow(height) {
      this.high = Math.max(this.high, Math.ceil(height));
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.high}`);
      this.svg.setAttribute("width", Math.round(this.width * this.scale));
      this.svg.setAttribute("height", Math.ceil(this.high * this.scale));
    }
  }

  KV.Player = Player; // a lab makes its own
  KV.element = element;
  KV.waits = waits;
  KV.load = load;
  KV.base = BASE;

  // ---- finding and loading -----------------------------------------------------------------------------------

  function load(url) {
    return (loading[url] ||= new Promise((done, failed) => {
      const script = element("script", { src: url });
      script.addEventListener("load", done);
      script.addEventListener("error", failed);
      document.head.append(script);
    }));
  }

  // The trace lies beside the picture that a link shows without scripts.
  const source = (link) => (link.dataset.file ? new URL(link.dataset.file, link.href).href : link.href || "");
  const trace = (link) => {
    const all = Object.values(window.KV_TRACES || {});
    return all.find((one) => one.id === link.dataset.trace) || all.find((one) => source(link).endsWith(`/${one.file}`));
  };

  // A button that copies the line with which another site shows this player; not in a copy of the site on a disk.
  function offerFrame(player, file) {
    if (!navigator.clipboard || location.protocol === "file:" || document.querySelector(".kv-embedded")) return;
    const copy = () => load(`${BASE}embed/frame.js`).then(() => KV.copyFrame(player, file));
    player.keyButton.after(player.button("embed", "Embed: copy the line", copy));
  }

  async function upgrade(link) {
    if (!trace(link)) await load(source(link));
    const found = trace(link);
    if (!found) return;
    if (!KV.views[found.kind]) await load(`${BASE}views/${found.kind}.js`);
    offerFrame(new Player(link, found), source(link));
  }

  KV.start = () => document.querySelectorAll("a.kv-player").forEach((link) => upgrade(link).catch(() => {})); // the picture stays
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", KV.start);
  else KV.start();
})();
