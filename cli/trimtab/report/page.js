// Draws the charts, links their time axes, and refreshes a live page: it fetches itself and updates the parts that changed.
(function () {
  const style = getComputedStyle(document.documentElement);
  const charts = new Map();
  const parts = document.getElementById("parts");
  const rendered = [...parts.children].map((part) => part.innerHTML);
  const config = { displaylogo: false, responsive: true, displayModeBar: false };
  const colours = () => ({
    "font.color": style.getPropertyValue("--soft").trim(),
    "hoverlabel.bgcolor": style.getPropertyValue("--card").trim(),
    "hoverlabel.font.color": style.getPropertyValue("--ink").trim(),
  });
  let linking = false;

  function linkTimeAxis(chart) {
    chart.on("plotly_relayout", (change) => {
      if (linking || chart.ownXAxis) return;
      const range = "xaxis.range[0]" in change ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : change["xaxis.range"];
      const reset = change["xaxis.autorange"] === true;
      if (!range && !reset) return;
      linking = true;
      const others = [...charts.values()].filter((other) => other !== chart && !other.ownXAxis && other.isConnected);
      Promise.all(others.map((other) => Plotly.relayout(other, reset ? { "xaxis.autorange": true } : { "xaxis.range": range })))
        .then(() => { linking = false; });
    });
  }

  // Draws a chart, or updates it and keeps the user's zoom.
  function draw(id, figure) {
    const chart = document.getElementById(id);
    if (!chart) return;
    figure.layout.uirevision = "kept";
    if (charts.get(id) === chart) {
      Plotly.react(chart, figure.data, { ...figure.layout, font: { ...figure.layout.font, color: colours()["font.color"] } }, config);
      return;
    }
    chart.ownXAxis = figure.layout.meta === "own-x-axis";
    charts.set(id, chart);
    Plotly.newPlot(chart, figure.data, figure.layout, config);
    Plotly.relayout(chart, colours());
    linkTimeAxis(chart);
  }

  function drawCharts(page) {
    for (const [id, figure] of Object.entries(JSON.parse(page.getElementById("charts").textContent))) draw(id, figure);
  }

  function update(page) {
    document.title = page.title;
    document.body.dataset.state = page.body.dataset.state;
    const updated = [...page.getElementById("parts").children].map((part) => part.innerHTML);
    updated.forEach((html, n) => {
      if (rendered[n] === html) return;
      const part = parts.children[n] || parts.appendChild(Object.assign(document.createElement("div"), { className: "part" }));
      part.innerHTML = rendered[n] = html;
    });
    while (parts.children.length > updated.length) parts.lastChild.remove();
    rendered.length = updated.length;
    drawCharts(page);
  }

  async function refresh() {
    const start = performance.now();
    try {
      const response = await fetch("", { cache: "no-store" });
      if (response.ok) update(new DOMParser().parseFromString(await response.text(), "text/html"));
    } catch (error) {
      document.body.dataset.state = "disconnected";
    }
    scheduleRefresh(performance.now() - start);
  }

  // A slow server is asked less often.
  function scheduleRefresh(elapsed) {
    const state = document.body.dataset.state;
    if (state === "live" || state === "disconnected") setTimeout(refresh, Math.max(2000, 4 * elapsed));
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    charts.forEach((chart) => Plotly.relayout(chart, colours())));
  drawCharts(document);
  scheduleRefresh(0);
})();
