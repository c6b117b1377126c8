"use strict";
// The colours that a reader chose stay in the address, and in the links to other trajectories.
document.addEventListener("change", ({ target }) => {
  if (target.name !== "color") return;
  const kept = (address) => {
    const changed = new URL(address, location);
    changed.searchParams.set("color", target.value);
    return changed.href;
  };
  history.replaceState(null, "", kept(location));
  for (const link of document.querySelectorAll("a[href*='color=']")) link.href = kept(link.href);
  for (const field of document.querySelectorAll("input[type=hidden][name=color]")) field.value = target.value;
});
// A live page asks for its newest data and puts it where it belongs. The server says when to ask again.
(() => {
  const address = document.body.dataset.live;
  if (!address) return;
  const before = {};
  const parsed = (html) => Object.assign(document.createElement("template"), { innerHTML: html }).innerHTML;
  const put = (content) => {
    if (content.html.facts && !document.getElementById("facts")) return location.reload(); // a trouble is over
    const charts = content.html.facts ? [...document.querySelectorAll("[id^=chart-]")] : [];
    if (charts.some(({ id }) => !(id in content.html))) return location.reload(); // another run is here
    for (const [id, html] of Object.entries(content.html)) {
      const place = document.getElementById(id);
      if (!place && id.startsWith("chart-")) return location.reload(); // a chart without a place
      if (place && html !== before[id] && parsed(html) !== place.innerHTML) place.innerHTML = html;
      before[id] = html;
    }
  };
  const refresh = async () => {
    let next_s = 5;
    let trouble = "The server does not answer: it was ended, or the machine is very busy. The page asks again.";
    try {
      const answer = await fetch(address, { signal: AbortSignal.timeout(30000) });
      if (answer.status === 404) trouble = "The server was started again: open the address that it printed now.";
      const content = await answer.json();
      put(content);
      next_s = content.next_s;
    } catch {
      const place = document.getElementById("notice");
      if (place) place.textContent = trouble;
      delete before.notice; // the next answer writes its own
    }
    setTimeout(refresh, 1000 * next_s);
  };
  setTimeout(refresh, 500);
})();
// Keys, and the count of the runs that are ticked in a list.
(() => {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea")) return;
    const field = document.querySelector("input[type=search]");
    if (field) { event.preventDefault(); field.focus(); }
  });
  const list = document.querySelector("form.runs");
  if (!list) return;
  const label = list.querySelector("[data-chosen]"), before = label.textContent;
  const count = () => {
    const num = list.querySelectorAll(":checked").length;
    label.textContent = num ? `${num} ${num === 1 ? "run is" : "runs are"} ticked.` : before;
  };
  list.addEventListener("change", count);
  count();
})();
// All charts show the step and the values under the pointer. A drag over steps chooses a range.
(() => {
  const charts = () => [...document.querySelectorAll("svg[data-x]")]; // a live page replaces them
  const tip = document.createElement("p");
  tip.className = "tip";
  tip.hidden = true;
  const numbers = (svg, name) => svg.dataset[name].split(" ").map(Number);
  const across = (svg, event) => {
    const [left, right] = numbers(svg, "frame");
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    return Math.min(Math.max((at - left) / (right - left), 0), 1);
  };
  const between = ([low, high], share, log) => (log ? low * (high / low) ** share : low + share * (high - low));
  const mark = (first, last) => charts().forEach((svg) => {
    const [left, right, top, bottom] = numbers(svg, "frame"), wide = right - left;
    const place = { x: left + first * wide - 0.5, y: top, width: (last - first) * wide + 1, height: bottom - top };
    const look = { fill: "currentColor", "fill-opacity": 0.15, ...place };
    const rule = svg.querySelector("rect") ?? svg.appendChild(document.createElementNS(svg.namespaceURI, "rect"));
    for (const [name, value] of Object.entries(look)) rule.setAttribute(name, value);
  });
  let began = null;
  const chartOf = (event) => event.target.closest?.("svg[data-x]");
  document.addEventListener("pointermove", (event) => {
    const svg = chartOf(event);
    tip.hidden = !svg;
    if (!svg) return;
    document.body.append(tip);
    const share = across(svg, event), [left, right, top, bottom] = numbers(svg, "frame");
    mark(Math.min(share, began ?? share), Math.max(share, began ?? share));
    const at = between(numbers(svg, "x"), share), wanted = left + share * (right - left);
    const texts = [`${svg.dataset.axis} ${svg.dataset.axis === "step" ? Math.round(at) : Number(at.toPrecision(4))}`];
    for (const line of svg.querySelectorAll("polyline[data-label], circle[data-label]")) {
      const [cx, cy] = [line.cx, line.cy].map((one) => one?.baseVal.value);
      const points = line.points ? [...line.points] : [{ x: cx, y: cy }];
      const point = points.reduce((a, b) => (Math.abs(b.x - wanted) < Math.abs(a.x - wanted) ? b : a));
      const joined = line.points && line.getAttribute("stroke-opacity") !== "0";
      if (!joined && Math.abs(point.x - wanted) > 4) continue; // nothing is known between points
      const y = numbers(svg, "y"), value = between(y, (bottom - point.y) / (bottom - top), svg.dataset.log);
      const unit = 10 ** Math.ceil(Math.log10((y[1] - y[0]) / 2e4)); // a place tells no more
      texts.push(`${line.dataset.label}  ${Number((svg.dataset.log ? value : Math.round(value / unit) * unit).toPrecision(4))}`);
    }
    tip.textContent = texts.join("\n");
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4)}px`;
  });
  document.addEventListener("pointerdown", (event) => {
    const svg = event.pointerType === "mouse" && event.button === 0 && chartOf(event);
    if (!svg?.closest("[data-zoom]")) return;
    event.preventDefault();
    began = across(svg, event);
  });
  document.addEventListener("pointerup", (event) => {
    const svg = chartOf(event), form = document.querySelector("form.curves"), from = began;
    began = null;
    if (from === null || !svg || Math.abs(across(svg, event) - from) < 0.02) return;
    const ends = [from, across(svg, event)].sort((a, b) => a - b).map((share) => between(numbers(svg, "x"), share));
    const first = Math.ceil(ends[0]), last = Math.floor(ends[1]);
    if (!form) return location.assign(`${svg.closest("[data-zoom]").dataset.zoom}?from=${first}&to=${last}`);
    form.elements.from.value = first;
    form.elements.to.value = last;
    form.requestSubmit();
  });
})();
