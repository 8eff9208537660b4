"use strict";
// Puts in what the server sends, and counts down to the ends of phases. Everything else is in the page already.
(() => {
  const body = document.body;
  const main = document.querySelector("main");
  const live = document.getElementById("live");
  let last = body.dataset.last;
  let ahead = Number(body.dataset.now) * 1000 - Date.now(); // of this clock, in milliseconds
  let waiting = 0;

  function say(text, state) {
    if (live.textContent !== text) live.textContent = text;
    live.className = state;
  }

  function spell(seconds) {
    const s = Math.ceil(seconds);
    if (s < 60) return s + " s";
    const two = (n) => String(n).padStart(2, "0");
    const m = Math.floor(s / 60);
    return m < 60 ? m + " min " + two(s % 60) + " s" : Math.floor(m / 60) + " h " + two(m % 60) + " min";
  }

  function count() {
    for (const end of document.querySelectorAll("[data-ends]")) {
      const left = Number(end.dataset.ends) - (Date.now() + ahead) / 1000;
      end.textContent = left > 0 ? spell(left) + " left" : "time is up";
    }
  }

  // The reader's place in a part that is drawn anew: how far it is scrolled, and what has the focus.
  function place(part) {
    const moved = [...part.querySelectorAll("[id]")].map((e) => [e.id, e.scrollTop, e.scrollLeft]);
    const focus = part.contains(document.activeElement) ? document.activeElement.id : "";
    return () => {
      for (const [id, top, left] of moved) document.getElementById(id)?.scrollTo(left, top);
      if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
    };
  }

  function show(news) {
    for (const [id, html] of Object.entries(news.parts)) {
      const box = document.createElement("template");
      box.innerHTML = html; // the server has escaped what others wrote
      const fresh = box.content.firstElementChild;
      const old = document.getElementById(id);
      if (old) {
        const back = place(old);
        old.replaceWith(fresh);
        back();
      } else main.append(fresh);
    }
    const now = [...main.children];
    for (const part of now) if (!news.order.includes(part.id)) part.remove();
    if ([...main.children].some((part, i) => part.id !== news.order[i]))
      for (const id of news.order) main.append(document.getElementById(id));
    count();
  }

  function connect() {
    const query = new URLSearchParams({ page: body.dataset.page, last });
    const source = new EventSource("/events?" + query);
    source.onopen = () => say("live", "on");
    source.onmessage = (event) => {
      const news = JSON.parse(event.data);
      if (news.build !== body.dataset.build) return location.reload();
      last = event.lastEventId;
      ahead = news.now * 1000 - Date.now();
      show(news);
    };
    source.onerror = () => {
      say("no connection; trying again", "off");
      if (source.readyState !== EventSource.CLOSED || waiting) return; // else the browser tries again itself
      waiting = setTimeout(() => {
        waiting = 0;
        connect();
      }, 2000);
    };
  }

  count();
  setInterval(count, 1000);
  connect();
})();
