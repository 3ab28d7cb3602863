// Course machinery. What an exercise's editor needs of CodeMirror; scripts/website/vendor.py bundles it with esbuild.
export { EditorState, StateEffect, StateField } from "@codemirror/state";
export { Decoration, EditorView, drawSelection, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";
export { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
export { bracketMatching, indentOnInput, indentUnit, syntaxHighlighting } from "@codemirror/language";
export { pythonLanguage } from "@codemirror/lang-python";
export { classHighlighter } from "@lezer/highlight";
