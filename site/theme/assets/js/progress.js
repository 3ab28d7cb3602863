/* What a reader has done and guessed, kept in this browser and sent nowhere. Without this script a page lacks nothing. */
(function () {
  "use strict";
  const KEY = "kv-course.progress";
  const EMPTY = { done: {}, tasks: {}, guesses: {}, last: "" };
  const lessonOf = (address) => (/\b(l\d+_\w+)\//.exec(address) || [])[1];
  const numberOf = (lesson) => Number(/\d+/.exec(lesson)[0]);
  const page = document.querySelector("[data-page]");
  const here = page && page.classList.contains("kv-lesson") ? lessonOf(page.dataset.page) : undefined;
  const stops = () => [...document.querySelectorAll(".kv-map li a")]; // the core first

  function read() {
    try {
      return Object.assign({}, EMPTY, JSON.parse(localStorage.getItem(KEY)));
    } catch (error) {
      return { ...EMPTY };
    }
  }

  function change(act) {
    const progress = structuredClone(read());
    act(progress);
    try {
      localStorage.setItem(KEY, JSON.stringify(progress));
    } catch (error) {
      // a browser may refuse; then nothing is kept
    }
    show(progress);
  }

  function element(tag, attrs, ...children) {
    const node = document.createElement(tag);
    for (const name in attrs) node.setAttribute(name, attrs[name]);
    node.append(...children);
    return node;
  }

  // ---- what is done: in the menu, on the front page's map, on the lesson's page ----

  function tick(link, progress) {
    const lesson = lessonOf(link.href);
    const old = link.querySelector(".kv-tick");
    if (old) old.remove();
    const tasks = (progress.tasks[lesson] || []).length;
    if (progress.done[lesson]) link.append(element("span", { class: "kv-tick", role: "img", "aria-label": "done" }, "✓"));
    else if (tasks) link.append(element("span", { class: "kv-tick" }, tasks === 1 ? "1 task" : `${tasks} tasks`));
  }

  function show(progress) {
    const menu = document.querySelectorAll(".md-nav--primary > .md-nav__list a.md-nav__link:not([href*='#'])");
    [...menu, ...stops()].filter((link) => lessonOf(link.href)).forEach((link) => tick(link, progress));
    const resume = document.querySelector("[data-resume]");
    if (resume) resumeAt(resume, progress);
    const done = document.querySelector(".kv-done button");
    if (done && here) {
      const is = Boolean(progress.done[here]);
      done.setAttribute("aria-pressed", is);
      done.textContent = is ? `Lesson ${numberOf(here)} is done ✓` : `Mark lesson ${numberOf(here)} as done`;
    }
    const sum = document.querySelector(".kv-kept__sum");
    if (!sum) return;
    const hasSome = [progress.done, progress.tasks, progress.guesses].some((kept) => Object.keys(kept).length);
    sum.textContent = hasSome ? `${Object.keys(progress.done).length} of ${stops().length} lessons done` : "";
    document.querySelector(".kv-kept button").hidden = !hasSome;
  }

  // The lesson last seen, if it is not done; otherwise the first one after it that is not.
  function resumeAt(button, progress) {
    const links = stops();
    button.dataset.first ||= JSON.stringify([button.href, button.textContent]);
    [button.href, button.textContent] = JSON.parse(button.dataset.first);
    const from = links.findIndex((link) => lessonOf(link.href) === progress.last);
    const next = links.slice(Math.max(0, from)).find((link) => !progress.done[lessonOf(link.href)]);
    if (!next || (from < 0 && !Object.keys(progress.done).length)) return;
    button.href = next.href;
    button.textContent = `Resume lesson ${numberOf(lessonOf(next.href))}`;
  }

  // ---- tasks that pass: in an exercise of the page, or in the course's own record, work/progress.json ----

  // A check of some tasks is not the lesson's whole check, so it never marks the lesson as done. Once passed, always ticked.
  function addTasks(progress, lesson, tasks) {
    const all = new Set([...(progress.tasks[lesson] || []), ...(tasks || [])]);
    if (all.size) progress.tasks[lesson] = [...all].sort((a, b) => a - b);
  }

  document.addEventListener("kv-passed", ({ detail }) => change((progress) => addTasks(progress, detail.lesson, detail.tasks)));

  function take(text) {
    const { lessons } = JSON.parse(text);
    if (typeof lessons !== "object") throw new TypeError("no lessons");
    change((progress) => {
      for (const lesson in lessons) {
        const { passed, first_passed: first, tasks_done: tasks } = lessons[lesson];
        if (passed || first) progress.done[lesson] = passed || first;
        addTasks(progress, lesson, tasks);
      }
    });
  }

  function keeper(map) {
    const file = element("input", { type: "file", accept: ".json,application/json", id: "kv-import" });
    const said = element("span", { role: "status" });
    file.addEventListener("change", async () => {
      try {
        take(await file.files[0].text());
        said.textContent = "Imported.";
      } catch (error) {
        said.textContent = "This file is not a progress.json of the course.";
      }
    });
    const forget = element("button", { type: "button" }, "Forget");
    forget.addEventListener("click", () => change((progress) => Object.assign(progress, EMPTY)));
    const label = element("label", { for: "kv-import" }, "Import the terminal's progress.json");
    map.append(element("p", { class: "kv-kept" }, element("span", { class: "kv-kept__sum" }), file, label, forget, said));
  }

  // ---- guess first ----

  function optionsOf(data, give) {
    return data.options.map((option, i) => {
      const button = element("button", { type: "button", "data-option": i, "aria-pressed": false }, option);
      button.addEventListener("click", () => give(i));
      return button;
    });
  }

  function numberIn(data, form, give) {
    const input = element("input", { type: "number", min: 0, step: "any", required: "", id: "kv-guessed" });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      give(Number(input.value));
    });
    return [element("label", { for: "kv-guessed" }, `Your guess, in ${data.unit}`), input, element("button", {}, "Guess")];
  }

  function guessing(data, details) {
    const form = element("form", { class: "kv-guess" });
    const verdict = element("p", { role: "status", class: "kv-verdict" });
    const words = (guess) => (data.options ? data.options[guess] : `${guess.toLocaleString("en")} ${data.unit}`);
    const answer = data.options ? data.right : data.number;
    function tell(guess) {
      const right = data.options ? guess === answer : Math.abs(guess - answer) <= answer / 10;
      verdict.dataset.right = right;
      verdict.textContent = `You guessed: ${words(guess)}. ${right ? "Right." : `The answer: ${words(answer)}.`}`;
      form.querySelectorAll("[data-option]").forEach((button, i) => button.setAttribute("aria-pressed", i === guess));
    }
    function give(guess) {
      change((progress) => (progress.guesses[here] = guess));
      tell(guess);
      details.open = true;
    }
    form.append(...(data.options ? optionsOf(data, give) : numberIn(data, form, give)));
    details.before(element("div", { class: "kv-guesses", role: "group", "aria-label": "Your guess" }, form, verdict));
    const known = read().guesses[here];
    if (known !== undefined) tell(known);
  }

  function answerOf(heading) {
    let next = heading && heading.nextElementSibling;
    while (next && !/^(DETAILS|H2)$/.test(next.tagName)) next = next.nextElementSibling;
    return next && next.tagName === "DETAILS" ? next : null;
  }

  const map = document.querySelector(".lesson-map");
  if (map) keeper(map);
  if (!here) return show(read());
  const guess = document.getElementById("kv-guess");
  const details = answerOf(document.getElementById("guess-first"));
  if (guess && details) guessing(JSON.parse(guess.textContent), details);
  const done = document.querySelector(".kv-done");
  done.hidden = false;
  done.querySelector("button").addEventListener("click", () =>
    change((progress) => {
      if (progress.done[here]) delete progress.done[here];
      else progress.done[here] = new Date().toISOString().slice(0, 10);
    }),
  );
  change((progress) => (progress.last = here));
})();
