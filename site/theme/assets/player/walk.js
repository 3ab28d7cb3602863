// Course machinery. A walk through the engine: a station of the picture opens onto its lesson's player, in a dialog.
//
// The links below the picture lead to the lessons where scripts do not run. They stand in the order of the trace's
// stations, which name the traces to play.
(function () {
  "use strict";
  const KV = window.KvPlayer;
  const { element } = KV;
  const links = [...document.querySelectorAll(".kv-stations a")];

  const close = element("button", { type: "button", "aria-label": "Back to the engine" }, "✕");
  const title = element("h2", { id: "kv-inside-title" });
  const lesson = element("a", {});
  const room = element("div", {});
  const dialog = element("dialog", { class: "kv-inside", "aria-labelledby": "kv-inside-title" }, element("header", {}, title, lesson, close), room);
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside it
  dialog.addEventListener("close", () => room.replaceChildren()); // what played in it stops

  const folder = (link) => link.href.replace(/[^/]*$/, ""); // of the lesson, on a server and on a disk

  async function enter(station, link) {
    const file = station.trace.split("/").pop();
    await KV.load(folder(link) + file);
    const trace = Object.values(window.KV_TRACES).find((one) => one.file === station.trace);
    if (!KV.views[trace.kind]) await KV.load(`${KV.base}views/${trace.kind}.js`);
    title.textContent = station.title;
    lesson.textContent = `Open lesson ${station.lesson}`;
    lesson.href = link.href;
    const place = element("a", { href: folder(link) + file });
    room.replaceChildren(element("p", {}, place));
    dialog.showModal();
    new KV.Player(place, trace);
  }

  function start(figure) {
    const { stations } = figure.player.trace.scene;
    document.body.append(dialog);
    const open = (event, i) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return; // a tab of its own
      event.preventDefault();
      enter(stations[i], links[i]).catch(() => location.assign(links[i].href));
    };
    links.forEach((link, i) => link.addEventListener("click", (event) => open(event, i)));
    figure.addEventListener("click", (event) => {
      const door = event.target.closest(".door");
      if (door) open(event, stations.findIndex(({ name }) => door.classList.contains("at-" + name)));
    });
    const mark = () => {
      const { at } = figure.player.trace.frames[figure.player.index];
      links.forEach((link, i) => (stations[i].name === at ? link.setAttribute("aria-current", "step") : link.removeAttribute("aria-current")));
    };
    new MutationObserver(mark).observe(figure, { attributeFilter: ["data-index"] });
    mark();
  }

  const find = () => document.querySelector('.kv-figure[data-trace="engine"]');
  const wait = new MutationObserver(() => find() && (wait.disconnect(), start(find())));
  if (find()) start(find());
  else wait.observe(document.querySelector(".md-content"), { childList: true, subtree: true });
})();
