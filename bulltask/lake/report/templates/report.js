"use strict";
// A cursor for the charts: mouse, touch, or the arrow keys. The page works without it.
for (const figure of document.querySelectorAll(".chart")) {
  const { start, step, unit, lines } = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot"), cursor = figure.querySelector(".cursor"), tip = figure.querySelector(".tip");
  const points = lines[0].values.length;
  let at = -1;

  const digits = (value) => Number(value.toPrecision(3)).toLocaleString("en");
  const length = (ms) => {
    for (const [size, name] of [[86400000, "d"], [3600000, "h"], [60000, "min"], [1000, "s"]]) {
      if (ms >= size) return `${digits(ms / size)} ${name}`;
    }
    return `${digits(ms)} ms`;
  };
  const clock = (second) => new Date(second * 1000).toISOString().slice(0, 16).replace("T", " ");
  const element = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });

  function show(point) {
    at = Math.max(0, Math.min(points - 1, point));
    const begin = start + at * step;
    const rows = lines.map(({ label, values }) => {
      const row = document.createElement("div"), value = values[at];
      row.append(element("span", label), element("b", value === null ? "\u2013" : unit === "ms" ? length(value) : digits(value)));
      return row;
    });
    const end = step > 60 ? ` to ${clock(begin + step).slice(11)}` : "";
    tip.replaceChildren(element("span", `${clock(begin)}${end} UTC`), ...rows);
    cursor.hidden = tip.hidden = false;
    const left = ((at + 0.5) / points) * 100;
    cursor.style.left = `${left}%`;
    tip.style.left = left < 50 ? `calc(${left}% + .6rem)` : "auto";
    tip.style.right = left < 50 ? "auto" : `calc(${100 - left}% + .6rem)`;
  }
  function hide() {
    cursor.hidden = tip.hidden = true;
    at = -1;
  }
  const follow = (event) => {
    const box = plot.getBoundingClientRect();
    show(Math.floor(((event.clientX - box.left) / box.width) * points));
  };
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: points - 1 };
    if (event.key === "Escape") hide();
    else if (event.key in moves) {
      event.preventDefault();
      show(moves[event.key]);
    }
  });
}
