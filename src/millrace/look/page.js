// A live page asks for its newest data and puts it where it belongs. The server says when to ask again.
"use strict";
(() => {
  const address = document.body.dataset.live;
  if (!address) return;
  const put = (told) => {
    for (const [id, html] of Object.entries(told.parts)) {
      const place = document.getElementById(id);
      if (place && place.innerHTML !== html) place.innerHTML = html;
    }
    for (const [name, data] of Object.entries(told.sources)) {
      const drawn = Bokeh.documents.map((shown) => shown.get_model_by_name(name)).filter(Boolean);
      for (const source of drawn) source.data = data;
      if (Bokeh.documents.length && !drawn.length && data.xs?.length) location.reload(); // its first points
    }
  };
  const refresh = async () => {
    let next_s = 5;
    try {
      const answer = await fetch(address, { signal: AbortSignal.timeout(30000) });
      const told = await answer.json();
      put(told);
      next_s = told.next_s;
    } catch {
      const place = document.getElementById("told");
      if (place) place.textContent = "The server does not answer: it was ended, or the machine is very busy.";
    }
    setTimeout(refresh, 1000 * next_s);
  };
  setTimeout(refresh, 500);
})();
