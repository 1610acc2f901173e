// Keeps an open page current: the server sends its <main> each time that it has changed. Without this script, pages and
// forms work, too.
"use strict";

const main = document.getElementById("main");
const live = document.getElementById("live");
const theme = document.getElementById("theme");
let source = null;

function show(state, text) {
  live.dataset.state = state;
  live.textContent = text;
}

function inReadersZone(root) {
  // The date of today and the year go without saying; each time has its full text in UTC as a title.
  const today = new Date();
  const time = { hour: "numeric", minute: "2-digit", second: "2-digit" };
  const day = { ...time, month: "short", day: "numeric" };
  for (const one of root.querySelectorAll("time")) {
    const at = new Date(one.dateTime);
    const thisYear = at.getFullYear() === today.getFullYear() ? day : { ...day, year: "numeric" };
    const format = at.toDateString() === today.toDateString() ? time : thisYear;
    one.textContent = new Intl.DateTimeFormat(undefined, format).format(at);
  }
}

function isInUse() {
  // What a reader types, has opened or has marked must not disappear.
  const active = document.activeElement;
  const types = active && main.contains(active) && /^(INPUT|TEXTAREA|SELECT)$/.test(active.tagName);
  const marks = !document.getSelection().isCollapsed && main.contains(document.getSelection().anchorNode);
  return types || marks || [...main.querySelectorAll("input, textarea, select")].some(isChanged);
}

function isChanged(field) {
  if (field.type === "checkbox") return field.checked !== field.defaultChecked;
  if (field.tagName !== "SELECT") return field.type !== "hidden" && field.value !== field.defaultValue;
  return field.selectedIndex !== Math.max(0, [...field.options].findIndex((one) => one.defaultSelected));
}

function keyOf(details, at) {
  return details.dataset.key ?? at;
}

function replace(html) {
  if (isInUse()) { show("held", "held while you type"); return; }
  show("on", "live");
  const opened = new Map([...main.querySelectorAll("details")].map((one, at) => [keyOf(one, at), one.open]));
  const focused = [...main.querySelectorAll("a, button, summary, [tabindex]")].indexOf(document.activeElement);
  main.innerHTML = html;
  main.querySelectorAll("details").forEach((one, at) => { one.open = opened.get(keyOf(one, at)) ?? one.open; });
  if (focused >= 0) main.querySelectorAll("a, button, summary, [tabindex]")[focused]?.focus({ preventScroll: true });
  inReadersZone(main);
}

function start() {
  if (source || document.hidden) return;
  source = new EventSource(location.href);
  source.onopen = () => show("on", "live");
  source.onmessage = (event) => replace(event.data);
  source.onerror = () => show("off", "not live");
}

function stop() {
  source?.close();
  source = null;
  show("off", "not live");
}

inReadersZone(document);
if (live) {
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  start();
}
document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});
if (theme) {
  const root = document.documentElement;
  const stored = localStorage.getItem("bulltask-theme");
  if (stored) root.dataset.theme = stored;
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem("bulltask-theme", root.dataset.theme);
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
    const search = document.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  }
});
