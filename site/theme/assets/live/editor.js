// Course machinery. The editor of an exercise: a text area at once, and CodeMirror in its place as soon as it is there.
//
// Both have `text`, the cursor's `line`, `goTo(line)` and `mark(line)`, which marks the line that failed until the text
// changes. CodeMirror is loaded with an exercise only; where it does not arrive, the text area stays.
(function () {
  "use strict";
  const CODEMIRROR = document.currentScript.src.replace(/live\/[^/]*$/, "vendor/codemirror/codemirror.js");
  const { element } = window.KvLive;
  const INDENT = "    ";

  class Plain {
    constructor({ label, text, changed, check }) {
      Object.assign(this, { changed, check });
      this.node = element("textarea", { "aria-label": label, rows: "22", spellcheck: "false", autocapitalize: "off", autocomplete: "off" });
      this.node.value = text;
      this.node.addEventListener("input", () => changed());
      this.node.addEventListener("keydown", (event) => this.press(event));
    }

    get text() {
      return this.node.value;
    }

    set text(text) {
      this.node.value = text;
    }

    get line() {
      return this.node.value.slice(0, this.node.selectionStart).split("\n").length;
    }

    goTo(line) {
      const from = this.text.split("\n").slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
      this.node.focus({ preventScroll: true });
      this.node.setSelectionRange(from, from);
      this.node.scrollTop = Math.max(0, line - 3) * parseFloat(getComputedStyle(this.node).lineHeight);
    }

    mark() {} // a text area cannot

    press(event) {
      event.stopPropagation();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.check();
      } else if (event.key === "Escape") this.leaving = true;
      else if (event.key === "Tab" && !this.leaving && !event.shiftKey) {
        event.preventDefault();
        this.insert(INDENT);
      } else if (event.key === "Enter") {
        const before = this.text.slice(0, this.node.selectionStart);
        const line = before.slice(before.lastIndexOf("\n") + 1);
        event.preventDefault();
        this.insert("\n" + /^ */.exec(line)[0] + (/:\s*$/.test(line) ? INDENT : ""));
      } else if (event.key !== "Tab") this.leaving = false;
    }

    insert(text) {
      this.node.setRangeText(text, this.node.selectionStart, this.node.selectionEnd, "end");
      this.changed();
    }
  }

  class Rich {
    // code: CodeMirror's module.
    constructor(code, options) {
      this.code = code;
      this.failed = code.StateEffect.define();
      this.node = element("div", { class: "kv-live-code" });
      this.view = new code.EditorView({ doc: options.text, extensions: this.extensions(options), parent: this.node });
      this.node.addEventListener("keydown", (event) => event.stopPropagation()); // a page's own keys are not for an editor
    }

    extensions({ label, changed, check }) {
      const { EditorView: View, keymap, ...code } = this.code;
      const checking = { key: "Mod-Enter", run: () => (check(), true) };
      return [
        code.lineNumbers(), View.lineWrapping, code.history(), code.drawSelection(), code.highlightActiveLine(),
        code.bracketMatching(), code.indentOnInput(), code.indentUnit.of(INDENT), code.EditorState.tabSize.of(4),
        code.pythonLanguage, code.syntaxHighlighting(code.classHighlighter), this.marks(),
        keymap.of([checking, code.indentWithTab, ...code.defaultKeymap, ...code.historyKeymap]),
        View.contentAttributes.of({ "aria-label": label, tabindex: "0", autocapitalize: "off", spellcheck: "false" }),
        View.updateListener.of((update) => update.docChanged && changed()),
      ];
    }

    // The line that failed, if one is marked.
    marks() {
      const { Decoration, EditorView: View, StateField } = this.code;
      const line = Decoration.line({ class: "kv-live-failed" });
      return StateField.define({
        create: () => Decoration.none,
        update: (marked, change) => {
          const told = change.effects.find((effect) => effect.is(this.failed));
          if (told) return told.value ? Decoration.set([line.range(change.state.doc.line(told.value).from)]) : Decoration.none;
          return change.docChanged ? Decoration.none : marked;
        },
        provide: (field) => View.decorations.from(field),
      });
    }

    get text() {
      return this.view.state.doc.toString();
    }

    set text(insert) {
      this.view.dispatch({ changes: { from: 0, to: this.view.state.doc.length, insert } });
    }

    get line() {
      const { doc, selection } = this.view.state;
      return doc.lineAt(selection.main.head).number;
    }

    within(line) {
      return Math.min(Math.max(1, line), this.view.state.doc.lines);
    }

    goTo(line) {
      const { from } = this.view.state.doc.line(this.within(line));
      this.view.contentDOM.focus({ preventScroll: true });
      this.view.dispatch({ selection: { anchor: from }, effects: this.code.EditorView.scrollIntoView(from, { y: "center", x: "end" }) });
    }

    mark(line) {
      this.view.dispatch({ effects: this.failed.of(line && this.within(line)) });
    }
  }

  // options: label, text, changed(), check(). ready: called with the editor that takes the first one's place.
  window.KvLive.edit = function (options, ready) {
    const plain = new Plain(options);
    import(CODEMIRROR).then((code) => {
      const rich = new Rich(code, { ...options, text: plain.text });
      const [line, hadFocus] = [plain.line, document.activeElement === plain.node];
      plain.node.replaceWith(rich.node);
      ready(rich);
      if (hadFocus) rich.goTo(line);
    }).catch(() => {}); // the text area stays
    return plain;
  };
})();
