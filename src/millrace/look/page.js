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
  const lacks = (shown, name, data) => {
    // A plot without a place, or a row that its plot does not have.
    const plot = shown.get_model_by_name(`plot ${name}`);
    if (!plot) return (data.xs ?? data.row ?? []).length > 0;
    return (data.row ?? []).some((row) => !plot.y_range.factors.includes([row].flat()[0]));
  };
  const put = (content) => {
    if (content.html.facts && !document.getElementById("facts")) return location.reload(); // a trouble is over
    for (const [id, html] of Object.entries(content.html)) {
      const place = document.getElementById(id);
      if (place && place.innerHTML !== html) place.innerHTML = html;
    }
    for (const [name, data] of Object.entries(content.sources)) {
      for (const shown of Bokeh.documents) {
        if (lacks(shown, name, data)) return location.reload();
        const source = shown.get_model_by_name(name);
        if (source && data.xs && data.xs.length !== source.data.xs.length) return location.reload(); // another legend
        if (source) source.data = data;
      }
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
  const told = list.querySelector("[data-chosen]"), before = told.textContent;
  const count = () => {
    const num = list.querySelectorAll(":checked").length;
    told.textContent = num ? `${num} ${num === 1 ? "run is" : "runs are"} ticked.` : before;
  };
  list.addEventListener("change", count);
  count();
})();
