// Asks for the page's parts every two seconds; a part whose words changed is shown anew, its charts grow in place.
(function () {
  const place = document.getElementById("parts"), state = document.getElementById("state");
  const shown = [];
  let ended = false;

  function show(told) {
    document.title = told.title;
    told.parts.forEach((html, n) => {
      if (shown[n] === html) return;
      while (place.children.length <= n) {
        const part = document.createElement("div");
        part.className = "part";
        place.appendChild(part);
      }
      place.children[n].innerHTML = html;
      shown[n] = html;
    });
    while (place.children.length > told.parts.length) place.lastChild.remove();
    shown.length = told.parts.length;
    for (const [id, figure] of Object.entries(told.charts)) trimtab.draw(id, figure);
    ended = told.finished;
    document.body.dataset.state = ended ? "finished" : "live";
    document.body.dataset.seconds = told.seconds;
    state.textContent = ended ? "finished" : `live, at ${new Date().toLocaleTimeString()}`;
  }

  async function ask() {
    const began = performance.now();
    try {
      const answer = await fetch("parts", { cache: "no-store" });
      if (answer.ok) show(await answer.json());
      else state.textContent = await answer.text();
    } catch (error) {
      state.textContent = "nobody answers any more: this is what was seen last";
      document.body.dataset.state = "left";
    }
    // Where an answer takes its time, the machine has better things to do.
    if (!ended) setTimeout(ask, Math.max(2000, 4 * (performance.now() - began)));
  }
  ask();
})();
