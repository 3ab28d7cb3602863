/* Typesets the formulas of a page that has some; scripts/website/formulas.py has put their source aside. */
document.querySelectorAll(".arithmatex[data-tex]").forEach(function (element) {
  katex.render(element.dataset.tex, element, { displayMode: "display" in element.dataset, throwOnError: false });
});
