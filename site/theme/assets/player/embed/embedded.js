/* Course machinery. player.html in another site's frame: which player it shows is in its address, as frame.js wrote it. */
(function () {
  "use strict";
  const asked = new URLSearchParams(location.search);
  const [, folder, name] = /^([a-z][\w-]*)\/([a-z][\w-]*)$/.exec(asked.get("show") || "") || [];
  const isDark = matchMedia("(prefers-color-scheme: dark)");

  function element(tag, attributes, ...children) {
    const node = Object.assign(document.createElement(tag), attributes);
    node.append(...children);
    return node;
  }

  function colour() {
    document.body.dataset.mdColorScheme = isDark.matches ? "slate" : "default";
  }

  function refuse() {
    const known = element("a", { href: "./", target: "_top" }, "the course's pages");
    document.body.replaceChildren(element("p", {}, `There is no player “${asked.get("show") || ""}”. Copy the line to embed one from `, known, "."));
  }

  // Until the player is there, and if it cannot be, the picture that links to it in a lesson.
  function show() {
    const picture = element("img", { src: `${folder}/${name}.svg`, alt: "", onerror: refuse });
    const link = element("a", { className: "kv-player", href: picture.src }, picture);
    link.dataset.file = `${name}.trace.js`;
    if (Number(asked.get("step")) > 0) link.dataset.start = Math.floor(asked.get("step")) - 1;
    const back = element("a", { href: `${folder}/`, target: "_top" }, "Recorded from the code of the KV course: the page");
    document.body.append(link, element("p", {}, back));
  }

  colour();
  isDark.addEventListener("change", colour);
  if (folder) show();
  else refuse();
})();
