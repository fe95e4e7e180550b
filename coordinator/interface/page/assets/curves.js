// Learning curves as small multiples: a chart per task and measure, a line per training, bands of two standard errors. All
// charts share one cursor; a click opens the evaluation of the point.

const BANDS = 4; // trainings in a chart at most, for which bands are drawn
const MEAN = "mean of all tasks"; // as the data name it

if (DATA.kind === "training") PARTS.push({ id: "curves", name: "Curves", make: curvesPart });

/** What the data leave out: places of curves in the training. */
function complete(training) {
  for (const curve of training.curves) {
    curve.at ??= training.points.map((_, i) => i);
    curve.place = new Int32Array(training.points.length).fill(-1);
    curve.at.forEach((at, i) => { curve.place[at] = i; });
  }
}

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
  const groups = new Set([MEAN, ...DATA.trainings.flatMap((t) => t.groups.map(([name]) => name))]);
  const picked = new Set(DATA.trainings.map((_, i) => i)), few = groups.size > 1 ? [["means", "what fell, and means"]] : [];
  const look = { smooth: Number(STATE.get("smooth")) || 0, log: STATE.get("steps") === "log" };
  const grid = el("div", { class: "grid", tabindex: 0, role: "region", "aria-label": "charts: arrow keys move the cursor, Enter opens the evaluation" }), count = el("p", { class: "note", role: "status" });
  let text = sought("chart"), only = STATE.get("show") ?? (few.length ? "means" : "all");
  const kinds = { all: () => true, means: (c) => groups.has(c.task) || kinds.worse(c), worse: (c) => c.lines.some((l) => l.curve.drops.length) };
  const draw = () => {
    const charts = chartsOf(DATA.trainings.filter((_, i) => picked.has(i))).filter((c) => (text ? `${c.suite} ${c.task} ${c.measure}`.toLowerCase().includes(text) : (kinds[only] ?? kinds.all)(c)));
    count.textContent = `${charts.length} chart${charts.length === 1 ? "" : "s"}. Bands: two standard errors. A filled dot marks a checkpoint that shows a score to be worse, dashed lines the levels before and after; a hollow one, a point that is not comparable with the one before. Click a point to open its evaluation. ${DATA.trainings[0]?.along ?? ""}`;
    const fell = (one) => Math.max(-1, ...one.lines.flatMap((l) => l.curve.drops.map((d) => l.curve.at[d.at]))); // the latest first
    grid.replaceChildren(...charts.toSorted((a, b) => fell(b) - fell(a)).map((one) => chart(one, { ...look, large: fell(one) >= 0 })));
  };
  grid.addEventListener("keydown", (event) => moveCursor(event, grid));
  const tools = el("div", { class: "tools" }, choice("show", [...few, ["all", "all tasks"], ["worse", "tasks that are worse"]], (v) => { only = v; draw(); }, "show"), search("find a task", (v) => { text = v; draw(); }, "chart"),
    choice("smoothing", [[0, "none"], [0.6, "some"], [0.85, "strong"]], (v) => { look.smooth = Number(v); draw(); }, "smooth"), choice("steps", [["linear", "linear"], ["log", "logarithmic"]], (v) => { look.log = v === "log"; draw(); }, "steps"));
  const legend = el("fieldset", { class: "legend" }, el("legend", { text: "trainings" }), DATA.trainings.map((training, i) => {
    const box = el("input", { type: "checkbox", checked: true, onchange: () => { box.checked ? picked.add(i) : picked.delete(i); draw(); } });
    return el("label", {}, box, el("span", { class: "swatch", style: { background: line(i) } }), said(`${training.name}, ${training.suite}`));
  }));
  draw();
  return section("curves", "Learning curves", null, worsePart(), tools, DATA.trainings.length > 1 ? legend : null, count, grid);
}

const MOST_WORSE = 5; // drops that are named above the charts

/** How each training stands, in the words of `evalspan status` and `report`; and what fell. */
function worsePart() {
  const drops = DATA.trainings.flatMap((t) => t.drops);
  return el("div", { class: `head ${drops.length ? "failed" : DATA.trainings.some((t) => t.judged) ? "done" : ""}` },
    DATA.trainings.map((t) => [DATA.trainings.length > 1 ? el("p", {}, said(`${t.name}, ${t.suite}`, "said strong")) : null, clausesOf({ clauses: t.clauses.filter((c) => c.compared.length || !t.drops.length) })]),
    drops.slice(0, MOST_WORSE).map((d) => el("p", {}, link(address.evaluation(d.evaluation), said(d.name, "said strong")), ` is ${d.words}`)),
    drops.length > MOST_WORSE ? el("p", {}, el("a", { href: "#part=curves&show=worse", text: `and ${drops.length - MOST_WORSE} more` })) : null);
}

function chart(one, look) {
  const place = el("div", { class: "plot" });
  const values = one.lines.flatMap(({ curve }) => curve.value.filter((v) => v !== null));
  const name = `${one.task} ${one.measure}`;
  const range = values.length ? `${score(Math.min(...values))} to ${score(Math.max(...values))}` : "no values";
  const made = el("figure", { class: look.large ? "large" : null, "aria-label": `${name}, ${range}` }, el("figcaption", {}, said(one.task, "said strong"),
    " ", said(one.measure), one.up ? null : " (lower is better)"), place, readout(one));
  whenSeen(made, () => {
    place.redraw = () => { place.plot?.destroy(); place.replaceChildren(); drawChart(place, one, made.lastChild, look); };
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
    const change = first === null || last === null ? "" : ` (${signed(last - first)} since the first)`;
    const best = curve.best < curve.value.length - 1 ? `, best so far ${score(curve.value[curve.best])} at ${training.points[curve.at[curve.best]].label}` : "";
    return el("span", {}, swatch(training), `${score(last)}${change}${best} `, curve.drops.map((d) => el("b", { text: `${d.words} ` })));
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
  const steps = lines.every(({ training, curve }) => curve.at.every((i) => training.points[i].step !== null));
  return (training, at) => (steps ? training.points[at].step : at);
}

/** Running means that forget by `weight` a point, without a bias to the first. */
function smoothed(values, weight) {
  let [sum, whole] = [0, 0];
  return values.map((v) => {
    if (v === null) return null;
    [sum, whole] = [sum * weight + v, whole * weight + 1];
    return sum / whole;
  });
}

function drawChart(place, one, below, { smooth, log, large }) {
  const x = axisOf(one.lines);
  const xs = [...new Set(one.lines.flatMap(({ training, curve }) => curve.at.map((i) => x(training, i))))].sort((a, b) => a - b).filter((at) => !log || at > 0);
  const column = new Map(xs.map((value, i) => [value, i]));
  const spread = (training, curve, values) => {
    const found = new Array(xs.length).fill(null);
    curve.at.forEach((at, i) => { if (column.has(x(training, at))) found[column.get(x(training, at))] = values[i] ?? null; });
    return found;
  };
  const columns = [xs], series = [{}], bands = [];
  for (const { training, curve } of one.lines) {
    const stroke = line(DATA.trainings.indexOf(training)), points = { show: curve.at.length <= 100, size: 5, fill: stroke };
    columns.push(spread(training, curve, curve.value));
    series.push({ stroke: smooth ? `${stroke}55` : stroke, width: smooth ? 1 : 1.5, spanGaps: true, points: smooth ? { show: false } : points, marks: spread(training, curve, curve.at.map((_, i) => curve.marks[i])), line: { training, curve } });
    if (smooth) {
      columns.push(spread(training, curve, smoothed(curve.value, smooth)));
      series.push({ stroke, width: 2, spanGaps: true, points: { show: false } });
    } else if (one.lines.length <= BANDS && curve.stderr.some((e) => e !== null)) {
      for (const sign of [2, -2]) {
        columns.push(spread(training, curve, curve.value.map((v, i) => (v === null || curve.stderr[i] === null ? null : Math.max(v + sign * curve.stderr[i], Math.min(v, 0))))));
        series.push({ stroke: "transparent", points: { show: false }, spanGaps: true });
      }
      bands.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}26` });
    }
  }
  const ink = colour("--soft"), grid = { stroke: colour("--rule"), width: 1 };
  const axis = { stroke: ink, grid, ticks: grid, font: "12px system-ui" };
  place.plot = new uPlot({
    width: Math.max(220, place.clientWidth), height: large ? 300 : 150, legend: { show: false }, cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false }, sync: { key: "steps", setSeries: false } },
    scales: { x: { time: false, distr: log ? 3 : 1 }, y: { range: (_, low, high) => (high - low < 1e-9 ? [Math.max(low - 0.05, Math.min(low, 0)), high + 0.05] : uPlot.rangeNum(low, high, 0.1, true)) } }, axes: [{ ...axis, size: 30, values: (_, ticks) => ticks.map((t) => (t === null ? "" : NUMBER.format(t))) }, { ...axis, size: 52, space: 24 }],
    series, bands, hooks: { draw: [(plot) => drawLevels(plot, one, x), (plot) => drawMarks(plot, series)], setCursor: [(plot) => showCursor(plot, one, below, x)] },
  }, columns, place);
  place.open = () => openPoint(place.plot, below);
  place.plot.over.addEventListener("click", place.open);
}

/** Arrow keys move the cursor of all charts, Enter opens the point of the first chart. */
function moveCursor(event, grid) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], first = [...grid.querySelectorAll(".plot")].find((place) => place.plot);
  if (!first || event.target !== grid || (!step && event.key !== "Enter")) return;
  event.preventDefault();
  if (event.key === "Enter") return first.open();
  const { plot } = first, at = Math.max(0, Math.min(plot.data[0].length - 1, (plot.cursor.idx ?? plot.data[0].length - 1) + (plot.cursor.idx === null || plot.cursor.idx === undefined ? 0 : step)));
  plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: plot.valToPos(plot.data[1][at] ?? 0, "y") }, true, true);
}

/** Open the evaluation of the point that is nearest to the cursor. */
function openPoint(plot, below) {
  const i = plot.cursor.idx, far = (s) => Math.abs(plot.valToPos(plot.data[s][i], "y") - plot.cursor.top);
  const near = plot.series.map((_, s) => s).filter((s) => plot.series[s].line && plot.data[s][i] !== null && plot.data[s][i] !== undefined).toSorted((a, b) => far(a) - far(b))[0];
  if (near === undefined) return;
  const { training, curve } = plot.series[near].line, x = axisOf(plot.series.flatMap((s) => s.line ?? []));
  const { evaluation_id: id } = training.points[curve.at.find((at) => x(training, at) === plot.data[0][i])];
  if (DATA.mark) location.assign(address.evaluation(id));
  else below.replaceChildren(command(`evalspan report ${quoted(id)}`));
}

/** Of each drop the level before it, up to where it began, and the level after it. */
function drawLevels(plot, { lines }, x) {
  const pen = plot.ctx, [first, last] = [plot.data[0][0], plot.data[0].at(-1)];
  pen.save();
  pen.strokeStyle = colour("--bad");
  pen.lineWidth = 1.5 * devicePixelRatio;
  pen.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const { training, curve } of lines)
    for (const drop of curve.drops) {
      const began = x(training, curve.at[drop.since]);
      for (const [level, from, to] of [[drop.before, first, began], [drop.after, began, last]]) {
        pen.beginPath();
        pen.moveTo(plot.valToPos(from, "x", true), plot.valToPos(level, "y", true));
        pen.lineTo(plot.valToPos(to, "x", true), plot.valToPos(level, "y", true));
        pen.stroke();
      }
    }
  pen.restore();
}

/** Verdicts as filled dots, breaks of comparability as hollow ones. */
function drawMarks(plot, series) {
  const pen = plot.ctx, size = 4 * devicePixelRatio;
  series.forEach((one, s) => (one.marks ?? []).forEach((mark, i) => {
    if (!mark || mark === "↓" || plot.data[s][i] === null) return;
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
