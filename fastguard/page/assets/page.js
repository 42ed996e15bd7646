"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("data").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const linked = []; // charts by step, which are drawn
  let view = null; // first and last step that are shown; null for all
  let byTime = false; // whether x is the time since the first step
  let states = null; // of the ribbon
  let busy = false;
  let isThere;
  const library = new Promise((done) => { isThere = done; });

  async function unpack(name) {
    const raw = Uint8Array.from(atob(find("packed-" + name).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip")));
  }

  function number(value) {
    if (value === null) return "-";
    return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value);
  }

  // A name in at most `most` characters: its parts, from the left, lose all but the first letter and a number; then its middle.
  function short(name, most) {
    const parts = name.split(".");
    for (let i = 0; i + 1 < parts.length && parts.join(".").length > most; i++) parts[i] = parts[i].replace(/^(\D)\D*(\d*).*$/, "$1$2");
    const text = parts.join("."), half = Math.floor((most - 1) / 2);
    return text.length > most ? text.slice(0, most - 1 - half) + "\u2026" + text.slice(-half) : text;
  }

  // Between neighbours of `from`, what is between the same neighbours of `to`.
  function between(value, from, to) {
    let i = 1;
    while (i < from.length - 1 && from[i] < value) i++;
    const length = from[i] - from[i - 1];
    return from.length < 2 || !length ? value : to[i - 1] + ((value - from[i - 1]) / length) * (to[i] - to[i - 1]);
  }

  const longest = Math.max(0, ...data.clocks.map(([, seconds]) => seconds.at(-1) || 0));
  const [unit, length] = longest > 7200 ? ["hours", 3600] : longest > 120 ? ["minutes", 60] : ["seconds", 1];
  function times(run) {
    return data.clocks[run][1].map((seconds) => seconds / length);
  }

  function toX(step, run = 0) {
    return byTime ? between(step, data.clocks[run][0], times(run)) : step;
  }

  function toStep(x) {
    return byTime ? between(x, times(0), data.clocks[0][0]) : x;
  }

  // `figure`, which is by step, by time.
  function timed(figure) {
    if (!byTime) return;
    for (const trace of figure.data) {
      const known = times(trace.meta || 0), steps = data.clocks[trace.meta || 0][0];
      if (trace.type === "scatter" && !trace.text) {
        trace.customdata = trace.x;
        trace.hovertemplate = "%{y:.4g} at step %{customdata}<extra>" + trace.name + "</extra>";
      }
      let i = 1; // x rises nearly always: the search goes on where it was
      trace.x = trace.x.map((step) => {
        if (steps[i - 1] > step) i = 1;
        while (i < steps.length - 1 && steps[i] < step) i++;
        const length = steps[i] - steps[i - 1];
        return known[i - 1] + ((step - steps[i - 1]) / length) * (known[i] - known[i - 1]);
      });
    }
    for (const shape of figure.layout.shapes || []) Object.assign(shape, { x0: toX(shape.x0), x1: toX(shape.x1) });
    for (const note of figure.layout.annotations || []) note.x = toX(note.x);
    figure.layout.xaxis.title.text = unit;
  }

  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  function colour(name) {
    probe.style.color = "var(--" + name + ")";
    return getComputedStyle(probe).color;
  }

  function themed() {
    const look = { paper_bgcolor: colour("back"), plot_bgcolor: colour("back"), "font.color": colour("text") };
    const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line") };
    for (const which of ["xaxis", "yaxis"]) for (const key of Object.keys(axis)) look[which + "." + key] = axis[key];
    look["hoverlabel.bgcolor"] = colour("soft");
    look["hoverlabel.font.color"] = colour("text");
    return look;
  }

  function apply(layout, flat) {
    for (const [path, value] of Object.entries(flat)) {
      const keys = path.split("."), last = keys.pop();
      keys.reduce((at, key) => (at[key] = at[key] || {}), layout)[last] = value;
    }
    return layout;
  }

  async function draw(chart) {
    const figure = await (await unpack("chart-" + chart.name)).json();
    const where = find("chart-" + chart.name);
    const isByStep = figure.layout.xaxis.title.text === "step" && figure.layout.xaxis.type !== "category";
    if (isByStep) timed(figure);
    const layout = apply(Object.assign({ height: chart.height }, figure.layout), themed());
    if (where.clientWidth < 500) Object.assign(layout.margin, { l: Math.min(layout.margin.l, 110), r: 10 });
    if (figure.data[0].type === "heatmap") {
      const names = figure.data[0].y, room = Math.floor((layout.margin.l - 12) / 6);
      const tick = Math.ceil(names.length / Math.floor((chart.height - 110) / 13));
      const shown = names.map((_, i) => i).filter((i) => i % tick === 0);
      Object.assign(layout.yaxis, { tickvals: shown.map((i) => names[i]), ticktext: shown.map((i) => short(names[i], room)), tickfont: { size: 10 } });
      if (where.clientWidth < 500) figure.data[0].colorbar = Object.assign(figure.data[0].colorbar || {}, { thickness: 8 });
    }
    if (isByStep && view) layout.xaxis.range = view.map((step) => toX(step));
    for (const trace of figure.data) if (trace.line && trace.line.color === "#000000") trace.line.color = colour("text");
    await Plotly.react(where, figure.data, layout, { displayModeBar: false, responsive: true });
    // A legend of many lines gets the room that it takes: plotly would put it over the axis.
    const legend = where.querySelector(".legend .bg");
    const room = legend && layout.legend.yref === "container" ? legend.getBBox().height - 40 : 0;
    if (room > 0) await Plotly.relayout(where, { height: chart.height + room, "margin.b": layout.margin.b + room });
    where.classList.add("drawn");
    const ruler = find("js-plotly-tester"); // what plotly measures texts with
    if (ruler) ruler.setAttribute("aria-hidden", "true");
    if (!isByStep || linked.includes(where)) return;
    linked.push(where);
    where.on("plotly_relayout", (change) => {
      if (busy) return;
      if ("xaxis.range[0]" in change) show([change["xaxis.range[0]"], change["xaxis.range[1]"]].map(toStep), where);
      else if (change["xaxis.autorange"]) show(null, where);
    });
  }

  const near = new Set();
  const waiting = [];
  let isDrawing = false;
  async function work() {
    if (isDrawing) return;
    isDrawing = true;
    while (waiting.length) {
      const seen = waiting.findIndex((chart) => near.has("chart-" + chart.name));
      const [chart] = waiting.splice(Math.max(0, seen), 1);
      await draw(chart);
      await new Promise((done) => setTimeout(done)); // lets the browser answer in between
    }
    isDrawing = false;
    root.dataset.drawn = "yes";
    performance.mark("drawn");
  }

  function want(chart) {
    if (chart.isWanted) return;
    chart.isWanted = true;
    waiting.push(chart);
  }

  function show(range, from) {
    view = range;
    busy = true;
    const change = range === null ? { "xaxis.autorange": true } : { "xaxis.range": range.map((step) => toX(step)) };
    const done = linked.filter((chart) => chart !== from).map((chart) => Plotly.relayout(chart, change));
    Promise.all(done).then(() => { busy = false; });
    find("zoom").hidden = range === null;
    const ends = range === null ? [] : range.map(Math.round);
    find("range").textContent = range === null ? "" : "steps " + ends[0] + " to " + ends[1];
    // In a notebook's frame the address is the notebook's.
    if (location.protocol !== "about:") location.replace("#" + ends.join("-"));
    ribbon();
  }

  function ribbon() {
    if (states === null) return;
    const { first, width, looks } = data.ribbon;
    const from = view ? Math.max(0, Math.floor((view[0] - first) / width)) : 0;
    const to = view ? Math.min(states.length, Math.ceil((view[1] - first) / width) + 1) : states.length;
    const num = Math.min(1000, Math.max(1, to - from));
    const bars = [];
    for (let i = 0; i < num; i++) {
      const a = from + Math.floor((i * (to - from)) / num), b = from + Math.floor(((i + 1) * (to - from)) / num);
      let worst = 0;
      for (let j = a; j < Math.max(b, a + 1) && j < states.length; j++) if (states[j] > worst) worst = states[j];
      const last = bars[bars.length - 1];
      if (last && last.worst === worst) last.num++;
      else bars.push({ worst, num: 1, at: i });
    }
    find("ribbon").replaceChildren(...bars.filter((bar) => bar.worst).map((bar) => {
      const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const [height, fill] = looks[bar.worst - 1];
      const box = { x: (bar.at * 1000) / num, y: 100 - height, width: (bar.num * 1000) / num, height, fill };
      for (const key of Object.keys(box)) rect.setAttribute(key, box[key]);
      return rect;
    }));
  }

  function sortable(table, fill) {
    let by = -1, isDown = true;
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
        const value = (row) => (row[by] === null ? -Infinity : row[by]);
        const order = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);
        fill((a, b) => (isDown ? order(b, a) : order(a, b)));
      });
    });
  }

  function clickable(cell) {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Draw its norm";
    button.textContent = cell.textContent;
    cell.replaceChildren(button);
  }

  let again = null; // draws it once more
  // The norm of one tensor, of a row that was clicked.
  async function line(name, place) {
    await library;
    const { steps, rows } = await (await unpack("lines")).json(), figure = find("line"), plot = figure.lastElementChild;
    const row = rows[place], y = row.map((value) => (value > 0 ? value : null)), told = y.filter((value) => value !== null);
    const marks = (value) => steps.filter((_, i) => row[i] === value), notFinite = marks(-1), zeros = marks(0);
    const rail = { type: "scatter", mode: "markers", yaxis: "y2" };
    const layout = apply({
      height: 300, margin: { l: 70, r: 20, t: 10, b: 40 }, showlegend: notFinite.length + zeros.length > 0,
      xaxis: { title: { text: "step" } }, legend: { orientation: "h", y: 1.15 },
      yaxis: { title: { text: "norm" }, type: "log", exponentformat: "power", domain: [0, 0.9] },
      yaxis2: { domain: [0.92, 1], range: [-1, 1], visible: false, fixedrange: true },
    }, themed());
    figure.hidden = false;
    figure.firstElementChild.textContent = "Norm of " + name;
    const range = told.length ? Math.min(...told).toPrecision(4) + " to " + Math.max(...told).toPrecision(4) : "none is finite";
    plot.setAttribute("aria-label", "Norm of " + name + " at " + steps.length + " sampled steps: " + range + "; not finite at " + notFinite.length);
    const traces = [
      { type: "scatter", mode: "lines+markers", x: steps, y, name: "norm", line: { color: "#0072b2" } },
      { ...rail, x: notFinite, y: notFinite.map(() => 0), name: "NaN or Inf", marker: { symbol: "x", color: "#c1121f", size: 9 } },
      { ...rail, x: zeros, y: zeros.map(() => 0), name: "zero", marker: { symbol: "circle-open", color: "#6c757d", size: 9 } },
    ].filter((trace) => trace.x.length);
    timed({ data: traces, layout });
    if (view) layout.xaxis.range = view.map((step) => toX(step));
    await Plotly.react(plot, traces, layout, { displayModeBar: false, responsive: true });
    plot.classList.add("drawn");
    again = () => line(name, place);
    if (!linked.includes(plot)) linked.push(plot);
    figure.scrollIntoView({ block: "nearest" });
  }

  function tensors() {
    const table = find("tensors"), box = find("find"), told = find("found");
    if (table === null) return;
    let rows = null, order = null;
    async function load() {
      if (rows === null) rows = await (await unpack("tensors")).json();
    }
    async function fill() {
      await load();
      let test;
      try { const wanted = new RegExp(box.value, "i"); test = (name) => wanted.test(name); }
      catch { const text = box.value.toLowerCase(); test = (name) => name.toLowerCase().includes(text); }
      const found = rows.filter((row) => test(row[0]));
      if (order) found.sort(order);
      told.textContent = found.length + " of " + rows.length + (found.length > 100 ? ", the first 100 shown" : "");
      table.tBodies[0].replaceChildren(...found.slice(0, 100).map((row) => {
        const line = document.createElement("tr");
        row.forEach((value, place) => {
          const cell = document.createElement(place ? "td" : "th");
          if (!place) cell.scope = "row";
          cell.textContent = number(value);
          if (!place) clickable(cell);
          line.append(cell);
        });
        return line;
      }));
    }
    sortable(table, (wanted) => { order = wanted; fill(); });
    box.addEventListener("input", fill);
    for (const row of table.tBodies[0].rows) clickable(row.cells[0]);
    table.tBodies[0].addEventListener("click", async (event) => {
      const button = event.target.closest("button");
      if (button === null) return;
      await load();
      line(button.textContent, rows.findIndex((row) => row[0] === button.textContent));
    });
  }

  function modules() {
    const table = find("modules");
    if (table === null) return;
    const number = (text) => (text === "-" ? null : Number.isNaN(Number(text)) ? text : Number(text));
    sortable(table, (order) => {
      const rows = [...table.tBodies[0].rows].map((row) => Object.assign([...row.cells].map((c) => number(c.textContent)), { row }));
      table.tBodies[0].append(...rows.sort(order).map((one) => one.row));
    });
  }

  function choose() {
    const which = find("which");
    if (which === null) return;
    for (const chart of data.charts.filter((one) => one.group)) {
      find("map-" + chart.name).hidden = chart.name !== which.value;
      if (chart.name === which.value) want(chart);
    }
  }

  const cards = [...document.querySelectorAll(".card")];
  let place = -1;
  function go(by) {
    if (!cards.length) return;
    place = Math.min(cards.length - 1, Math.max(0, place + by));
    cards[place].focus();
    cards[place].scrollIntoView({ block: "center" });
  }

  function move(shift, zoom) {
    const all = [data.ribbon.first, data.ribbon.first + data.ribbon.width * (states ? states.length : 1)];
    const [a, b] = view || all, middle = (a + b) / 2 + shift * (b - a), half = ((b - a) / 2) * zoom;
    show([middle - half, middle + half]);
  }

  function retheme() {
    const look = themed();
    for (const where of document.querySelectorAll(".drawn")) Plotly.relayout(where, look);
  }

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const press = () => find("theme").setAttribute("aria-pressed", String(isDark()));
  function toggle() {
    root.dataset.theme = isDark() ? "light" : "dark";
    press();
    try { localStorage.setItem("fastguard-theme", root.dataset.theme); } catch { /* a frame without storage */ }
    retheme();
  }

  const keys = {
    j: () => go(1), k: () => go(-1), d: toggle, "/": () => find("find") && find("find").focus(),
    ArrowLeft: () => move(-0.25, 1), ArrowRight: () => move(0.25, 1), "+": () => move(0, 0.5), "-": () => move(0, 2),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const isTyping = event.target.matches("input, select, textarea");
    if (event.key === "Escape") {
      if (isTyping) event.target.blur();
      else show(null);
    } else if (!isTyping && Object.hasOwn(keys, event.key)) {
      event.preventDefault();
      keys[event.key]();
    }
  });

  for (const hidden of document.querySelectorAll(".controls")) hidden.hidden = false;
  for (const button of document.querySelectorAll("button[data-first]")) {
    button.addEventListener("click", () => {
      const first = Number(button.dataset.first), last = Number(button.dataset.last), room = Math.max(20, (last - first) / 4);
      show([first - room, last + room]);
      find("charts").scrollIntoView();
    });
  }
  find("reset").addEventListener("click", () => show(null));
  find("theme").addEventListener("click", toggle);
  addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details")) one.open = true; });
  dark.addEventListener("change", () => { press(); retheme(); });
  press();
  if (find("axis")) find("axis").addEventListener("change", async () => {
    byTime = find("axis").value === "time";
    busy = true;
    for (const chart of data.charts) if (find("chart-" + chart.name).classList.contains("drawn")) await draw(chart);
    if (again && !find("line").hidden) await again();
    busy = false;
  });
  tensors();
  modules();
  for (const chart of data.charts) if (!chart.group) want(chart);
  choose();
  if (find("which")) find("which").addEventListener("change", () => { choose(); work(); });

  const asked = /^#(-?\d+)-(-?\d+)$/.exec(location.hash);
  if (asked) view = [Number(asked[1]), Number(asked[2])];
  const watcher = new IntersectionObserver((seen) => {
    for (const one of seen) near[one.isIntersecting ? "add" : "delete"](one.target.id);
  }, { rootMargin: "200px" });
  for (const plot of document.querySelectorAll(".plot")) watcher.observe(plot);

  // The words are on the screen before the charts' library is as much as looked at.
  requestAnimationFrame(() => setTimeout(async () => {
    states = new Uint8Array(await (await unpack("ribbon")).arrayBuffer());
    if (asked) show(view);
    const script = document.createElement("script");
    script.textContent = await (await unpack("plotly")).text();
    document.head.append(script);
    isThere();
    await work();
  }));
})();
