/* Course machinery. The line with which another site shows a player: an inline frame of player.html. */
(function () {
  "use strict";
  const KV = window.KvPlayer;
  const SITE = new URL("../..", KV.base).href;
  const FOOT = 40; // pixels below the player, for the link back
  const WIDEST = 760;

  // file: the trace's address. A reader who has moved shows others the frame in which they are.
  function line({ figure, svg, tallest, trace, index, isFresh }, file) {
    const asked = new URLSearchParams({ show: file.slice(SITE.length).replace(".trace.js", "") });
    if (!isFresh) asked.set("step", index + 1);
    const frame = document.createElement("iframe");
    frame.src = `${SITE}player.html?${asked}`;
    frame.title = trace.title;
    frame.height = Math.ceil(figure.offsetHeight - svg.getBoundingClientRect().height + tallest) + FOOT;
    frame.style = `width:100%;max-width:${WIDEST}px;border:0`;
    return frame.outerHTML.replaceAll("%2F", "/");
  }

  KV.copyFrame = async function (player, file) {
    await navigator.clipboard.writeText(line(player, file));
    player.number.textContent = "Copied";
    setTimeout(() => player.render(), 2000);
  };
})();
