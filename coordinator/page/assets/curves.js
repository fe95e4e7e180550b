// Learning curves as small multiples: a chart per task and measure, a line per training, bands of two standard errors.

const BANDS = 4; // trainings in a chart at most, for which bands are drawn

if (DATA.kind === "training") PARTS.push({ id: "curves", name: "Curves", make: curvesPart });

/** Chart key -> {task, measure, up, lines: [{training, curve}]}. */
function chartsOf(trainings) {
  const found = new Map();
  for (const training of trainings)
    for (const curve of training.curves) {
      const key = `${training.suite}\u0000${curve.task}\u0000${curve.measure}`;
      if (!found.has(key)) found.set(key, { key, suite: training.suite, task: curve.task, measure: curve.measure, up: curve.up, lines: [] });
      found.get(key).lines.push({ training, curve });
    }
  return [...found.values()];
}

function curvesPart() {
  const picked = new Set(DATA.trainings.map((_, i) => i));
  const grid = el("div", { class: "grid" });
  const count = el("p", { class: "note", role: "status" });
  let text = "", only = "all";
  const draw = () => {
    const trainings = DATA.trainings.filter((_, i) => picked.has(i));
    const charts = chartsOf(trainings).filter((c) => `${c.suite} ${c.task} ${c.measure}`.toLowerCase().includes(text))
      .filter((c) => only === "all" || c.lines.some((l) => l.curve.marks.includes("!")));
    count.textContent = `${charts.length} chart${charts.length === 1 ? "" : "s"}. A filled dot marks a checkpoint that shows a score to be worse; a hollow one, a point that is not comparable with the one before. ${DATA.trainings[0]?.along ?? ""}`;
    grid.replaceChildren(...charts.map(chart));
  };
  const tools = el("div", { class: "tools" }, search("find a task", (value) => { text = value; draw(); }),
    choice("show", [["all", "all tasks"], ["worse", "tasks that are worse"]], (value) => { only = value; draw(); }));
  const legend = el("fieldset", { class: "legend" }, el("legend", { text: "trainings" }), DATA.trainings.map((training, i) => {
    const box = el("input", { type: "checkbox", checked: true, onchange: () => { box.checked ? picked.add(i) : picked.delete(i); draw(); } });
    return el("label", {}, box, el("span", { class: "swatch", style: { background: line(i) } }), said(`${training.name} · ${training.suite}`));
  }));
  draw();
  return section("curves", "Learning curves", null, tools, DATA.trainings.length > 1 ? legend : null, count, grid);
}

function chart(one) {
  const place = el("div", { class: "plot" });
  const values = one.lines.flatMap(({ curve }) => curve.value.filter((v) => v !== null));
  const name = `${one.task} ${one.measure}`;
  const range = values.length ? `${score(Math.min(...values))} to ${score(Math.max(...values))}` : "no values";
  const made = el("figure", { "aria-label": `${name}, ${range}` }, el("figcaption", {}, said(one.task, "said strong"),
    " ", said(one.measure), one.up ? null : " (lower is better)"), place, readout(one));
  whenSeen(made, () => {
    place.redraw = () => { place.replaceChildren(); drawChart(place, one, made.lastChild); };
    place.redraw();
  });
  return made;
}

const MOST_READ = 6; // lines of a chart whose values stand below it

function readout(one) {
  return el("div", { class: "readout" }, lastValues(one));
}

const swatch = (training) => el("span", { class: "swatch", style: { background: line(DATA.trainings.indexOf(training)) } });

/** The last value of each line, with its change from the first one, the best one, and since when it is worse. */
function lastValues({ lines }) {
  const rows = lines.slice(0, 3).map(({ training, curve }) => {
    const [first, last] = [curve.value[0], curve.value.at(-1)];
    const change = first === null || last === null ? "" : ` (${last - first >= 0 ? "+" : ""}${(last - first).toFixed(4)} since the first)`;
    const best = curve.best < curve.value.length - 1 ? `, best so far ${score(curve.value[curve.best])} at ${training.points[curve.at[curve.best]][1]}` : "";
    return el("span", {}, swatch(training), `${score(last)}${change}${best} `, curve.worse.map(([, words]) => el("b", { text: `${words} ` })));
  });
  return lines.length > 3 ? [...rows, `and ${lines.length - 3} more`] : rows;
}

/** The values of each line at an x. */
function valuesAt({ lines }, x, at) {
  const rows = lines.flatMap(({ training, curve }) => {
    const i = curve.at.findIndex((p) => x(training, p) === at);
    return i < 0 ? [] : [el("span", {}, swatch(training), `${score(curve.value[i])}${curve.stderr[i] === null ? "" : ` ± ${score(curve.stderr[i])}`} `)];
  });
  return [`at ${NUMBER.format(at)}: `, ...rows.slice(0, MOST_READ), rows.length > MOST_READ ? `and ${rows.length - MOST_READ} more` : ""];
}

/** The x of a training's point: its step, or its place where a point of any line has none. */
function axisOf(lines) {
  const steps = lines.every(({ training, curve }) => curve.at.every((i) => training.points[i][2] !== null));
  return (training, at) => (steps ? training.points[at][2] : at);
}

function drawChart(place, one, below) {
  const x = axisOf(one.lines);
  const xs = [...new Set(one.lines.flatMap(({ training, curve }) => curve.at.map((i) => x(training, i))))].sort((a, b) => a - b);
  const column = new Map(xs.map((value, i) => [value, i]));
  const spread = (training, curve, values) => {
    const found = new Array(xs.length).fill(null);
    curve.at.forEach((at, i) => { found[column.get(x(training, at))] = values[i]; });
    return found;
  };
  const columns = [xs], series = [{}], bands = [];
  for (const { training, curve } of one.lines) {
    const stroke = line(DATA.trainings.indexOf(training));
    const marks = spread(training, curve, curve.marks);
    columns.push(spread(training, curve, curve.value));
    series.push({ stroke, width: 1.5, spanGaps: true, points: { show: true, size: 5, filter: (_, __, show) => (show || curve.at.length < 40 ? null : []), fill: stroke }, marks });
    if (one.lines.length > BANDS || curve.stderr.every((e) => e === null)) continue;
    for (const sign of [2, -2]) {
      columns.push(spread(training, curve, curve.value.map((v, i) => (v === null || curve.stderr[i] === null ? null : Math.max(v + sign * curve.stderr[i], Math.min(v, 0))))));
      series.push({ stroke: "transparent", points: { show: false }, spanGaps: true });
    }
    bands.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}26` });
  }
  const ink = colour("--soft"), grid = { stroke: colour("--rule"), width: 1 };
  const axis = { stroke: ink, grid, ticks: grid, font: "12px system-ui" };
  new uPlot({
    width: Math.max(220, place.clientWidth), height: 150, legend: { show: false }, cursor: { points: { size: 6 } },
    scales: { x: { time: false }, y: { range: (_, low, high) => (high - low < 1e-9 ? [Math.max(low - 0.05, Math.min(low, 0)), high + 0.05] : uPlot.rangeNum(low, high, 0.1, true)) } }, axes: [{ ...axis, values: (_, ticks) => ticks.map((t) => NUMBER.format(t)) }, { ...axis, size: 52 }],
    series, bands, hooks: { draw: [(plot) => drawMarks(plot, series)], setCursor: [(plot) => showCursor(plot, one, below, x)] },
  }, columns, place);
}

/** Verdicts as filled dots, breaks of comparability as hollow ones. */
function drawMarks(plot, series) {
  const pen = plot.ctx, size = 4 * devicePixelRatio;
  series.forEach((one, s) => (one.marks ?? []).forEach((mark, i) => {
    if (!mark || plot.data[s][i] === null) return;
    pen.beginPath();
    pen.arc(plot.valToPos(plot.data[0][i], "x", true), plot.valToPos(plot.data[s][i], "y", true), size, 0, 2 * Math.PI);
    pen.fillStyle = mark === "!" ? colour("--bad") : colour("--paper");
    pen.strokeStyle = colour(mark === "!" ? "--bad" : "--soft");
    pen.lineWidth = devicePixelRatio;
    pen.fill();
    pen.stroke();
  }));
}

function showCursor(plot, one, below, x) {
  const i = plot.cursor.idx;
  below.replaceChildren(...(i === null || i === undefined ? lastValues(one) : valuesAt(one, x, plot.data[0][i])));
}
