// What moves in a report: curves (plotly), the slice viewer. The data is in #content.
(() => {
"use strict";
const $ = (id) => document.getElementById(id);
const content = JSON.parse($("content").textContent);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASHES = ["solid", "dot", "dash", "dashdot"];
const many = content.runs.length > 1;

// --- plots ---

const drawn = new Map();  // element -> its drawing function
const state = { hidden: new Set(), isLog: false };

function layoutOf(extra) {
  const axis = {
    gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"),
    tickfont: { size: 11 }, automargin: true, tickformat: "~g",
  };
  return Object.assign({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--soft"), family: "inherit" },
    margin: { l: 44, r: 8, t: 4, b: 36 }, hovermode: "x", showlegend: false, dragmode: "zoom",
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    xaxis: { ...axis, title: { text: "optimizer step", font: { size: 11 } } }, yaxis: { ...axis },
  }, extra);
}

// of several runs the colour is the run, which the boxes above name: the legend names the dashes alone
function drawChart(element, chart) {
  const names = [...new Set(chart.curves.map((curve) => curve.name))];
  const dashOf = (name) => (many ? DASHES[names.indexOf(name) % 4] : "solid");
  const traces = chart.curves.filter((curve) => !state.hidden.has(curve.run)).map((curve) => ({
    x: curve.x, y: curve.y, mode: curve.x.length < 20 ? "lines+markers" : "lines", showlegend: !many,
    name: many ? `${content.runs[curve.run]} ${curve.name}` : curve.name,
    line: {
      color: colour(`--run-${(many ? curve.run : names.indexOf(curve.name)) % 8}`), width: 2, dash: dashOf(curve.name),
    },
    marker: { size: 5 }, hovertemplate: "%{y:.4g}<extra>%{fullData.name}</extra>",
  }));
  const keys = names.map((name) => ({
    x: [null], y: [null], mode: "lines", name, hoverinfo: "skip",
    line: { color: colour("--soft"), width: 2, dash: dashOf(name) },
  }));
  const layout = layoutOf({
    showlegend: names.length > 1,
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 11 }, itemclick: many ? false : "toggle", itemdoubleclick: many ? false : "toggleothers" },
  });
  layout.yaxis.type = state.isLog ? "log" : "linear";
  Plotly.react(element, many && names.length > 1 ? [...traces, ...keys] : traces, layout, { displayModeBar: false, responsive: true });
}

// the keyboard's way to zoom: + and -, arrows, 0
function listenToKeys(element) {
  element.addEventListener("keydown", (event) => {
    const axis = element._fullLayout && element._fullLayout.xaxis;
    if (!axis) return;
    const [low, high] = axis.range, width = high - low, middle = (low + high) / 2;
    const range = {
      "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4],
      "-": [middle - width, middle + width],
      ArrowLeft: [low - width / 5, high - width / 5], ArrowRight: [low + width / 5, high + width / 5],
    }[event.key];
    if (!range && event.key !== "0") return;
    event.preventDefault();
    Plotly.relayout(element, range ? { "xaxis.range": range } : { "xaxis.autorange": true, "yaxis.autorange": true });
  });
}

const whenSeen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    whenSeen.unobserve(entry.target);
    const draw = entry.target.draw;
    drawn.set(entry.target, draw);
    draw();
  }
}, { rootMargin: "300px" });

function redraw() {
  for (const draw of drawn.values()) draw();
}

function checkbox(text, checked, onChange) {
  const label = document.createElement("label"), input = document.createElement("input");
  input.type = "checkbox";
  input.checked = checked;
  input.addEventListener("change", () => onChange(input.checked));
  label.append(input, ` ${text}`);
  return label;
}

function openCharts() {
  for (const chart of content.charts) {
    const figure = document.createElement("figure"), title = document.createElement("h3");
    const plot = document.createElement("div"), caption = document.createElement("figcaption");
    title.textContent = chart.title;
    caption.textContent = chart.caption;
    plot.className = "plot";
    plot.tabIndex = 0;
    plot.setAttribute("role", "img");
    const ends = chart.curves.map((curve) => `${content.runs[curve.run]} ${curve.name} from ${curve.y[0]} to ${curve.y.at(-1)}`);
    plot.setAttribute("aria-label", `${chart.title} over the optimizer step: ${ends.join("; ")}`);
    plot.draw = () => drawChart(plot, chart);
    listenToKeys(plot);
    figure.append(title, plot, caption);
    $(chart.is_main ? "charts" : "more-charts").append(figure);
    whenSeen.observe(plot);
  }
  $("more").hidden = !content.charts.some((chart) => !chart.is_main);
  if (many) {
    content.runs.forEach((name, number) => {
      const label = checkbox("", true, (checked) => {
        if (checked) state.hidden.delete(number); else state.hidden.add(number);
        redraw();
      });
      const dot = document.createElement("span");
      dot.className = `dot run-${number % 8}`;
      label.append(dot, name);
      $("chart-controls").append(label);
    });
  }
  $("chart-controls").append(checkbox("logarithmic", false, (checked) => { state.isLog = checked; redraw(); }));
}

// --- the slice viewer ---

const decode = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const RGBA = [[0, 0, 0, 130], null, null, [0, 0, 0, 80]];  // of a token outside, and of one in neither set
const view = { volume: null, plane: 0, tokens: null };

function rgb(name) {
  const key = document.querySelectorAll("#viewer .key")[name];
  return getComputedStyle(key).backgroundColor.match(/\d+/g).slice(0, 3).map(Number);
}

function image(address, ready) {
  const picture = new Image();
  picture.onload = ready;
  picture.src = address;
  return picture;
}

function choose(number) {
  const volume = content.volumes[number];
  if (!volume.images) {
    volume.images = { sheet: image(volume.sheet, drawScan), enface: image(volume.enface, drawScan) };
    for (const name of ["masks", "features", "enface_features"]) {
      if (volume[name]) volume.images[name] = decode(volume[name]);
    }
    volume.heights = volume.surfaces.map((surface) => ({
      predicted: new Uint16Array(decode(surface.predicted).buffer),
      truth: new Uint16Array(decode(surface.truth).buffer),
    }));
  }
  view.volume = volume;
  $("plane").max = volume.shape[0] - 1;
  for (const [id, there] of [["masks", volume.masks], ["features", volume.features], ["surfaces", volume.surfaces.length]]) {
    $(`show-${id}`).disabled = !there;
  }
  go(Math.min(view.plane, volume.shape[0] - 1));
}

function go(plane) {
  const last = view.volume.shape[0] - 1;
  view.plane = Math.max(0, Math.min(last, plane));
  $("plane").value = view.plane;
  const text = `B-scan ${view.plane + 1} of ${last + 1}`;
  $("bscan-text").textContent = text;
  $("plane").setAttribute("aria-valuetext", text);
  for (const id of ["bscan", "enface"]) {
    $(id).setAttribute("aria-valuenow", view.plane + 1);
    $(id).setAttribute("aria-valuemax", last + 1);
    $(id).setAttribute("aria-valuetext", text);
  }
  drawScan();
}

function open2d(canvas, widthMm, heightMm) {
  canvas.style.aspectRatio = `${widthMm} / ${heightMm}`;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale));
  canvas.height = Math.max(1, Math.round(canvas.width * heightMm / widthMm));
  return canvas.getContext("2d");
}

// rows x columns colours, a pixel each, laid over the whole canvas
function lay(context, rows, columns, pixel) {
  const small = document.createElement("canvas");
  small.width = columns;
  small.height = rows;
  const data = new ImageData(columns, rows);
  for (let i = 0; i < rows * columns; i += 1) data.data.set(pixel(i), 4 * i);
  small.getContext("2d").putImageData(data, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, context.canvas.width, context.canvas.height);
  context.imageSmoothingEnabled = true;
}

const isOn = (name) => $(`show-${name}`).checked && !$(`show-${name}`).disabled;

function drawSurfaces(context, volume) {
  const [, high, wide] = volume.shape, { width, height } = context.canvas;
  volume.heights.forEach((heights, number) => {
    for (const [kind, dash] of [["truth", [2, 4]], ["predicted", []]]) {
      context.strokeStyle = `hsl(${(number * 137) % 360} 90% 62%)`;
      context.lineWidth = Math.max(1.5, width / 450);
      context.setLineDash(dash.map((n) => n * context.lineWidth));
      context.beginPath();
      let isDown = false;
      for (let w = 0; w < wide; w += 1) {
        const code = heights[kind][view.plane * wide + w];
        if (code === 65535) { isDown = false; continue; }
        const x = (w + 0.5) / wide * width, y = (code / 16 + 0.5) / high * height;
        if (isDown) context.lineTo(x, y); else context.moveTo(x, y);
        isDown = true;
      }
      context.stroke();
    }
  });
  context.setLineDash([]);
}

function drawScan() {
  const volume = view.volume;
  if (!volume || !volume.images.sheet.complete || !volume.images.enface.complete) return;
  const [deep, high, wide] = volume.shape, [stepD, stepH, stepW] = volume.spacing, [tileH, tileW] = volume.tile;
  const context = open2d($("bscan"), wide * stepW, high * stepH);
  const { width, height } = context.canvas;
  const column = view.plane % volume.columns, row = Math.floor(view.plane / volume.columns);
  context.drawImage(volume.images.sheet, column * tileW, row * tileH, tileW, tileH, 0, 0, width, height);
  const features = volume.images.features, masks = volume.images.masks;
  if (features || masks) {
    const [, rows, columns] = volume.grid, first = Math.floor(view.plane / volume.patch[0]) * rows * columns;
    if (isOn("features")) {
      lay(context, rows, columns, (i) => [...features.subarray(3 * (first + i), 3 * (first + i) + 3), 185]);
    }
    if (isOn("masks")) {
      const tints = [RGBA[0], [...rgb(0), 95], [...rgb(1), 115], RGBA[3]];
      lay(context, rows, columns, (i) => tints[masks[first + i]]);
    }
  }
  if (isOn("surfaces")) drawSurfaces(context, volume);
  const flat = open2d($("enface"), wide * stepW, deep * stepD);
  flat.drawImage(volume.images.enface, 0, 0, flat.canvas.width, flat.canvas.height);
  if (isOn("features")) {
    const [rows, , columns] = volume.grid, colours = volume.images.enface_features;
    lay(flat, rows, columns, (i) => [...colours.subarray(3 * i, 3 * i + 3), 200]);
  }
  flat.fillStyle = colour("--accent");
  const thick = Math.max(2, flat.canvas.height / 160);
  flat.fillRect(0, (view.plane + 0.5) / deep * flat.canvas.height - thick / 2, flat.canvas.width, thick);
  const shares = isOn("features") ? `; the components hold ${volume.shares.map((s) => `${Math.round(100 * s)} %`).join(", ")} of the variance` : "";
  $("enface-text").textContent = `En face, mean of each A-scan; the line is the B-scan shown${shares}`;
  $("keys").textContent = isOn("surfaces") ? `Surfaces: ${volume.surfaces.map((s) => s.name).join(", ")}. Drawn through: predicted; dotted: as labelled.` : "";
}

function openViewer() {
  const there = content.volumes.length > 0;
  $("viewer").hidden = !there;
  $("no-viewer").hidden = there;
  if (!there) return;
  content.volumes.forEach((volume) => $("volume").append(new Option(volume.title)));
  $("volume").addEventListener("change", () => choose($("volume").selectedIndex));
  $("plane").addEventListener("input", () => go(Number($("plane").value)));
  for (const name of ["masks", "features", "surfaces"]) {
    $(`show-${name}`).checked = false;
    $(`show-${name}`).addEventListener("change", drawScan);
  }
  let turned = 0;
  $("bscan").addEventListener("wheel", (event) => {
    const way = Math.sign(event.deltaY), last = view.volume.shape[0] - 1;
    if ((way < 0 && view.plane === 0) || (way > 0 && view.plane === last)) return;  // the page scrolls on
    event.preventDefault();
    turned += event.deltaMode === 0 ? event.deltaY : 40 * event.deltaY;
    if (Math.abs(turned) < 30) return;
    turned = 0;
    go(view.plane + way);
  }, { passive: false });
  const keys = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1, PageUp: -8, PageDown: 8, Home: -1e6, End: 1e6 };
  for (const id of ["bscan", "enface"]) {
    $(id).addEventListener("keydown", (event) => {
      if (!(event.key in keys)) return;
      event.preventDefault();
      go(view.plane + keys[event.key]);
    });
  }
  const point = (event) => {
    const box = $("enface").getBoundingClientRect();
    go(Math.floor((event.clientY - box.top) / box.height * view.volume.shape[0]));
  };
  $("enface").addEventListener("pointerdown", point);
  $("enface").addEventListener("pointermove", (event) => { if (event.buttons) point(event); });
  // in the next frame: drawing gives the canvas a size, of which the browser would complain inside the observer
  new ResizeObserver(() => requestAnimationFrame(drawScan)).observe($("viewer"));
  $("volume").selectedIndex = 0;
  view.plane = Math.floor(content.volumes[0].shape[0] / 2);
  choose(0);
}

openCharts();
openViewer();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { redraw(); drawScan(); });
})();
