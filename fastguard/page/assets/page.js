"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue("--" + name).trim();
  const charts = [];
  let busy = false;

  function themed() {
    const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line") };
    const look = { paper_bgcolor: colour("back"), plot_bgcolor: colour("back"), "font.color": colour("text") };
    for (const which of ["xaxis", "yaxis"]) {
      for (const key of Object.keys(axis)) look[which + "." + key] = axis[key];
    }
    return look;
  }

  function isBlack(trace) {
    return trace.line && trace.line.color === "#000000";
  }

  function draw() {
    const config = { displaylogo: false, responsive: true, plotlyServerURL: "", modeBarButtonsToRemove: ["sendDataToCloud"] };
    for (const one of data.charts) {
      const where = document.getElementById("chart-" + one.id);
      const rows = one.figure.data.length && one.figure.data[0].type === "heatmap" ? one.figure.data[0].y.length : 0;
      const layout = Object.assign({ height: rows ? Math.min(700, 140 + 9 * rows) : 340 }, one.figure.layout);
      for (const trace of one.figure.data) if (isBlack(trace)) trace.line.color = colour("text");
      Plotly.newPlot(where, one.figure.data, layout, config);
      Plotly.relayout(where, themed());
      const type = layout.xaxis && layout.xaxis.type;
      if (type !== "category") charts.push(where);
      where.on("plotly_relayout", (change) => {
        if (busy) return;
        if ("xaxis.range[0]" in change) show(change["xaxis.range[0]"], change["xaxis.range[1]"], where);
        else if (change["xaxis.autorange"]) show(null, null, where);
      });
    }
  }

  function show(first, last, from) {
    busy = true;
    const change = first === null ? { "xaxis.autorange": true } : { "xaxis.range": [first, last] };
    const done = charts.filter((chart) => chart !== from).map((chart) => Plotly.relayout(chart, change));
    if (from === undefined) window.scrollTo(0, document.getElementById("zoom").offsetTop);
    Promise.all(done).then(() => { busy = false; });
    const told = document.getElementById("range");
    told.textContent = first === null ? "" : "steps " + Math.round(first) + " to " + Math.round(last);
    location.replace("#" + (first === null ? "" : Math.round(first) + "-" + Math.round(last)));
    ribbon(first, last);
  }

  let states = null;
  async function unpack() {
    const raw = Uint8Array.from(atob(data.ribbon.states), (c) => c.charCodeAt(0));
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
    states = new Uint8Array(await new Response(stream).arrayBuffer());
  }

  const looks = [null, ["#7fb8a4", 40], ["#e6c229", 60], ["#56b4e9", 80], ["#6c757d", 90], ["#c1121f", 100]];
  function ribbon(first, last) {
    if (states === null) return;
    const { first: begin, width } = data.ribbon;
    const from = first === null ? 0 : Math.max(0, Math.floor((first - begin) / width));
    const to = first === null ? states.length : Math.min(states.length, Math.ceil((last - begin) / width) + 1);
    const picture = document.getElementById("ribbon");
    const bars = [];
    const num = Math.min(1000, Math.max(1, to - from));
    for (let i = 0; i < num; i++) {
      const a = from + Math.floor((i * (to - from)) / num), b = from + Math.floor(((i + 1) * (to - from)) / num);
      let worst = 0;
      for (let j = a; j < Math.max(b, a + 1) && j < states.length; j++) if (states[j] > worst) worst = states[j];
      if (bars.length && bars[bars.length - 1].worst === worst) bars[bars.length - 1].num++;
      else bars.push({ worst, num: 1, at: i });
    }
    picture.replaceChildren(...bars.filter((bar) => bar.worst).map((bar) => {
      const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const [fill, height] = looks[bar.worst];
      const box = { x: (bar.at * 1000) / num, y: 100 - height, width: (bar.num * 1000) / num, height, fill };
      for (const key of Object.keys(box)) rect.setAttribute(key, box[key]);
      return rect;
    }));
  }

  function tensors() {
    const table = document.getElementById("tensors");
    if (table === null) return;
    const body = table.tBodies[0], find = document.getElementById("find"), told = document.getElementById("found");
    let by = -1, isDown = true;
    function fill() {
      let test;
      try { const found = new RegExp(find.value, "i"); test = (name) => found.test(name); }
      catch { const text = find.value.toLowerCase(); test = (name) => name.toLowerCase().includes(text); }
      let rows = data.tensors.rows.filter((row) => test(row[0]));
      if (by >= 0) {
        const value = (row) => (row[by] === null ? -Infinity : row[by]);
        const order = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);
        rows = rows.slice().sort((a, b) => (isDown ? order(b, a) : order(a, b)));
      }
      told.textContent = rows.length + " of " + data.tensors.rows.length + (rows.length > 100 ? ", the first 100 shown" : "");
      body.replaceChildren(...rows.slice(0, 100).map((row) => {
        const line = document.createElement("tr");
        row.forEach((value, place) => {
          const cell = document.createElement(place ? "td" : "th");
          if (!place) cell.scope = "row";
          cell.textContent = value === null ? "-" : String(value);
          line.append(cell);
        });
        return line;
      }));
    }
    [...table.tHead.rows[0].cells].forEach((cell, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = cell.textContent;
      cell.replaceChildren(button);
      button.addEventListener("click", () => {
        isDown = by === place ? !isDown : place > 0;
        by = place;
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        fill();
      });
    });
    find.addEventListener("input", fill);
  }

  for (const hidden of document.querySelectorAll(".controls")) hidden.hidden = false;
  for (const button of document.querySelectorAll("button[data-first]")) {
    button.addEventListener("click", () => {
      const first = Number(button.dataset.first), last = Number(button.dataset.last), room = Math.max(20, (last - first) / 4);
      show(first - room, last + room);
    });
  }
  document.getElementById("reset").addEventListener("click", () => show(null, null));
  tensors();
  requestAnimationFrame(() => {
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const one of data.charts) Plotly.relayout(document.getElementById("chart-" + one.id), themed());
    });
    unpack().then(() => {
      const asked = /^#(-?\d+)-(-?\d+)$/.exec(location.hash);
      if (asked) show(Number(asked[1]), Number(asked[2]));
      document.documentElement.dataset.drawn = "yes";
    });
  });
})();
