"use strict";
const tip = document.getElementById("tip");

function showTip(lines, x, y) {
  tip.replaceChildren(...lines.map((line) => {
    const row = document.createElement("div");
    row.textContent = line;
    return row;
  }));
  tip.hidden = false;
  const left = Math.min(x + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = y + 18;
  const top = below + tip.offsetHeight > window.innerHeight ? y - tip.offsetHeight - 10 : below;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = Math.max(8, top) + "px";
}

function svgNode(name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

for (const chart of document.querySelectorAll("svg.chart[data-hover]")) {
  const points = JSON.parse(chart.dataset.hover);
  const rule = svgNode("line", { class: "rule", y1: chart.dataset.top, y2: chart.dataset.floor, visibility: "hidden" });
  const dot = svgNode("circle", { class: "here", r: 4, visibility: "hidden" });
  chart.append(rule, dot);
  chart.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
    let best = points[0];
    for (const point of points) if (Math.abs(point[0] - at) < Math.abs(best[0] - at)) best = point;
    const [x, y, ...lines] = best;
    rule.setAttribute("x1", x);
    rule.setAttribute("x2", x);
    rule.setAttribute("visibility", "visible");
    if (y !== null) {
      dot.setAttribute("cx", x);
      dot.setAttribute("cy", y);
      dot.setAttribute("visibility", "visible");
    }
    showTip(lines, event.clientX, event.clientY);
  });
  chart.addEventListener("pointerleave", () => {
    rule.setAttribute("visibility", "hidden");
    dot.setAttribute("visibility", "hidden");
    tip.hidden = true;
  });
}

// A token's native tooltip is slow to appear: its text moves into ours when the pointer first comes by.
document.addEventListener("pointerover", (event) => {
  const token = event.target.closest ? event.target.closest(".t") : null;
  if (!token) {
    if (!event.target.closest || !event.target.closest("svg.chart")) tip.hidden = true;
    return;
  }
  if (token.title) {
    token.dataset.value = token.title;
    token.removeAttribute("title");
  }
  const box = token.getBoundingClientRect();
  showTip([token.dataset.value], box.left, box.bottom - 12);
});

// Without a script every evaluation is shown below the other; with one, a slider goes through them.
for (const grids of document.querySelectorAll(".grids")) {
  const pictures = [...grids.querySelectorAll(".picture")];
  if (pictures.length < 2) continue;
  const slider = document.createElement("input");
  Object.assign(slider, { type: "range", min: 0, max: pictures.length - 1, value: pictures.length - 1 });
  const show = () => {
    pictures.forEach((picture, i) => { picture.hidden = i !== slider.valueAsNumber; });
    slider.setAttribute("aria-valuetext", pictures[slider.valueAsNumber].querySelector("h3").textContent);
  };
  slider.addEventListener("input", show);
  const label = document.createElement("label");
  label.append("First evaluation", slider, "last");
  grids.prepend(label);
  show();
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const now = root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.style.colorScheme = now === "dark" ? "light" : "dark";
});
