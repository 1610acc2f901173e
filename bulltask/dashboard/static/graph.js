// Makes the graph of a workflow larger and smaller, and moves it with the pointer. Without this script, it scrolls.
"use strict";

let scale = null;  // null: as large as fits, but readable
const MIN = 0.1, MAX = 2, READABLE = 0.75;

function parts() {
  const pan = document.querySelector(".pan");
  const svg = pan && pan.querySelector("svg.graph");
  return svg ? { pan, svg, box: svg.viewBox.baseVal } : null;
}

function fitting({ pan, box }) {
  return Math.min(1, pan.clientWidth / box.width, (window.innerHeight * 0.75) / box.height);
}

function zoom(to, x, y) {
  // Keep the point at x, y of the visible part where it is.
  const found = parts();
  if (!found) return;
  const { pan, svg, box } = found;
  const before = svg.width.baseVal.value / box.width;
  scale = Math.min(MAX, Math.max(Math.min(MIN, fitting(found)), to));
  const left = ((pan.scrollLeft + x) / before) * scale - x;
  const top = ((pan.scrollTop + y) / before) * scale - y;
  svg.setAttribute("width", box.width * scale);
  svg.setAttribute("height", box.height * scale);
  pan.scrollTo(left, top);
}

function middle(pan) {
  return [pan.clientWidth / 2, pan.clientHeight / 2];
}

function toMarked({ pan, svg }) {
  const marked = svg.querySelector("[aria-current]");
  if (!marked) return;
  const at = marked.getBoundingClientRect(), view = pan.getBoundingClientRect();
  pan.scrollBy(at.left - view.left - (view.width - at.width) / 2, at.top - view.top - (view.height - at.height) / 2);
}

let place = [0, 0];

function appear() {
  const found = parts();
  if (!found) return;
  document.querySelector(".zoom").hidden = false;
  if (scale === null) {
    zoom(Math.max(READABLE, fitting(found)), 0, 0);
    toMarked(found);
  } else {
    zoom(scale, 0, 0);
    found.pan.scrollTo(...place);
  }
  found.pan.addEventListener("scroll", () => { place = [found.pan.scrollLeft, found.pan.scrollTop]; });
}

document.addEventListener("click", (event) => {
  const wanted = event.target.closest?.("[data-zoom]")?.dataset.zoom;
  const found = wanted && parts();
  if (!found) return;
  const factors = { in: 1.4 * scale, out: scale / 1.4, fit: fitting(found) };
  zoom(factors[wanted] ?? Number(wanted), ...middle(found.pan));
});

document.addEventListener("wheel", (event) => {
  // With Ctrl, as for maps in a page, so that the page can be scrolled; a pinch on a touchpad is the same event.
  const pan = event.target.closest?.(".pan");
  if (!pan || !event.ctrlKey) return;
  event.preventDefault();
  const view = pan.getBoundingClientRect();
  zoom(scale * Math.exp(-event.deltaY / 300), event.clientX - view.left, event.clientY - view.top);
}, { passive: false });

document.addEventListener("keydown", (event) => {
  if (!event.target.classList?.contains("pan")) return;
  const factor = { "+": 1.4, "=": 1.4, "-": 1 / 1.4 }[event.key];
  if (factor) zoom(scale * factor, ...middle(event.target));
});

let grip = null;
document.addEventListener("pointerdown", (event) => {
  const pan = event.target.closest?.(".pan");
  if (!pan || event.button || event.pointerType !== "mouse") return;
  grip = { pan, x: event.clientX, y: event.clientY, left: pan.scrollLeft, top: pan.scrollTop, moved: false };
});
document.addEventListener("pointermove", (event) => {
  if (!grip) return;
  const dx = event.clientX - grip.x, dy = event.clientY - grip.y;
  grip.moved ||= Math.hypot(dx, dy) > 4;
  if (grip.moved) grip.pan.scrollTo(grip.left - dx, grip.top - dy);
});
document.addEventListener("pointerup", () => setTimeout(() => { grip = null; }));
document.addEventListener("dragstart", (event) => { if (event.target.closest?.(".pan")) event.preventDefault(); });
document.addEventListener("click", (event) => { if (grip?.moved) event.preventDefault(); }, true);

appear();
// The page's content is replaced each time that it has changed.
new MutationObserver(appear).observe(document.getElementById("main"), { childList: true });
