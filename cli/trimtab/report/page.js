// Draws every chart with the page's own colours, and lets all that show time show the same stretch of it.
(function () {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const style = getComputedStyle(document.documentElement);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const boxes = [], timed = [];
  const colours = () => ({
    "font.color": style.getPropertyValue("--soft").trim(),
    "hoverlabel.bgcolor": style.getPropertyValue("--card").trim(),
    "hoverlabel.font.color": style.getPropertyValue("--ink").trim(),
  });
  let following = false;
  for (const [id, figure] of Object.entries(charts)) {
    const box = document.getElementById(id);
    const alone = figure.layout.meta === "alone";
    boxes.push(box);
    if (!alone) timed.push(box);
    Plotly.newPlot(box, figure.data, figure.layout, { displaylogo: false, responsive: true, displayModeBar: false });
    Plotly.relayout(box, colours());
    box.on("plotly_relayout", (change) => {
      if (following || alone) return;
      const range = "xaxis.range[0]" in change ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : change["xaxis.range"];
      const whole = change["xaxis.autorange"] === true;
      if (!range && !whole) return;
      following = true;
      Promise.all(timed.filter((other) => other !== box).map((other) =>
        Plotly.relayout(other, whole ? { "xaxis.autorange": true } : { "xaxis.range": range }))).then(() => { following = false; });
    });
  }
  dark.addEventListener("change", () => boxes.forEach((box) => Plotly.relayout(box, colours())));
})();
