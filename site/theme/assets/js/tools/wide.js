/* For tools whose picture takes the width of its page: how wide that is, so that words in it keep their size on a phone. */
window.KvWide = function () {
  "use strict";
  const page = document.querySelector(".md-content__inner");
  return Math.round(Math.max(280, Math.min(720, (page ? page.clientWidth : 720) - 48)));
};
