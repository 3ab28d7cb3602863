/* The front page: the race in recorded time, a first task, and a command to copy. All are complete without this script. */
(function () {
  "use strict";

  // ---- the command ----
  const box = document.querySelector(".kv-hero__commands");
  const copy = box.querySelector("button");
  copy.hidden = !navigator.clipboard;
  copy.addEventListener("click", async function () {
    await navigator.clipboard.writeText(box.querySelector("code").textContent);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  });

  // ---- the model answers in the first screens: its box, still empty, goes there ----
  document.querySelector(".kv-hero__model").append(...document.querySelectorAll(".kv-model"));

  // ---- from the picture of the chats to its lab, which starts; on a phone to a tree that grows without a download ----
  const own = document.querySelector(".kv-chats [data-own]");
  own.hidden = false;
  own.addEventListener("click", () => {
    if (innerWidth < 720) return location.assign(own.dataset.own);
    const lab = document.querySelector(".kv-lab");
    const go = lab.querySelector(".kv-live-first .kv-live-go");
    if (go) go.click();
    lab.closest(".try").scrollIntoView();
  });

  // ---- on a phone the sections below the map open when their heading is tapped, or an address names it ----
  const FOLDED = "#what-each-lesson-bought, #what-you-need, #a-check-turns-green, #more-pages";

  function fold(heading) {
    const parts = [];
    for (let next = heading.nextElementSibling; next && !next.matches("h2, .kv-updated, :has(> div > h2)"); next = next.nextElementSibling) parts.push(next);
    const room = heading.closest(".halves");
    if (room) parts.push(...[...room.children].filter((column) => !column.querySelector("h2"))); // its picture
    const button = document.createElement("button");
    button.type = "button";
    button.className = "kv-fold";
    button.append(heading.firstChild);
    heading.prepend(button);
    const open = (is) => {
      button.setAttribute("aria-expanded", is);
      parts.forEach((part) => part.classList.toggle("kv-folded", !is));
    };
    const named = () => location.hash === "#" + heading.id && open(true);
    button.addEventListener("click", () => open(button.getAttribute("aria-expanded") !== "true"));
    window.addEventListener("hashchange", named);
    open(false);
    named();
  }

  if (matchMedia("(max-width: 44.9844em)").matches) document.querySelectorAll(FOLDED).forEach(fold);

  // ---- lesson 0's first task: the reader's line in the real module, judged by the lesson's tests in this page ----
  const touch = document.querySelector(".kv-touch");
  const said = touch.querySelector("output");

  function say(kind, ...words) {
    touch.classList.toggle("right", kind === "right");
    touch.classList.toggle("wrong", kind === "wrong");
    said.replaceChildren(...words);
  }

  // "Your code: 1", "Expected: 2", or what Python cannot read; what follows is the test's own code.
  function values(lines) {
    const ends = lines.findIndex((line) => /^(\s|What the test did)/.test(line));
    const code = document.createElement("code");
    code.textContent = lines.slice(0, ends < 0 ? 0 : ends).join("\n");
    return code.textContent ? [code] : [];
  }

  // The lesson's page keeps what its exercise holds; here only a passed task is told, for the reader's progress.
  function judged({ result, advice }) {
    if (result.status !== "done") return say("wrong", advice.headline, ...values(advice.lines));
    const { lesson, task } = touch.dataset;
    document.dispatchEvent(new CustomEvent("kv-passed", { detail: { lesson, tasks: [Number(task)] } }));
    const next = document.createElement("a");
    next.href = touch.dataset.next;
    next.textContent = "Write the rest of the loop";
    say("right", `Task ${task} is done: the lesson's tests pass. `, next);
  }

  function setUpTouch() {
    const { engine, meter, obstacle, trouble } = window.KvLive;
    const { sizes } = JSON.parse(document.querySelector(".kv-lab").dataset.about);
    const button = touch.querySelector("button");
    const reason = obstacle(sizes);
    if (reason) return say("", reason);
    // it tells of what this box waits for, not of what the model below loads
    touch.append(meter(sizes, ["lab", "check"], (tell) => engine.watchers.add((bytes) => tell(button.disabled ? bytes : null))));
    button.disabled = false;

    async function check() {
      const expression = touch.elements.answer.value.trim().replace(/^return\b/, "").trim();
      if (button.disabled || !expression) return touch.elements.answer.focus();
      button.disabled = true;
      say("", engine.isReady ? "Checking …" : "Python is loading; the check follows …");
      try {
        await engine.ask("prepare", {});
        say("", "Checking …");
        const { lesson, task } = touch.dataset;
        const [found] = await engine.ask("check", { lesson, tasks: [Number(task)], expression });
        judged(found);
      } catch (error) {
        say("wrong", ...trouble(error, check));
      }
      button.disabled = false;
    }

    touch.addEventListener("submit", (event) => {
      event.preventDefault();
      check();
    });
  }

  document.addEventListener("DOMContentLoaded", setUpTouch); // after engine.js, which is deferred, too

  // ---- the race ----
  const figure = document.querySelector(".kv-race");
  const button = figure.querySelector("button");
  const status = figure.querySelector("[role=status]");
  const when = figure.querySelector("figcaption span");
  const first = { button: button.textContent, status: status.innerHTML, when: when.textContent };
  const HOLD = 3; // seconds that the end stays, before the picture at rest comes back
  let running = 0;

  class Lane {
    constructor(lane, wanted) {
      const row = figure.querySelector(`[data-lesson="${lane.lesson}"]`);
      this.lane = lane;
      this.row = row;
      this.wanted = wanted;
      this.squares = [...row.querySelectorAll(".kv-lane__track i")];
      this.clock = row.querySelector("output");
      this.first = this.clock.textContent;
      this.before = this.squares.map((square) => square.style.getPropertyValue("--full") || 1);
      this.begin();
    }
    rest() {
      this.squares.forEach((square, i) => square.style.setProperty("--full", this.before[i]));
      this.clock.textContent = this.first;
    }
    begin() {
      this.next = 0;
      this.at = 0; // thousandths of this lane's time
      this.got = this.wanted.map(() => 0);
      this.squares.forEach((square) => square.style.setProperty("--full", 0));
      this.row.classList.remove("done");
    }
    // Show everything that had come after so many seconds.
    go(seconds) {
      if (this.row.classList.contains("done")) return;
      const { came, seconds: all } = this.lane;
      const changed = new Set();
      while (this.next < came.length && this.at + came[this.next][0] <= (1000 * seconds) / all) {
        const [wait, request] = came[this.next++];
        this.at += wait;
        this.got[request]++;
        changed.add(request);
      }
      changed.forEach((i) => this.squares[i].style.setProperty("--full", this.got[i] / this.wanted[i]));
      this.clock.textContent = seconds.toFixed(1) + " s";
      if (seconds >= all) this.finish();
    }
    finish() {
      this.squares.forEach((square) => square.style.setProperty("--full", 1));
      this.clock.textContent = this.lane.seconds.toFixed(1) + " s";
      this.row.classList.add("done");
    }
  }

  function load() {
    return new Promise((done, failed) => {
      if (window.KV_RACE) return done(window.KV_RACE);
      const script = document.createElement("script");
      script.src = figure.dataset.race;
      script.addEventListener("load", () => done(window.KV_RACE));
      script.addEventListener("error", failed);
      document.head.append(script);
    });
  }

  function stop(lanes) {
    cancelAnimationFrame(running);
    running = 0;
    lanes.forEach((lane) => (lane.finish(), lane.rest()));
    figure.classList.remove("running");
    button.textContent = first.button;
    when.textContent = first.when;
    status.innerHTML = first.status;
  }

  async function race() {
    const { lanes: recorded, wanted } = await load();
    const lanes = recorded.map((lane) => new Lane(lane, wanted));
    const last = Math.max(...recorded.map((lane) => lane.seconds));
    const start = performance.now();
    figure.classList.add("running");
    button.textContent = "Stop";
    when.textContent = when.dataset.running;
    const step = function () {
      const seconds = ((performance.now() - start) / 1000) * (window.KV_RACE.pace || 1);
      lanes.forEach((lane) => lane.go(seconds));
      if (seconds < last + HOLD) running = requestAnimationFrame(step);
      else stop(lanes);
    };
    running = requestAnimationFrame(step);
    stop.now = () => stop(lanes);
  }

  const begin = () => race().catch(() => (button.hidden = true));
  button.hidden = false;
  button.addEventListener("click", () => (running ? stop.now() : begin()));
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const seen = new IntersectionObserver(([entry]) => {
    if (!entry.isIntersecting) return;
    seen.disconnect();
    setTimeout(() => running || begin(), 1500); // the picture at rest is read first
  }, { threshold: 0.6 });
  seen.observe(figure);
})();
