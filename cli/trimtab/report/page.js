// Draws every chart with the page's own colours, and lets all that show time show the same stretch of it.
const trimtab = (function () {
  const style = getComputedStyle(document.documentElement);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const boxes = new Map();
  let following = false;
  const colours = () => ({
    "font.color": style.getPropertyValue("--soft").trim(),
    "hoverlabel.bgcolor": style.getPropertyValue("--card").trim(),
    "hoverlabel.font.color": style.getPropertyValue("--ink").trim(),
  });
  const config = { displaylogo: false, responsive: true, displayModeBar: false };
  const timed = () => [...boxes.values()].filter((box) => !box.alone && box.isConnected);

  function follow(box) {
    box.on("plotly_relayout", (change) => {
      if (following || box.alone) return;
      const range = "xaxis.range[0]" in change ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : change["xaxis.range"];
      const whole = change["xaxis.autorange"] === true;
      if (!range && !whole) return;
      following = true;
      Promise.all(timed().filter((other) => other !== box).map((other) =>
        Plotly.relayout(other, whole ? { "xaxis.autorange": true } : { "xaxis.range": range }))).then(() => { following = false; });
    });
  }

  // Draw a chart; one that is drawn already keeps what its reader has chosen to see.
  function draw(id, figure) {
    const box = document.getElementById(id);
    if (!box) return;
    figure.layout.uirevision = "kept";
    if (boxes.get(id) === box) {
      Plotly.react(box, figure.data, { ...figure.layout, font: { ...figure.layout.font, color: colours()["font.color"] } }, config);
      return;
    }
    box.alone = figure.layout.meta === "alone";
    boxes.set(id, box);
    Plotly.newPlot(box, figure.data, figure.layout, config);
    Plotly.relayout(box, colours());
    follow(box);
  }

  dark.addEventListener("change", () => boxes.forEach((box) => Plotly.relayout(box, colours())));
  const drawn = document.getElementById("charts");
  if (drawn) for (const [id, figure] of Object.entries(JSON.parse(drawn.textContent))) draw(id, figure);
  return { draw };
})();
