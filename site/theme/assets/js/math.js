/* Typesets the formulas of a page that has some. */
document.querySelectorAll(".arithmatex").forEach(function (element) {
  renderMathInElement(element, {
    delimiters: [
      { left: "\\(", right: "\\)", display: false },
      { left: "\\[", right: "\\]", display: true },
    ],
    throwOnError: false,
  });
});
