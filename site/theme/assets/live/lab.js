// Course machinery. A lab: a reader's requests on the lesson's own code. Python plays the events, the player draws them.
//
// The recorded story above it stays until the first run. The scenario is in the address, so that it can be sent.
(function () {
  "use strict";
  const { announce, copied, engine, element, meter, obstacle, store, trouble } = window.KvLive;
  const [MOST_EVENTS, MOST_TEXT] = [200, 160]; // as scripts/live/labs/events.py, which checks what is inside them

  class Lab {
    constructor(box) {
      this.box = box;
      this.about = JSON.parse(box.dataset.about);
      this.settings = Object.fromEntries(this.about.knobs.map((knob) => [knob.name, knob.default]));
      this.events = [];
      this.seed = "";
      this.alive = [];
      this.trial = {};
      const opened = this.readAddress();
      if (!opened) this.choose(0);
      this.build(opened);
    }

    // ---- the scenario ----

    // An event holds no semicolon: it parts events.
    get words() {
      return this.events.join(";");
    }

    choose(index) {
      const preset = this.about.presets[index];
      this.settings = Object.fromEntries(this.about.knobs.map((knob) => [knob.name, preset.settings[knob.name] ?? knob.default]));
      this.events = preset.do.split(";").filter(Boolean);
      this.seed = "";
    }

    readAddress() {
      const asked = new URLSearchParams(location.search);
      if (asked.get("lab") !== this.about.name) return false;
      for (const knob of this.about.knobs) if (asked.has(knob.name)) this.settings[knob.name] = allowed(knob, asked.get(knob.name));
      if (/^\d{1,4}$/.test(asked.get("seed"))) this.seed = asked.get("seed");
      const events = (asked.get("do") || "").split(";").filter(Boolean);
      this.events = events.slice(0, MOST_EVENTS).map((event) => event.slice(0, MOST_TEXT));
      if (!this.seed && !events.length && this.about.presets[0].do) this.choose(0);
      return true;
    }

    // What this is now; `put` brings it back.
    get scenario() {
      return { settings: { ...this.settings }, events: [...this.events], seed: this.seed };
    }

    put({ settings, events, seed }) {
      Object.assign(this, { settings: { ...settings }, events: [...events], seed });
    }

    get address() {
      const url = new URL(location.href);
      const asked = new URLSearchParams({ lab: this.about.name });
      if (this.seed) asked.set("seed", this.seed);
      else {
        for (const knob of this.about.knobs) asked.set(knob.name, this.settings[knob.name]);
        asked.set("do", this.words);
      }
      url.search = asked;
      url.hash = this.box.id;
      return url.href;
    }

    // ---- building ----

    build(opened) {
      const reason = obstacle(this.about.sizes);
      this.go = element("button", { type: "button", class: "kv-live-go", onclick: () => this.open() }, opened ? "Run this scenario" : this.about.invites);
      const price = reason || `Runs the lesson's own Python in this page: ${this.about.sizes.lab} MB, once. Nothing leaves your browser.`;
      if (reason) this.go.disabled = true;
      else announce(this.go, this.go.textContent, this.about.sizes);
      this.first = element("p", { class: "kv-live-first" }, this.go, element("span", {}, price));
      this.box.replaceChildren(this.first);
    }

    async open() {
      this.unfold();
      await this.run("fullest");
    }

    unfold() {
      this.first.remove();
      this.box.append(this.panel());
      this.showControls();
      this.scenarios.focus();
    }

    panel() {
      const { about } = this;
      const id = (name) => `${this.box.id}-${name}`;
      const labelled = (label, control) => element("label", {}, element("span", {}, label), control);
      this.scenarios = element("select", { "aria-label": "Scenario", onchange: () => this.pick() }, ...about.presets.map((one, i) => element("option", { value: i }, one.question)), element("option", { value: "own" }, "Your own"));
      this.scenarios.value = this.seed || this.words !== about.presets[0].do ? "own" : 0;
      this.knobs = about.knobs.map((knob) => labelled(knob.label, this.knob(knob)));
      this.prompt = element("input", { type: "text", maxlength: "120", id: id("prompt"), value: about.example });
      this.prompt.addEventListener("keydown", (event) => event.key === "Enter" && this.arrive());
      this.prompt.addEventListener("keydown", (event) => event.stopPropagation());
      const what = about.prompt === "words" ? "Prompt" : "Prompt tokens, answer tokens";
      this.acts = element("div", { class: "kv-live-row kv-live-acts", role: "group", "aria-label": "What happens next" });
      this.counters = element("dl", { class: "kv-live-counters" });
      this.say = element("p", { class: "kv-live-say", role: "status" });
      this.text = element("input", { type: "text", "aria-label": "Events as text", spellcheck: "false", onchange: () => this.typed() });
      this.own = element("div", { class: "kv-live-row" });
      this.broken = element("div", { class: "kv-live-verdict bad", role: "status", hidden: true });
      const text = element("details", {}, element("summary", {}, "Events as text"), this.text, element("p", {}, `Parted by semicolons: ${about.syntax}.`));
      const tools = element("div", { class: "kv-live-row" },
        this.button("Undo", () => this.change(() => this.events.pop())),
        this.button("Start over", () => this.change(() => (this.events = []))),
        this.button("Random", () => this.random()),
        (this.back = this.button("Recorded story", () => this.restore())),
      );
      const scenario = element("div", { class: "kv-live-row kv-live-head" },
        element("label", { class: "kv-live-scenario" }, element("span", {}, "Scenario"), this.scenarios), this.button("Copy link", () => this.copy()));
      const settings = element("div", { class: "kv-live-row" }, ...this.knobs);
      const more = element("details", { class: "kv-live-more" }, element("summary", {}, "Settings and more"), settings, tools, text);
      return element("div", { class: "kv-live-panel", role: "group", "aria-label": about.title },
        scenario, this.broken, this.counters,
        ...(about.prompt ? [element("label", { class: "kv-live-prompt" }, element("span", {}, what), this.prompt)] : []),
        this.acts, this.own, this.say, meter(about.sizes, ["lab"], (tell) => engine.watchers.add(tell)), more);
    }

    knob(knob) {
      const change = (event) => this.change(() => (this.settings[knob.name] = event.target.value));
      const control = knob.choices.length
        ? element("select", { onchange: change }, ...knob.choices.map((choice) => element("option", {}, choice)))
        : element("input", { type: "number", min: knob.low, max: knob.high, onchange: change });
      control.dataset.knob = knob.name;
      return control;
    }

    button(words, act) {
      return element("button", { type: "button", onclick: act }, words);
    }

    // ---- acting ----

    pick() {
      if (this.scenarios.value === "own") return;
      this.choose(Number(this.scenarios.value));
      this.run("fullest");
    }

    change(act) {
      act();
      this.seed = "";
      this.scenarios.value = "own";
      return this.run();
    }

    add(event) {
      return this.change(() => this.events.push(event));
    }

    arrive() {
      const name = [..."ABCDEF"].find((letter) => !this.alive.includes(letter));
      const words = this.prompt.value.replace(/;/g, ",").trim();
      if (!name) this.say.textContent = "Six requests at a time are enough for this picture; let one end.";
      else if (words) this.add(`+${name}=${words}`);
    }

    // A choice in the picture, which is the last frame's.
    clicked(shape, { index, trace }) {
      const isBusy = this.box.hasAttribute("aria-busy");
      if (shape && !isBusy && index === trace.frames.length - 1) this.add(shape.dataset.event);
    }

    typed() {
      this.change(() => (this.events = this.text.value.split(";").map((one) => one.trim()).filter(Boolean)));
    }

    random() {
      this.seed = String(1 + Math.floor(Math.random() * 9999));
      this.scenarios.value = "own";
      this.run("fullest");
    }

    async copy() {
      history.replaceState(null, "", this.address);
      this.say.textContent = await copied(this.address, "scenario");
    }

    // ---- running ----

    get mine() {
      const use = this.own.querySelector("input:checked");
      return use ? Object.fromEntries(this.ownModules.map((module) => [module, this.sourceOf(module)])) : {};
    }

    get ownModules() {
      return this.about.modules.filter((module) => this.sourceOf(module));
    }

    // What a reader has written: on trial from an exercise that is not right yet, or passed.
    sourceOf(module) {
      return this.trial[module] || store.get("passed:" + module);
    }

    // Play the scenario again, whole. start: the frame to show, or "fullest", the one with most to see; otherwise the last.
    async run(start) {
      this.showOwn();
      this.box.setAttribute("aria-busy", "true");
      this.say.textContent = engine.isReady ? "" : "Python is loading …";
      const asked = { lab: this.about.name, settings: this.settings, do: this.words, seed: this.seed, mine: this.mine };
      const turn = (this.turn = (this.turn || 0) + 1);
      try {
        const found = await engine.ask("lab", asked);
        if (turn !== this.turn) return; // overtaken
        if (found.stopped) this.stopped(found.stopped);
        else if (found.error) this.refuse(found.error);
        else await this.show(found, start, Object.keys(asked.mine));
      } catch (error) {
        this.say.replaceChildren(...trouble(error, () => this.run(start)));
      }
      this.box.removeAttribute("aria-busy");
    }

    // Python refuses the last change: it is taken back, and what was typed stays where it was typed.
    refuse(words) {
      const typed = this.text.value;
      if (this.last) this.put(this.last);
      else this.choose(0);
      this.showControls();
      this.text.value = typed;
      this.say.textContent = words;
    }

    // The reader's own code does not get as far as a picture.
    stopped(words) {
      this.say.textContent = "";
      this.broken.hidden = false;
      this.broken.replaceChildren(element("p", {}, element("strong", {}, "The lab cannot run your code. "), words));
      this.showControls();
    }

    async show(found, start, mine) {
      this.settings = found.settings;
      this.events = found.do.split(";").filter(Boolean);
      this.alive = found.alive;
      this.choices = found.trace.frames.at(-1).choices || {}; // what each of them is, where a reader chooses
      this.last = this.scenario;
      if (start === "fullest") start = found.fullest;
      const KV = window.KvPlayer;
      if (!KV.views[found.trace.kind]) await KV.load(`${KV.base}views/${found.trace.kind}.js`);
      const before = this.figure ? this.figure.player.index : 0;
      this.play(found.trace, start ?? Math.min(before, found.trace.frames.length - 1), this.placesBut(mine));
      if (start === undefined) this.figure.player.show(found.trace.frames.length - 1);
      history.replaceState(null, "", this.address);
      this.say.textContent = "";
      this.showControls();
    }

    // Where the repository shows the functions that make the frames; not those that are the reader's own.
    placesBut(mine) {
      return Object.fromEntries(Object.entries(this.about.code).filter(([code]) => !mine.includes(code.split("::")[0])));
    }

    // Put a trace into the figure above, which showed the recorded one.
    play(trace, start, places) {
      if (!this.figure) {
        this.figure = this.above() || this.box.insertBefore(element("div", {}), this.box.firstChild);
        this.story = this.figure.player && this.figure.player.trace;
        this.storyPlaces = this.figure.player && this.figure.player.places;
      }
      if (this.figure.player) this.figure.player.pause();
      this.figure.dataset.start = start;
      this.figure.dataset.code = JSON.stringify(places);
      const player = new window.KvPlayer.Player(this.figure, trace);
      this.figure = player.figure;
      this.figure.classList.toggle("kv-live", trace !== this.story);
      player.stage.addEventListener("click", ({ target }) => this.clicked(target.closest("[data-event]"), player));
      player.layOutAgain(); // a phone shows a lab's words closer together
      if (start) player.show(start);
      new MutationObserver(() => this.count()).observe(this.figure, { attributes: true, attributeFilter: ["data-index"] });
      this.count();
    }

    above() {
      const figures = [...document.querySelectorAll("article .kv-figure")];
      return figures.filter((figure) => figure.compareDocumentPosition(this.box) & Node.DOCUMENT_POSITION_FOLLOWING).pop();
    }

    restore() {
      if (this.story) this.play(this.story, 0, this.storyPlaces);
    }

    count() {
      const { trace, index } = this.figure.player;
      const { counters: counted, broken } = trace.frames[index];
      const counters = Object.entries(counted || {});
      this.counters.replaceChildren(...counters.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
      this.broken.hidden = !broken;
      if (broken) this.broken.replaceChildren(element("p", {}, element("strong", {}, broken.says), " ", this.taskLink(broken.task)));
    }

    // To the task that keeps a rule: its editor in this page, if it has one.
    taskLink(number) {
      const box = [...document.querySelectorAll(".kv-exercise")].find(({ exercise }) => exercise.about.tasks.some((task) => task.number === number));
      const link = element("a", { href: box ? "#" + box.id : "#your-tasks" }, `Task ${number} keeps this rule.`);
      if (box) link.addEventListener("click", () => box.exercise.openAt(number));
      return link;
    }

    showControls() {
      for (const label of this.knobs) {
        const control = label.querySelector("[data-knob]");
        control.value = this.settings[control.dataset.knob];
      }
      this.text.value = this.words;
      this.back.hidden = !this.story;
      const { verbs } = this.about;
      const buttons = [];
      for (const verb of Object.keys(verbs)) {
        if (verb === "+") buttons.push(["+", verbs[verb], () => this.arrive()]);
        else if (verb === "." || verb === "*") buttons.push([verb, verbs[verb], () => this.add(verb)]);
        else if (verb === "-") for (const name of this.alive) buttons.push([verb + name, `${verbs[verb]} ${name}`, () => this.add("-" + name)]);
        else for (const name of this.alive) buttons.push([verb + name, `${verbs[verb]} 3: ${name}`, () => this.add(`!${name}=3`)]);
      }
      const focused = this.acts.contains(document.activeElement) ? document.activeElement.dataset.verb : "";
      this.acts.replaceChildren(...buttons.map(([verb, words, act]) => {
        const button = this.button(words, act);
        button.dataset.verb = verb;
        if (this.choices?.[verb.slice(1)]) button.setAttribute("aria-label", `${words}: ${this.choices[verb.slice(1)]}`);
        button.disabled = !this.about.prompt && !this.alive.length; // nothing is left to choose
        return button;
      }));
      const again = [...this.acts.children].find((button) => button.dataset.verb === focused);
      if (focused) (again || this.acts.firstElementChild).focus({ preventScroll: true });
    }

    // Offer to run what the reader has written.
    showOwn() {
      const names = this.ownModules.map((module) => module.split("/").pop());
      const checked = !!this.own.querySelector("input:checked");
      if (!names.length) return this.own.replaceChildren();
      const box = element("input", { type: "checkbox", onchange: () => this.run() });
      box.checked = checked;
      this.own.replaceChildren(element("label", { class: "kv-live-check" }, box, `Run my own ${names.join(" and ")}`));
    }

    // From an exercise: run what has just passed, or `trial`, sources by module.
    async useOwn(trial = {}) {
      this.trial = trial;
      if (this.first.isConnected) this.unfold();
      this.showOwn();
      const box = this.own.querySelector("input");
      if (box) box.checked = true;
      await this.run("fullest");
      (this.broken.hidden ? this.figure || this.box : this.broken).scrollIntoView({ block: "center" });
    }
  }

  // A setting from an address: one that the knob has, or its default.
  function allowed({ default: usual, choices, low, high }, value) {
    if (choices.length) return choices.includes(value) ? value : usual;
    return /^\d{1,6}$/.test(value) && value >= low && value <= high ? value : usual;
  }

  const begin = () => document.querySelectorAll(".kv-lab").forEach((box) => (box.lab = new Lab(box)));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
