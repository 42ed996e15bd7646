"use strict";
(async () => {
  async function unpack(name) {
    const raw = Uint8Array.from(atob(document.getElementById("packed-" + name).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  const plots = [...document.querySelectorAll(".plot")];
  const figures = JSON.parse(await unpack("figures"));
  // The words are on the screen before the charts' library is as much as looked at.
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const script = document.createElement("script");
  script.textContent = await unpack("plotly");
  document.head.append(script);

  async function draw() {
    const ink = getComputedStyle(document.body).color, clear = "rgba(0,0,0,0)", grid = "rgba(128,128,128,0.3)";
    for (const [place, { data, layout }] of figures.entries()) {
      Object.assign(layout, { paper_bgcolor: clear, plot_bgcolor: clear, font: { color: ink } });
      for (const axis of [layout.xaxis, layout.yaxis]) Object.assign(axis, { gridcolor: grid, zerolinecolor: grid });
      for (const trace of data) if (trace.line && trace.line.color === "#000000") trace.line.color = ink;
      await Plotly.react(plots[place], data, layout, { displayModeBar: false, responsive: true });
      plots[place].classList.add("drawn");
    }
  }
  await draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.documentElement.dataset.drawn = "yes";
  performance.mark("drawn");
})();
