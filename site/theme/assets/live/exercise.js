// Course machinery. An exercise in the page: an editor with the lesson's starter, checked by the lesson's own tests.
(function () {
  "use strict";
  const { edit, engine, element, meter, obstacle, store, trouble } = window.KvLive;

  // "Task 2", "Tasks 2 and 3"
  function counted(word, numbers) {
    const last = numbers[numbers.length - 1];
    return numbers.length > 1 ? `${word}s ${numbers.slice(0, -1).join(", ")} and ${last}` : `${word} ${last}`;
  }

  class Exercise {
    constructor(box) {
      this.box = box;
      this.about = JSON.parse(box.dataset.about);
      this.key = this.about.path;
      this.hints = {};
      const kept = store.get(this.key) || {};
      this.source = kept.source || this.about.starter;
      this.done = kept.done || [];
      this.build(!!kept.source);
    }

    get file() {
      return this.about.path.split("/").pop();
    }

    get next() {
      return this.about.tasks.find((task) => !this.done.includes(task.number)) || this.about.tasks[0];
    }

    build(goesOn) {
      const reason = obstacle(this.about.sizes);
      const { tasks, sizes } = this.about;
      const which = counted("task", tasks.map((task) => task.number));
      const go = element("button", { type: "button", class: "kv-live-go", onclick: () => this.open(), disabled: !!reason }, goesOn ? `Go on with ${which}` : `Write ${which} here`);
      const price = reason || `Nothing to install: the lesson's own tests run in this page (${(Number(sizes.lab) + Number(sizes.check)).toFixed(1)} MB, once).`;
      const isFirst = this.box === document.querySelector(".kv-exercise"); // the others need not say it again
      this.first = element("p", { class: "kv-live-first" }, go, ...(isFirst ? [element("span", {}, price)] : []));
      this.box.replaceChildren(this.first);
    }

    open() {
      this.first.remove();
      this.box.append(this.panel());
      this.showTasks();
      this.editor.goTo(this.lineOf(this.next));
      engine.ask("prepare", {}).catch(() => {}); // while the reader types
    }

    // From a lab: show a task's place in the editor.
    openAt(number) {
      if (this.first.isConnected) this.open();
      this.editor.goTo(this.lineOf(this.about.tasks.find((task) => task.number === number)));
    }

    panel() {
      const button = (words, act, more) => element("button", { type: "button", onclick: act, ...more }, words);
      this.list = element("ol", { class: "kv-live-tasks" });
      const options = { label: `${this.file}: your code`, text: this.source, changed: () => this.save(), check: () => this.check() };
      this.editor = edit(options, (better) => (this.editor = better));
      this.say = element("div", { class: "kv-live-verdict", role: "status", tabindex: "-1" });
      this.checkButton = button("Check", () => this.check(), { class: "kv-live-go" });
      this.stopButton = button("Stop", () => engine.stop("stopped"), { hidden: true });
      const bar = element("div", { class: "kv-live-row" }, this.checkButton, this.stopButton,
        button("Hint", () => this.hint()), button("Reset", () => this.reset()), button(`Download ${this.file}`, () => this.download()));
      const keys = element("p", { class: "kv-live-keys" }, `Ctrl+Enter checks. Tab indents; Escape, then Tab leaves the editor. Your text stays in this browser; a downloaded file belongs into ${this.about.path.replace(/[^/]*$/, "")}.`);
      return element("div", { class: "kv-live-panel", role: "group", "aria-label": `Exercise: ${this.file}` }, element("strong", {}, this.about.path), this.list, this.editor.node, bar, this.say, meter(this.about.sizes, ["lab", "check"], (tell) => engine.watchers.add(tell)), keys);
    }

    // ---- the editor ----

    get text() {
      return this.editor ? this.editor.text : this.source;
    }

    set text(text) {
      this.editor.text = text;
      this.save();
    }

    save() {
      this.source = this.text;
      store.set(this.key, { source: this.source, done: this.done });
    }

    lineOf(task) {
      const name = task.symbol.split(".").pop();
      return this.text.split("\n").findIndex((line) => new RegExp(`^\\s*def ${name}\\(`).test(line)) + 1;
    }

    // ---- checking ----

    async check() {
      if (this.isBusy) return;
      this.isBusy = true;
      this.save();
      this.editor.mark(0);
      this.show("", engine.isReady ? "Checking …" : "Python is loading; the check follows …");
      this.checkButton.disabled = true;
      this.stopButton.hidden = false;
      try {
        await engine.ask("prepare", {});
        this.show("", "Checking …");
        const asked = { lesson: this.about.lesson, tasks: this.about.tasks.map((task) => task.number), source: this.source };
        this.judged(await engine.ask("check", asked));
      } catch (error) {
        const [words, ...again] = trouble(error, () => this.check());
        this.show("bad", words, ...again);
      }
      this.isBusy = false;
      this.checkButton.disabled = false;
      this.stopButton.hidden = true;
    }

    judged(found) {
      const last = found[found.length - 1];
      this.done = found.filter((one) => one.result.status === "done").map((one) => one.result.task);
      this.save();
      this.showTasks();
      document.dispatchEvent(new CustomEvent("kv-passed", { detail: { lesson: this.about.lesson, tasks: this.done } })); // progress.js keeps it
      const isDone = this.done.length === this.about.tasks.length;
      store.set("passed:" + this.about.module, isDone ? this.source : null);
      if (isDone) return this.green(found.flatMap((one) => one.not_checked));
      const before = this.done.length ? [element("p", {}, `${counted("Task", this.done)} ${this.done.length > 1 ? "pass" : "passes"}.`)] : [];
      const { headline, where, lines } = last.advice;
      const open = last.result.status === "not_written";
      this.editor.mark(open ? 0 : this.lineIn(where));
      this.show(open ? "open" : "bad", headline, ...before, ...this.place(where), element("pre", { tabindex: "0" }, element("code", {}, lines.join("\n"))),
        ...(open ? [] : this.inLab("Watch it in the lab", { [this.about.module]: this.source })));
    }

    // `work/l2/allocator.py:58:  code` as a button that goes there.
    place(where) {
      const line = this.lineIn(where);
      if (!line) return where ? [element("p", {}, where)] : [];
      const rest = where.replace(/^.*?:\d+:?\s*/, "");
      return [element("p", {}, element("button", { type: "button", onclick: () => this.editor.goTo(line) }, `Line ${line}`), " ", rest)];
    }

    // The line of this file that a verdict names; 0 if it names another file.
    lineIn(where) {
      const found = /:(\d+)/.exec(where);
      return found && where.startsWith(this.about.path) ? Number(found[1]) : 0;
    }

    // notChecked: the tests that a page cannot run, each with the reason.
    green(notChecked) {
      const numbers = this.about.tasks.map((task) => task.number);
      const words = `${counted("Task", numbers)} ${numbers.length > 1 ? "are" : "is"} done: the lesson's tests pass.`;
      const left = [...new Set(notChecked)].map((line) => element("p", {}, `Not checked here: ${line}.`));
      this.show("good", words, ...left, ...this.inLab("Run the lab on your code"));
    }

    // A button that runs the page's lab on the reader's code, if the lab uses this module.
    inLab(words, trial) {
      const box = document.querySelector(".kv-lab");
      if (!box || !box.lab.about.modules.includes(this.about.module)) return [];
      return [element("p", {}, element("button", { type: "button", onclick: () => box.lab.useOwn(trial) }, words))];
    }

    show(kind, headline, ...more) {
      this.say.className = "kv-live-verdict " + kind;
      this.say.replaceChildren(element("p", {}, element("strong", {}, headline)), ...more);
    }

    showTasks() {
      this.list.replaceChildren(...this.about.tasks.map((task) => {
        const isDone = this.done.includes(task.number);
        const go = element("button", { type: "button", onclick: () => this.editor.goTo(this.lineOf(task)) }, `${task.number} ${task.title}`);
        return element("li", { class: isDone ? "done" : "" }, go, element("span", {}, isDone ? "done" : "to do"));
      }));
    }

    // ---- the rest ----

    hint() {
      const task = this.next;
      const shown = (this.hints[task.number] = Math.min((this.hints[task.number] || 0) + 1, task.hints.length));
      this.show("open", `Task ${task.number}, hint ${shown} of ${task.hints.length}`, ...task.hints.slice(0, shown).map((hint) => element("p", {}, hint)));
    }

    reset() {
      if (this.text !== this.about.starter && !window.confirm(`Throw your ${this.file} away?`)) return;
      store.set("passed:" + this.about.module, null);
      [this.done, this.text] = [[], this.about.starter];
      store.set(this.key, null);
      this.showTasks();
      this.say.replaceChildren();
    }

    download() {
      const link = element("a", { href: URL.createObjectURL(new Blob([this.source], { type: "text/x-python" })), download: this.file });
      link.click();
      URL.revokeObjectURL(link.href);
    }
  }

  const begin = () => document.querySelectorAll(".kv-exercise").forEach((box) => (box.exercise = new Exercise(box)));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
